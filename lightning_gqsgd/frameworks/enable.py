"""`enable`: one call for Accelerate and for the Trainer of transformers, which is imported for a Trainer only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.accelerate import GQSGDKwargs, HandlerArguments, enable_accelerator
from lightning_gqsgd.frameworks.distributed import StrategyArguments

if TYPE_CHECKING:
    from transformers import Trainer
    from typing_extensions import Unpack

    from lightning_gqsgd.frameworks.transformers_local import LocalStepsCallback


class EnableArguments(HandlerArguments, StrategyArguments, total=False):
    """Keyword arguments of `enable`: those of `GQSGDKwargs`, and for a Trainer those of local steps."""


def enable(
    target: Accelerator | Trainer, preset: str | GQSGDConfig | None = None, **fields: Unpack[EnableArguments]
) -> GQSGDKwargs | LocalStepsCallback:
    """Compress the gradients of what an Accelerator or a transformers Trainer trains, and keep its other settings.

    What the hook needs to resume goes into checkpoints: of an Accelerator those of ``save_state``, of a Trainer those
    that it writes. A Trainer also logs the hook's counters.

    Args:
        target: an Accelerator that has prepared no model yet, or a Trainer before ``evaluate`` and ``train``.
        preset: name of a preset (default ``gqsgd``), or a configuration.
        **fields: fields of `GQSGDConfig`; fields of DistributedDataParallelKwargs replace the existing handler's. For a
            Trainer, ``local_steps=32``, or the preset ``gqsgd_diloco``, gives local steps without
            DistributedDataParallel, with the fields of `local_steps.options.LocalOptions`.

    Returns:
        The handler, with the state of each model's hook (``states``); for local steps the callback, with ``averages``.

    Raises:
        ConfigError: an argument that cannot work, a target that trains without DDP, has prepared models, or has a
            communication hook already.
    """
    if isinstance(target, Accelerator):
        return enable_accelerator(target, preset, **cast("dict[str, Any]", fields))
    if "transformers.trainer" in sys.modules:  # otherwise the target is no Trainer, and the import takes seconds
        from lightning_gqsgd.frameworks.transformers import Trainer, enable_trainer

        if isinstance(target, Trainer):
            return enable_trainer(target, preset, **fields)
    raise ConfigError(f"{type(target).__name__} is neither an accelerate.Accelerator nor a transformers.Trainer")
