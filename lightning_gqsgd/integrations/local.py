"""Local steps under a strategy of Lightning's Trainer or Fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.integrations.distributed import parameter_names
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.checkpoint import gathered_state, load_gathered
from lightning_gqsgd.local_steps.choosing import asks_for_local_steps, options_of
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.presets import Preset


class Trained(NamedTuple):
    """A module that is trained by local steps, with the optimizers whose steps are counted together."""

    averages: LocalAverages
    module: nn.Module
    optimizers: list[Optimizer]

    def state_dict(self) -> dict[str, Any] | None:
        """What all ranks need to resume, on rank 0; None on the others. A collective."""
        return gathered_state(*self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state_dict`."""
        load_gathered(self.averages, state, self.module, self.optimizers)


class LocalTraining:
    """The local steps of a strategy.

    Args:
        options: when to average.

    Attributes:
        trained: what is trained, in the order in which it was set up.
    """

    def __init__(self, options: LocalOptions) -> None:
        self.options = options
        self.trained: list[Trained] = []
        self._at_anchor = ExitStack()

    @classmethod
    def asked_for(
        cls, preset: str | GQSGDConfig | None, given: Mapping[str, Any], others: Mapping[str, Any]
    ) -> tuple[LocalTraining | None, str | GQSGDConfig | Preset | None]:
        """The local steps that a strategy's arguments ask for, if any, and the compression.

        Args:
            preset: the strategy's argument.
            given: fields of `LocalOptions` among the arguments; None: not given.
            others: all further arguments.

        Raises:
            ConfigError: a value that cannot work, or arguments of which one does nothing beside the others.
        """
        if not asks_for_local_steps(preset, given):
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
    ) -> Trained:
        """Begin with a module and its optimizers. A collective."""
        averages = LocalAverages(module, optimizers, self.options, config, timeout=timeout)
        self.trained.append(Trained(averages, module, list(optimizers)))
        return self.trained[-1]

    def count(self, optimizer: Optimizer) -> None:
        """Count a step. Where several optimizers are counted together, the steps of the first one count."""
        for averages, _, optimizers in self.trained:
            if optimizer is optimizers[0]:
                averages.advance()

    def lend_anchors(self) -> None:
        """Give the modules the anchors' values until `take_back`."""
        self.take_back()
        for averages, _, _ in self.trained:
            self._at_anchor.enter_context(averages.at_anchor())

    def take_back(self) -> None:
        """Give the modules this rank's own values again."""
        self._at_anchor.close()

    def finish(self) -> None:
        """Make the last averages."""
        for averages, _, _ in self.trained:
            averages.finish()

    def close(self) -> None:
        """Stop threads and process groups."""
        for averages, _, _ in self.trained:
            averages.close()


#: Arguments of Lightning's DDPStrategy that are about DistributedDataParallel.
_OF_DDP_STRATEGY = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
