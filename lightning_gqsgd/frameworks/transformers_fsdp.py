"""The Trainer of Hugging Face transformers with FSDP2: the hooks on the model that the Trainer shards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from lightning_gqsgd.frameworks.fsdp_starting import check_request
from lightning_gqsgd.frameworks.transformers_local import MeteredCallback
from lightning_gqsgd.presets import Preset, make_config
from lightning_gqsgd.wire.announcing import print_to_stderr
from lightning_gqsgd.wire.telemetry import Meter

logger = logging.getLogger(__name__)


class FSDPCallback(MeteredCallback):
    """Registers the hooks on the sharded model, logs their counters, and saves and restores their state.

    Attributes:
        state: the state of the hooks; None before the first training.
    """

    state_file = "gqsgd_fsdp.pt"

    def __init__(self, trainer: Trainer, arguments: dict[str, Any]) -> None:
        super().__init__(trainer)
        self.state: GQSGDFSDPState | None = None
        self._arguments = arguments  # those of `register_gqsgd_fsdp`

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register the hooks, unless an earlier training has, and restore their state.

        Raises:
            ConfigError: the model cannot work, or ranks see different checkpoints.
        """
        model = _sharded(self._trainer.model)
        is_primary = self._trainer.accelerator.is_main_process
        if self.state is None or not self.state.is_on(model):
            self.state = register_gqsgd_fsdp(model, **self._arguments)
            if is_primary:
                print_to_stderr(self.state.report())
        saved = self.read()
        if saved is not None:
            self.state.load_state_dict(saved)
        elif self.resumes_from is not None and is_primary:
            logger.warning(
                "gqsgd: %s has no %s of its own, so the dither of the hooks goes on from step %d",
                self.resumes_from,
                self.state_file,
                self.state.step,
            )
        self._meter = Meter(self.state.telemetry)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report bytes, bits and waiting on rank 0."""
        if self.state is not None and state.is_world_process_zero and self.state.telemetry.steps:
            print_to_stderr(self.state.summary_line())

    def save(self, folder: Path) -> None:
        if self.state is not None:
            self.write(self.state.state_dict(), folder)


def enable_fsdp(
    trainer: Trainer,
    preset: str | GQSGDConfig | Preset | None,
    *,
    reduce_scatter: bool | None = None,
    all_gather_bits: int | None = None,
    **fields: Any,
) -> FSDPCallback:
    """Compress what FSDP2 sends in a Trainer; see `enable.enable`.

    Raises:
        ConfigError: an argument that cannot work, or gqsgd is enabled already.
    """
    if any(isinstance(callback, FSDPCallback) for callback in trainer.callback_handler.callbacks):
        raise ConfigError("gqsgd is enabled already; enable it once, with all fields")
    config = make_config(preset, **fields)
    replicas = _replicas(trainer.accelerator)
    if reduce_scatter is None:
        reduce_scatter = replicas is None  # replicas are nodes, and shards inside of a node have fast links
    check_request(config, replicas, reduce_scatter, all_gather_bits)
    arguments = {"reduce_scatter": reduce_scatter, "all_gather_bits": all_gather_bits, "replicate": replicas}
    return FSDPCallback(trainer, {"preset": config, **arguments})


def _replicas(accelerator: Any) -> dist.ProcessGroup | None:
    """Returns the ranks that have the same shards as this one, for ``dp_replicate_size``; None: it is 1."""
    layout = getattr(accelerator, "parallelism_config", None)
    if layout is None or not layout.dp_replicate_enabled:
        return None
    group: dist.ProcessGroup = accelerator.torch_device_mesh["dp_replicate"].get_group()
    return group


def _sharded(model: Any) -> nn.Module:
    """Returns the module that was sharded. Accelerate compiles first, so this may be the module of torch.compile.

    Raises:
        ConfigError: the Trainer's model is not sharded.
    """
    for module in (model, getattr(model, "_orig_mod", None)):
        if isinstance(module, FSDPModule):
            return cast("nn.Module", module)
    raise ConfigError(
        f"the Trainer has not sharded its model, a {type(model).__name__}, by fully_shard; give the Trainer the module "
        'itself, and fsdp_config={"fsdp_version": 2}'
    )
