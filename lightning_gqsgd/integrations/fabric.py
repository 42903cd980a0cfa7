"""The Fabric strategy, for both flavours of Lightning: `fabric_lightning` and `fabric_lightning_fabric`."""

from __future__ import annotations

from typing import Any

from torch import optim
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.integrations.distributed import CHECKPOINT_KEY, after_setup, on_nodes, split_arguments

_Base: Any = object  # each flavour's DDPStrategy


class FabricMixin(_Base):
    """DDP with quantised gradients.

    Checkpoints that hold an optimizer also hold the states of the hooks. Loading such a checkpoint restores the states,
    in the order in which the models are set up, whether they are set up before or after.

    Args:
        preset: name of a preset (default ``gqsgd``), or a configuration.
        **kwargs: fields of `GQSGDConfig`, arguments of Fabric's DDPStrategy, and of DistributedDataParallel.

    Attributes:
        gqsgd_states: the state of each model's hook, in the order in which models were set up.

    Raises:
        ConfigError: an unknown argument, or a value that cannot work.
    """

    def __init__(self, preset: str | GQSGDConfig | None = None, **kwargs: Any) -> None:
        (base,) = (ancestor for ancestor in type(self).__mro__ if ancestor.__name__ == "DDPStrategy")
        self.gqsgd_config, rest = split_arguments(type(self), base, preset, kwargs)
        super().__init__(**rest)
        self.gqsgd_states: list[GQSGDState] = []
        self._loaded: list[dict[str, Any]] = []

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Nothing: the names are registered when the package is imported."""

    def setup_module(self, module: Module) -> DistributedDataParallel:
        """Wrap a model and install the hook."""
        model = super().setup_module(module)
        config = on_nodes(self.gqsgd_config, self.num_processes)
        state = register_gqsgd(model, config, timeout=self._timeout)
        self.gqsgd_states.append(state)
        self._restore([state])
        self._rank_zero_info(state.report())
        return model

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Add the states of the hooks to what a run resumes from: whatever has an optimizer. A collective."""
        if _is_to_resume(state) and self.gqsgd_states:
            if CHECKPOINT_KEY in state:
                raise ConfigError(f"the key {CHECKPOINT_KEY!r} of a checkpoint is the strategy's; take another name")
            state = {**state, CHECKPOINT_KEY: [hook.state_dict() for hook in self.gqsgd_states]}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore the hooks if the checkpoint restores an optimizer; otherwise leave the hooks as they are."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if _is_to_resume(state):
            loaded = remainder.pop(CHECKPOINT_KEY, None)
            if loaded is None:
                self._rank_zero_info("gqsgd: the checkpoint was written without gqsgd; its dither starts anew")
            elif len(loaded) < len(self.gqsgd_states):
                raise ConfigError(
                    f"the checkpoint has the hook's state of {counted(len(loaded), 'model')}, this run has set up "
                    f"{len(self.gqsgd_states)}; set up those of the run that wrote it, in the same order"
                )
            self._loaded = loaded or []
            self._restore(self.gqsgd_states)
        return remainder

    def _restore(self, states: list[GQSGDState]) -> None:
        """Load the states of these hooks, in order; the others are kept for models that are not set up yet."""
        for state, loaded in zip(states, self._loaded, strict=False):
            state.load_state_dict(loaded)
        self._loaded = self._loaded[len(states) :]

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        after_setup(self.world_size)

    def _rank_zero_info(self, text: str) -> None:
        raise NotImplementedError


def _is_to_resume(state: Any) -> bool:
    """Whether a checkpoint is one that training resumes from: it holds an optimizer beside the weights."""
    return isinstance(state, dict) and any(isinstance(value, optim.Optimizer) for value in state.values())
