"""`enable`: one call for Accelerate and for the Trainer of transformers. It imports transformers only for a Trainer."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

from accelerate import Accelerator

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.accelerate import GQSGDKwargs, HandlerArguments, enable_accelerator
from lightning_gqsgd.frameworks.distributed import StrategyArguments

if TYPE_CHECKING:
    from transformers import Trainer
    from typing_extensions import Unpack

    from lightning_gqsgd.frameworks.transformers_fsdp import FSDPCallback
    from lightning_gqsgd.frameworks.transformers_local import LocalStepsCallback


class EnableArguments(HandlerArguments, StrategyArguments, total=False):
    """Keyword arguments of `enable`: those of `GQSGDKwargs`, and for a Trainer those of local steps and of FSDP2."""

    reduce_scatter: bool
    all_gather_bits: int | None
    timeout: timedelta | str


def enable(
    target: Accelerator | Trainer, preset: str | GQSGDConfig | None = None, **fields: Unpack[EnableArguments]
) -> GQSGDKwargs | LocalStepsCallback | FSDPCallback:
    """Compress the gradients of an Accelerator or of a transformers Trainer, and keep its other settings.

    The hook's state is added to checkpoints: those of an Accelerator's ``save_state``, or those that a Trainer writes.
    A Trainer also logs the hook's counters.

    Args:
        target: an Accelerator that has prepared no model yet, or a Trainer before ``evaluate`` and ``train``.
        preset: name of a preset (default ``gqsgd``), or a configuration.
        **fields: fields of `GQSGDConfig`, and fields of DistributedDataParallelKwargs, which override those of an
            existing handler. For a Trainer, ``local_steps=32`` or the preset ``gqsgd_diloco`` selects local steps
            without DistributedDataParallel; the fields of `local_steps.options.LocalOptions` are arguments then, and so
            is ``timeout``, that of the averages, a timedelta or a text such as ``"5min"``. A Trainer with FSDP2
            (``fsdp_version=2``) takes ``all_gather_bits`` and ``reduce_scatter`` instead of those of
            DistributedDataParallelKwargs, see `fsdp.register_gqsgd_fsdp`. With replicas (``dp_replicate_size``), the
            means over these are compressed; without, ``reduce_scatter`` is True unless it is given.

    Returns:
        The handler, whose ``states`` are the states of the hooks; with local steps, a callback that has ``averages``;
        with FSDP2, a callback whose ``state`` is the state of the hooks.

    Raises:
        ConfigError: if an argument cannot work, or if the target trains with neither DDP nor, in a Trainer, FSDP2, has
            prepared models already, or has a communication hook already.
    """
    if isinstance(target, Accelerator):
        return enable_accelerator(target, preset, **cast("dict[str, Any]", fields))
    if "transformers.trainer" in sys.modules:  # otherwise the target is not a Trainer, and the import takes seconds
        from lightning_gqsgd.frameworks.transformers import Trainer, enable_trainer

        if isinstance(target, Trainer):
            return enable_trainer(target, preset, **fields)
    raise ConfigError(
        f"{type(target).__name__} is neither an accelerate.Accelerator nor a transformers.Trainer; for a "
        "DistributedDataParallel model, call register_gqsgd"
    )
