"""Which parameters of a DDP model are trained, and whether DDP still reduces them.

DDP fixes what it reduces when it is built: it hooks onto the gradient accumulators of the parameters that require a
gradient then. It never looks again. A parameter that is unfrozen, replaced or added later trains on each rank's own
gradient, and so does one that is cast or moved, because PyTorch gives it a new accumulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.errors import ConfigError, listed
from lightning_gqsgd.session.parameters import Parameter

_REMEDY = (
    "DistributedDataParallel, which therefore does not reduce it: each rank would train its own. {advice} before the "
    "forward pass and wrap anew: `model = state.rewrap(DistributedDataParallel)`. (The Lightning strategy does this at "
    "the start of a batch, for what was {done} by then.)"
)


class Unreduced(NamedTuple):
    """Names of the parameters that require a gradient although DDP does not reduce them.

    Attributes:
        unfrozen: those that required no gradient when DDP was built.
        new: those that the module did not have then, under any name.
        moved: those that were cast or moved to another device since then.
    """

    unfrozen: list[str]
    new: list[str]
    moved: list[str]


class TrainedParameters:
    """The parameters that a DDP model reduces, and what has become of them.

    Args:
        model: the DDP model.
        entries: number, name and size of each parameter of its module, by the id of the parameter.

    Attributes:
        reduced: the parameters that DDP reduces, by name, in the order of the module.
        parameters: their entries, in the same order.
    """

    def __init__(self, model: DistributedDataParallel, entries: Mapping[int, Parameter]) -> None:
        self._ignored = set(model.parameters_to_ignore)
        parameters = self._of(model.module)
        self.reduced: dict[str, nn.Parameter] = {name: p for name, p in parameters.items() if p.requires_grad}
        self._unreduced: dict[str, nn.Parameter] = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.parameters = [entries[id(p)] for p in self.reduced.values()]
        self._new: dict[str, nn.Parameter] = {}  # those that the module has now and DDP has never seen
        self._removed: set[str] = set()  # names of those that have left the module
        self._tree: _Tree | None = _Tree(model.module)
        self._accumulators = _Accumulators(self.reduced)

    @property
    def unfrozen(self) -> list[str]:
        """Names of parameters that require a gradient now although DDP does not reduce them."""
        return [name for names in self._unreduced_now() for name in names]

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that DDP reduces although they require no gradient any more, or have left the module."""
        self._look()
        return [name for name, p in self.reduced.items() if not p.requires_grad or name in self._removed]

    def check(self) -> None:
        """Raise ConfigError if DDP does not reduce a parameter that requires a gradient.

        It takes about ten microseconds for a thousand parameters, see `_Tree`.
        """
        unfrozen, new, moved = self._unreduced_now()
        if unfrozen:
            raise ConfigError(
                f"parameter {listed(unfrozen)} requires a gradient, but did not when the model was wrapped in "
                + _REMEDY.format(advice="Unfreeze it", done="unfrozen")
            )
        if new:
            raise ConfigError(
                f"parameter {listed(new)} was added to the module, or took the place of another one, after the model "
                "was wrapped in " + _REMEDY.format(advice="Change the module, and tell the optimizer,", done="changed")
            )
        if moved:
            raise ConfigError(
                f"parameter {listed(moved)} was cast to another dtype or moved to another device after the model was "
                "wrapped in " + _REMEDY.format(advice="Cast it", done="cast")
            )

    def left_behind(self, reducer: Any) -> dict[str, Tensor]:
        """The gradients of the parameters in `frozen`, by name; of those that have one.

        In the middle of an accumulation they are this rank's own, which DDP would have averaged later.

        Args:
            reducer: DDP's, which is not used any more.

        Raises:
            ConfigError: DDP still waits for gradients of the last backward pass.
        """
        frozen = self.frozen
        try:
            # The only way to ask, which the next forward pass would go. After the first step it is a collective, which
            # all ranks come to because wrapping anew is one.
            reducer._rebuild_buckets()
        except RuntimeError as error:
            names = listed(frozen) if frozen else "that the last backward pass did not reach"
            raise ConfigError(
                f"parameter {names} was frozen after the forward pass had begun, so that DDP still waits "
                "for its gradient, and no rank got the others' gradients. Freeze it before the forward pass (in "
                "Lightning: in on_train_batch_start, or earlier), or wrap with find_unused_parameters=True"
            ) from error
        gradients = {name: self.reduced[name].grad for name in frozen}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def new_in(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a module that this object has not seen, by name."""
        seen = {id(p) for known in (self.reduced, self._unreduced) for p in known.values()}
        return {name: p for name, p in module.named_parameters() if id(p) not in seen}

    def forget(self) -> None:
        """Let go of the parameters, so that whoever keeps the counters does not keep the model."""
        self.reduced = {}
        self._unreduced = {}
        self._new = {}
        self._tree = None
        self._accumulators = _Accumulators({})

    def _of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a module that DDP was not told to ignore, by name."""
        return {name: p for name, p in module.named_parameters() if name not in self._ignored}

    def _look(self) -> None:
        """Note which parameters are new in the module, and which have left it."""
        if self._tree is None or not self._tree.has_changed():
            return
        module = self._tree.module
        now = self._of(module)
        known = {**self._unreduced, **self.reduced}
        self._tree = _Tree(module)
        known_ids = set(map(id, known.values()))
        self._new = {name: p for name, p in now.items() if id(p) not in known_ids}
        present_ids = set(map(id, now.values()))
        self._removed = {name for name, p in known.items() if id(p) not in present_ids}

    def _unreduced_now(self) -> Unreduced:
        self._look()
        unfrozen = [name for name, p in self._unreduced.items() if p.requires_grad and name not in self._removed]
        new = [name for name, p in self._new.items() if p.requires_grad]
        moved = [name for name in self._accumulators.lost() if name not in self._removed]
        return Unreduced(unfrozen, new, moved)


class _Registrations:
    """Counts how often a module of this process was given a parameter or a module.

    Attributes:
        count: the number so far, since the first call of `watch`.
    """

    count = 0
    _is_watching = False

    @classmethod
    def watch(cls) -> None:
        """Count from now on."""
        if not cls._is_watching:
            cls._is_watching = True
            register_module_parameter_registration_hook(cls._note)
            register_module_module_registration_hook(cls._note)

    @classmethod
    def _note(cls, module: nn.Module, name: str, value: object) -> None:
        cls.count += 1


class _Tree:
    """The modules and parameters of a module, as the objects that they were when this was made.

    A walk through the tree takes a millisecond for a thousand parameters, and a comparison of all its dictionaries
    50 microseconds. So all of them are compared only after some module of the process was given a parameter or a
    module. Who writes into ``module._parameters`` without PyTorch's knowledge is found within `PARTS` calls.

    Attributes:
        module: the root.
    """

    #: Calls of `has_changed` in which all dictionaries are compared, a part in each.
    PARTS = 8

    def __init__(self, module: nn.Module) -> None:
        _Registrations.watch()
        self.module = module
        self._count = _Registrations.count
        self._next = 0
        contents: list[dict[str, Any]] = [
            part for each in module.modules() for part in (each._parameters, each._modules)
        ]
        self._parts = [contents[first :: self.PARTS] for first in range(self.PARTS)]
        self._before = [[dict(content) for content in part] for part in self._parts]
        # Two parameters with one equal coordinate each are equal to Python, though not the same.
        self._single = [
            (content, name, value)
            for content in contents
            for name, value in content.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]

    def has_changed(self) -> bool:
        """Whether a module or parameter was replaced, added or removed."""
        if self._count != _Registrations.count:
            self._count = _Registrations.count
            has_other_single = any(content.get(name) is not value for content, name, value in self._single)
            return has_other_single or any(map(self._has_changed, range(self.PARTS)))
        self._next = (self._next + 1) % self.PARTS
        return self._has_changed(self._next)

    def _has_changed(self, part: int) -> bool:
        try:
            # Python compares identities first, so that equal dictionaries cost little.
            return self._parts[part] != self._before[part]
        except RuntimeError:  # another tensor, whose comparison has more than one result
            return True


class _Token:
    """Lives as long as a storage that refers to it, and then names the parameters that had the storage."""

    def __init__(self, names: list[str], gone: set[str]) -> None:
        self._names = names
        self._gone = gone

    def __del__(self) -> None:
        self._gone.update(self._names)


class _Accumulators:
    """The gradient accumulators that DDP has hooked onto.

    ``parameter.data = other``, by which ``Module.to`` casts and moves, gives the parameter another accumulator if dtype
    or device change, even if they change back. To ask every parameter for its accumulator takes 5 microseconds each.
    So each storage of a parameter carries a token, which is freed with it, and only the parameters whose storage has
    gone are asked.

    Args:
        parameters: the parameters that DDP reduces, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._gone: set[str] = set()
        self._nodes: dict[str, Node] = {name: get_gradient_edge(p).node for name, p in parameters.items()}
        self._mark(parameters)

    def lost(self) -> list[str]:
        """Names of the parameters that have another accumulator now, of those that require a gradient."""
        if not self._gone:
            return []
        asked = {name: p for name in sorted(self._gone) if (p := self._parameters.get(name)) is not None}
        lost = [name for name, p in asked.items() if p.requires_grad and not self._has_its_own(name, p)]
        kept = {name: p for name, p in asked.items() if p.requires_grad and name not in lost}
        self._gone.difference_update(kept)  # those that are frozen are asked again once they are trained
        self._mark(kept)
        return lost

    def _has_its_own(self, name: str, parameter: nn.Parameter) -> bool:
        return get_gradient_edge(parameter).node is self._nodes[name]

    def _mark(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the storage of each parameter carry a token; several parameters may share one."""
        shared: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            shared.setdefault(parameter.untyped_storage()._cdata, []).append(name)
        for names in shared.values():
            storage = parameters[names[0]].untyped_storage()
            storage._gqsgd_token = _Token(names, self._gone)  # type: ignore[attr-defined]


def average(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over ranks, uncompressed. A collective."""
    for gradient in gradients:
        dist.all_reduce(gradient.div_(group.size()), group=group)


def start_alike(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Give parameters the values that they have on the group's first rank. A collective."""
    first = dist.get_global_rank(group, 0)
    for parameter in parameters:
        dist.broadcast(parameter.detach(), first, group=group)
