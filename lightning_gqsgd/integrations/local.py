"""Local steps under a Trainer's strategy: one training at a time, with all optimizers of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.integrations.distributed import parameter_names
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.checkpoint import gathered_state, load_gathered
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.presets import LOCAL_PRESETS, options_of


class LocalTraining:
    """The local steps of a strategy: made anew for each fit.

    Args:
        options: when to average.

    Attributes:
        averages: those of the current, or latest, fit; None before the first.
    """

    def __init__(self, options: LocalOptions) -> None:
        self.options = options
        self.averages: LocalAverages | None = None
        self._module: nn.Module = nn.Module()
        self._optimizers: list[Optimizer] = []

    @classmethod
    def asked_for(
        cls, preset: str | GQSGDConfig | None, given: Mapping[str, Any], others: Mapping[str, Any]
    ) -> tuple[LocalTraining | None, str | GQSGDConfig | None]:
        """The local steps that a strategy's arguments ask for, if any, and the preset of the compression.

        Args:
            preset: the strategy's argument.
            given: fields of `LocalOptions` among the arguments; None: not given.
            others: all further arguments.

        Raises:
            ConfigError: a value that cannot work, or arguments of which one does nothing beside the others.
        """
        if given["every"] is None and not (isinstance(preset, str) and preset in LOCAL_PRESETS):
            alone = [f"{name}={value!r}" for name, value in given.items() if value is not None]
            if alone:
                raise ConfigError(
                    f"{', '.join(alone)} is for local steps; give local_steps=32 as well, or leave it out"
                )
            return None, preset
        of_ddp = [name for name in others if name in (*parameter_names(DistributedDataParallel), *_OF_DDP_STRATEGY)]
        if of_ddp:
            raise ConfigError(
                f"local steps train the module itself, without DistributedDataParallel, for which {', '.join(of_ddp)} "
                "is; leave it out"
            )
        options, compression = options_of(preset, given)
        return cls(options), compression

    def begin(
        self, module: nn.Module, optimizers: Sequence[Optimizer], config: GQSGDConfig, timeout: timedelta | None
    ) -> None:
        """Begin with a module and its optimizers. A collective."""
        if self.averages is not None:
            self.averages.close()
        self._module, self._optimizers = module, list(optimizers)
        self.averages = LocalAverages(module, self._optimizers, self.options, config, timeout=timeout)

    def count(self, optimizer: Optimizer) -> None:
        """Count a step. With several optimizers, those of the first one count."""
        if self.averages is not None and optimizer is self._optimizers[0]:
            self.averages.advance()

    def finish(self) -> None:
        """Make the last average."""
        if self.averages is not None:
            self.averages.finish()

    def save(self) -> dict[str, Any] | None:
        """What all ranks need to resume, on rank 0; None on the others. A collective."""
        return None if self.averages is None else gathered_state(self.averages, self._module, self._optimizers)

    def load(self, state: Mapping[str, Any] | None) -> bool:
        """Resume from `save`; False: the state has no local steps."""
        if self.averages is None or state is None or "ranks" not in state:
            return False
        load_gathered(self.averages, state, self._module, self._optimizers)
        return True

    def report(self) -> str:
        """One line that says what is averaged how often."""
        return "" if self.averages is None else self.averages.report()


#: Arguments of Lightning's DDPStrategy that are about DistributedDataParallel.
_OF_DDP_STRATEGY = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
