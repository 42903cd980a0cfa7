"""The Fabric strategy, for both flavours of Lightning: `fabric_lightning` and `fabric_lightning_fabric`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import optim
from torch.nn import Module

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.frameworks.distributed import (
    CHECKPOINT_KEY,
    HookStates,
    StrategyArguments,
    after_setup,
    start_anew,
    takes,
)
from lightning_gqsgd.frameworks.local import StrategyMixin, TrainedModule
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.watching import digest_of_tensors
from lightning_gqsgd.session.checkpoint import is_of_local_steps
from lightning_gqsgd.session.parameters import parameters_of
from lightning_gqsgd.wire.agreement import digest_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: Said where a script may restore the weights and the optimizer by itself, from what `fabric.load` returns.
_LEFT_IN_CHECKPOINT = (
    f"gqsgd: the checkpoint's entry {CHECKPOINT_KEY!r} is left unread, because fabric.load was given no optimizer; to "
    "resume the training, give it the model and the optimizer as fabric.save got them, or what the entry holds starts "
    "anew"
)


class FabricMixin(StrategyMixin):
    """DDP with quantised gradients.

    A checkpoint that has an optimizer also has the states of the hooks on its models, in the order in which the models
    were set up. Loading such a checkpoint restores the states in this order, on models that are set up before or after
    loading.

    With local steps (``local_steps=32``, or the preset ``gqsgd_diloco``), each rank trains its modules without
    DistributedDataParallel, and the changes are averaged every ``local_steps`` steps of an optimizer. Call
    ``fabric.strategy.finish()`` on every rank at the end of training, for the last average. With several optimizers,
    the parameters of each optimizer are averaged separately.

    Args:
        preset: name of a preset (default ``gqsgd``, and with local steps ``gqsgd_diloco``), or a configuration.
        **kwargs: fields of `GQSGDConfig` (None keeps the preset's value), arguments of Fabric's DDPStrategy, and of
            DistributedDataParallel; for local steps, ``local_steps`` (steps between two averages) and the other fields
            of `local_steps.options.LocalOptions`.

    Attributes:
        gqsgd_states: the state of each model's hook, in the order in which the models were set up; with local steps,
            the averages of each optimizer.

    Raises:
        ConfigError: for an unknown argument, or a value that cannot work.
    """

    _backward_sync_control: Any  # Fabric's

    @overload
    def __init__(self, preset: str | GQSGDConfig | None = None, **kwargs: Unpack[StrategyArguments]) -> None: ...

    @overload
    def __init__(self, preset: str | GQSGDConfig | None = None, **kwargs: Any) -> None: ...

    # Editors read the first overload. The second one has Lightning's arguments.
    @takes(StrategyArguments)
    def __init__(self, preset: str | GQSGDConfig | None = None, **kwargs: Any) -> None:
        super().__init__(**self._configure(preset, kwargs))
        self._modules: list[Module] = []
        if self._local is not None:
            self._backward_sync_control = _NothingToBlock()
        self._hooks = HookStates()
        self._loaded: list[dict[str, Any]] = []

    @property
    def gqsgd_states(self) -> list[GQSGDState] | list[LocalAverages | MergedAverages]:
        """The state of the hook on each model that still exists, or each optimizer's averages with local steps, in the
        order of set-up."""
        if self._local is not None:
            return [trained.averages for trained in self._local.trained]
        return [state for state, _ in self._hooks.with_models()]

    def _heads_of(self, state: dict[str, Any]) -> Sequence[GQSGDState | TrainedModule]:
        """Returns the objects whose states belong to a checkpoint: those of the models whose parameters are in it,
        or in its optimizers. Models of earlier set-ups may still exist, for example those of other folds."""
        heads: list[tuple[GQSGDState | TrainedModule, Module]] = list(self._hooks.with_models())
        if self._local is not None:
            heads = [(trained, trained.module) for trained in self._local.trained]
        own = {id(parameter) for module in _modules_in(state) for parameter in module.parameters()}
        own |= {id(parameter) for parameter in parameters_of(_optimizers_in(state))}
        return [head for head, model in heads if not own.isdisjoint(map(id, model.parameters()))]

    def setup_module(self, module: Module) -> Any:
        """Wrap a model and install the hook; with local steps, leave the model as it is."""
        if self._local is not None:
            # Those of an earlier fold or trial, which its user has finished and closed.
            closed = {id(own) for own in self._local.forget_closed()}
            self._modules = [own for own in self._modules if id(own) not in closed]
            self._modules.append(module)
            return module
        model = super().setup_module(module)
        state = register_gqsgd(model, self.gqsgd_config, timeout=self._timeout)
        self._hooks.add(state)
        self._restore([state])
        state.announce(self._rank_zero_info)
        return model

    def setup_optimizer(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """With local steps, start to average the parameters of an optimizer. Its model has to be set up before."""
        optimizer = super().setup_optimizer(optimizer)
        if self._local is not None:
            trained = self._local.begin(self._module_of(optimizer), [optimizer], self.gqsgd_config, self._timeout)
            self._restore([trained])
            self._rank_zero_info(trained.averages.report())
        return optimizer

    def finish(self) -> None:
        """Make the last averages of local steps. Every rank has to call this after training. Without local steps, it
        does nothing."""
        if self._local is not None:
            self._local.finish()
            self._check_modules_without_optimizer()

    def _check_modules_without_optimizer(self) -> None:
        """Raise ConfigError on all ranks where a module that has no optimizer here differs between them. A collective.

        Models that nobody trains, such as a teacher, are equal.
        """
        assert self._local is not None
        trained = {id(own.module) for own in self._local.trained}
        others = [module for module in self._modules if id(module) not in trained]
        if not others or self.world_size == 1:
            return
        digest = digest_of(" ".join(str(digest_of_tensors(dict(module.named_parameters()))) for module in others))
        most = torch.tensor([digest, -digest], device=self.root_device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if most[0] != -most[1]:  # the largest and the smallest differ
            names = ", ".join(type(module).__name__ for module in others)
            raise ConfigError(
                f"{names}: it was set up and trained without its optimizer, so nothing has averaged it, and ranks have "
                "different ones; call fabric.setup(model, optimizer), or fabric.setup_optimizers(optimizer), and step "
                "what it returns"
            )

    def _module_of(self, optimizer: optim.Optimizer) -> Module:
        """Returns the module that was set up and has an optimizer's parameters."""
        own = {id(parameter) for parameter in parameters_of([optimizer])}
        parts = [(module, own & {id(parameter) for parameter in module.parameters()}) for module in self._modules]
        models = [module for module, part in parts if part]
        # An earlier set-up may have had the same module.
        whole = next((module for module, part in parts if part == own), None)
        if not models:
            raise ConfigError("the optimizer's model is not set up; call fabric.setup(model, optimizer) for both")
        if whole is None and len(models) > 1:
            names = ", ".join(type(model).__name__ for model in models)
            raise ConfigError(
                f"the optimizer has parameters of several models ({names}), and with local steps it can have those of "
                "one: set up one model of all, such as torch.nn.ModuleList([encoder, decoder]), or give each model an "
                "optimizer of its own"
            )
        return models[0] if whole is None else whole

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, with the states of the hooks if it has an optimizer. A collective."""
        heads = self._heads_of(state) if _is_to_resume(state) else []
        if heads:
            if CHECKPOINT_KEY in state:
                raise ConfigError(f"the key {CHECKPOINT_KEY!r} of a checkpoint is the strategy's; take another name")
            state = {**state, CHECKPOINT_KEY: [head.state_dict() for head in heads]}
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore the hooks if the checkpoint restores an optimizer; otherwise leave the hooks as they are, and say so
        if the checkpoint has their states.

        With local steps, if the checkpoint has weights but no state of local steps, local steps start again from these
        weights, and this is a collective.
        """
        remainder: dict[str, Any] = super().load_checkpoint(path, state, *args, **kwargs)
        if _is_to_resume(state):
            heads = self._heads_of(state)
            saved = remainder.pop(CHECKPOINT_KEY, None)
            loaded = self._usable(saved, is_local=bool(saved) and all(map(is_of_local_steps, saved)))
            if loaded is not None:
                _check_count(loaded, state, heads)  # before anything is kept
            self._loaded = loaded or []
            if loaded is not None:
                self._restore(heads)
                return remainder
            start_anew(head for head in heads if isinstance(head, GQSGDState))
        elif isinstance(remainder, dict) and CHECKPOINT_KEY in remainder:
            self._rank_zero_info(_LEFT_IN_CHECKPOINT)
        if self._local is not None:
            self._local.start_anew(_modules_in(state))
        return remainder

    def _restore(self, heads: Sequence[GQSGDState | TrainedModule]) -> None:
        """Load the states of these, in order; the others are kept for models that are not set up yet."""
        for head, loaded in zip(heads, self._loaded, strict=False):
            head.load_state_dict(loaded)
        self._loaded = self._loaded[len(heads) :]

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        after_setup(self.world_size)


class _NothingToBlock:
    """Fabric's control of gradients' averages in the backward pass, where there are none."""

    def no_backward_sync(self, module: Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context that does nothing."""
        return nullcontext()


def _check_count(loaded: Sequence[Any], state: dict[str, Any], heads: Sequence[Any]) -> None:
    """Raise ConfigError if a checkpoint has the states of fewer or more models than it is loaded into."""
    most = max(len(heads), len(_modules_in(state))) or len(loaded)  # some may not be set up yet
    if not len(heads) <= len(loaded) <= most:
        raise ConfigError(
            f"the checkpoint has the hook's state of {counted(len(loaded), 'model')}, and it is loaded into "
            f"{len(heads) or most}; give fabric.load the models that were in the checkpoint when it was saved"
        )


def _optimizers_in(state: dict[str, Any]) -> list[optim.Optimizer]:
    """Returns the optimizers that are in a checkpoint."""
    return [value for value in state.values() if isinstance(value, optim.Optimizer)]


def _modules_in(state: Any) -> list[Module]:
    """Returns the modules that a checkpoint is loaded into."""
    if isinstance(state, Module):
        return [state]
    return [value for value in state.values() if isinstance(value, Module)] if isinstance(state, dict) else []


def _is_to_resume(state: Any) -> bool:
    """Returns whether a checkpoint is one that training resumes from: it holds an optimizer beside the weights."""
    return isinstance(state, dict) and bool(_optimizers_in(state))
