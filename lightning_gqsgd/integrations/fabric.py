"""The Fabric strategy, for both flavours of Lightning: `fabric_lightning` and `fabric_lightning_fabric`."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.integrations.distributed import after_setup, split_arguments

_Base: Any = object  # each flavour's DDPStrategy


class FabricMixin(_Base):
    """DDP with quantised gradients.

    Args:
        preset: name of a preset (default ``gqsgd``).
        **kwargs: fields of `GQSGDConfig`, arguments of Fabric's DDPStrategy, and of DistributedDataParallel.

    Attributes:
        gqsgd_states: the state of each model's hook, in the order in which models were set up.

    Raises:
        ConfigError: an unknown argument, or a value that cannot work.
    """

    def __init__(self, *, preset: str | None = None, **kwargs: Any) -> None:
        (base,) = (one for one in type(self).__mro__ if one.__name__ == "DDPStrategy")
        self.gqsgd_config, rest = split_arguments(type(self), base, preset, kwargs)
        super().__init__(**rest)
        self.gqsgd_states: list[GQSGDState] = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are registered when the package is imported."""

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wrap a model and install the hook."""
        model = super().setup_module(module)
        state = register_gqsgd(model, timeout=self._timeout, **self.gqsgd_config.to_dict())
        self.gqsgd_states.append(state)
        self._rank_zero_info(state.report())
        return model

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        after_setup(self.world_size)

    def _rank_zero_info(self, text: str) -> None:
        raise NotImplementedError
