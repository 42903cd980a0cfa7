"""Finds gradients that DDP does not average: of parameters it does not know, and of backward passes that bypass it.

DDP fixes what it reduces when it is built: it hooks onto the gradient accumulators of the parameters that require a
gradient then. It never looks again. A parameter that is unfrozen, replaced or added later trains on each rank's own
gradient, and so does one that is cast or moved, because PyTorch gives it a new accumulator. If a parameter gets another
memory format, DDP writes its gradient in the format of before and reads the mean in the new one, so that coordinates
change places. `TrainedParameters` finds these.

DDP reduces what the backward pass after each of its forward passes computes, once. Gradients of any other backward pass
are left as they are on each rank, and DDP says nothing: of a second one through the same graph, of the second of two
after two forward passes, and of one whose forward pass went around DDP. Those of ``no_sync`` wait for a later backward
pass, and an optimizer may step before it comes. An optimizer that steps within the backward pass uses gradients that
are not averaged yet, and ``torch.autograd.grad`` gives gradients that DDP never sees. `BackwardWatch` finds these. None
of them is an error by itself, because gradients may be thrown away, or averaged with those of a later backward pass, or
by hand. So what is said is said once weights are trained with them, or added to a mean that still waits for the
optimizer.

A parameter may be in several DDP models, as an encoder with several heads is. Then each model reduces it in its own
backward passes, and in those of the others, there is nothing to say. One without our hook is known by its calls.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_gqsgd.ddp.checks import unignored
from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.session.copies import on_gradients, remove_all
from lightning_gqsgd.session.ddp_models import DDPModels
from lightning_gqsgd.session.parameters import Parameter, new_order, order_of, parameters_of
from lightning_gqsgd.wire.agreement import Weights

logger = logging.getLogger(__name__)

_ALONE = "which therefore does not reduce it: each rank would train its own"

#: The words for parameters that require a gradient although DDP does not reduce it as it should: the change, what it
#: leads to, the remedy, and the change in one word.
_UNREDUCED = (
    ("requires a gradient, but did not when the model was wrapped", _ALONE, "Unfreeze it", "unfrozen"),
    (
        "was added to the module, or took the place of another one, after the model was wrapped",
        _ALONE,
        "Change the module, and tell the optimizer,",
        "changed",
    ),
    (
        "was cast to another dtype, moved to another device or parametrized after the model was wrapped",
        _ALONE,
        "Do that",
        "changed",
    ),
    (
        "got another memory format (such as torch.channels_last) after the model was wrapped",
        "which would mix up the coordinates of its gradient",
        "Do that",
        "changed",
    ),
)

#: The remedy for a Trainer of transformers, which keeps its wrapped model while it trains.
_IN_TRANSFORMERS = (
    "A Trainer of transformers does it in the next train() if trainer.model_wrapped = trainer.model and "
    "trainer.optimizer = None are set before"
)

#: Parameters whose gradients are watched: each costs a call of Python in every backward pass.
WATCHED = 4

#: Forward passes in a row, each with other weights and none with a backward pass that DDP has seen, after which it is
#: said that somebody trains around DDP. Weights may change between two of them for other reasons, for example when an
#: average of weights is put in for a validation.
UNSEEN = 3

_CALL_THE_MODEL = (
    "Call the DistributedDataParallel model itself, not model.module or single layers, and call backward() once for "
    "each of its forward passes: loss.backward() of the sum of all losses"
)


class TrainedParameters:
    """The parameters that a DDP model reduces, and changes to them since it was built.

    Args:
        model: the DDP model.
        entries: number, name and size of each parameter of its module, by the id of the parameter.

    Attributes:
        reduced: the parameters that DDP reduces, by name, in the order of the module.
        parameters: their entries, in the same order.
        order: the parameters that DDP knows, in the order of the module now (see `new_order`). A rank on which layers
            have changed places would train another model with the same averages.
    """

    def __init__(self, model: DistributedDataParallel, entries: Mapping[int, Parameter]) -> None:
        self._model = weakref.ref(model)
        self._ignored = set(model.parameters_to_ignore)
        self._known = unignored(model.module, self._ignored)
        self.reduced: dict[str, nn.Parameter] = {name: p for name, p in self._known.items() if p.requires_grad}
        self._names = list(self.reduced)
        self._unreduced: dict[str, nn.Parameter] = {name: p for name, p in self._known.items() if not p.requires_grad}
        self.order: tuple[int, ...] = ()
        self.parameters = [entries[id(p)] for p in self.reduced.values()]
        self._new: dict[str, nn.Parameter] = {}  # those that the module has now and DDP has never seen
        self._removed: set[str] = set()  # names of those that have left the module
        self._tree: _Tree | None = _Tree(model)
        self._accumulators = _Accumulators(self.reduced)

    @property
    def unfrozen(self) -> list[str]:
        """Names of parameters that require a gradient now although DDP does not reduce them, or not as they are."""
        return [name for names in self._unreduced_now() for name in names]

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that DDP reduces although they require no gradient any more, or have left the module."""
        self._look()
        return [name for name, p in self.reduced.items() if not p.requires_grad or name in self._removed]

    def check(self) -> None:
        """Raise ConfigError if DDP does not reduce a parameter that requires a gradient.

        It takes about 0.1 ms for a thousand parameters, see `_Tree` and `_Accumulators`.
        """
        for names, (change, effect, advice, done) in zip(self._unreduced_now(), _UNREDUCED, strict=True):
            if names:
                raise ConfigError(
                    f"parameter {listed(names)} {change} in DistributedDataParallel, {effect}. {advice} before the "
                    "forward pass and wrap anew: `model = state.rewrap(DistributedDataParallel)`. (The Lightning "
                    f"strategy does this at the start of a batch, for what was {done} by then. {_IN_TRANSFORMERS}.)"
                )

    def has_ended(self, reducer: Any) -> bool:
        """Returns whether the last backward pass has reached all parameters; False after an exception in it.

        Args:
            reducer: DDP's, which is not used any more.

        Raises:
            ConfigError: if it has not, and parameters were frozen.
        """
        try:
            # The only way to ask, which the next forward pass would go. After the first step it is a collective, which
            # all ranks come to because wrapping anew is one.
            reducer._rebuild_buckets()
        except RuntimeError as error:
            if _UNFINISHED not in str(error):
                raise  # of the network
            if self.frozen:
                raise ConfigError(_waits_for_frozen(self.frozen)) from error
            return False
        return True

    def left_behind(self) -> dict[str, Tensor]:
        """Returns the gradients of the parameters in `frozen`, by name; of those that have one.

        In the middle of an accumulation they are this rank's own, which DDP would have averaged later.
        """
        gradients = {name: self.reduced[name].grad for name in self.frozen}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def drop_gradients(self, reducer: Any) -> None:
        """Set the gradients of a backward pass that has not ended to None, because they are not averaged.

        Args:
            reducer: DDP's, which is not used any more. It would wait for the end in the backward passes of other DDP
                models of these parameters.
        """
        reducer._remove_autograd_hooks()
        for parameter in self.reduced.values():
            parameter.grad = None

    def new_in(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of a module that this object has not seen, by name, without those that DDP ignores."""
        seen = {id(p) for p in self._known.values()}
        return {name: p for name, p in unignored(module, self._ignored).items() if id(p) not in seen}

    def weights(self, step: int) -> Weights | None:
        """Returns some weights of a parameter that DDP reduces, another one in each step, for ranks to compare.

        Under torch's `Join`, a rank that has run out of inputs keeps its weights, so none are compared.
        """
        config = getattr(self._model(), "_join_config", None)
        if not self.reduced or getattr(config, "enable", False):
            return None
        name = self._names[step % len(self._names)]
        return Weights.of(name, self.reduced[name], step)

    def forget(self) -> None:
        """Let go of the parameters, so that whoever keeps the counters does not keep the model."""
        self._known = {}
        self.reduced = {}
        self._unreduced = {}
        self._new = {}
        self._tree = None
        self._accumulators = _Accumulators({})

    def _look(self) -> None:
        """Note which parameters are new in the module, and which have left it. The module may be another one."""
        model = self._model()
        if model is None or self._tree is None or not self._tree.has_changed():
            return
        now = unignored(model.module, self._ignored)
        self._tree = _Tree(model)
        self._accumulators.ask_all()
        self.order = new_order(self._known.values(), now.values())
        known_ids = set(map(id, self._known.values()))
        self._new = {name: p for name, p in now.items() if id(p) not in known_ids}
        present_ids = set(map(id, now.values()))
        self._removed = {name for name, p in self._known.items() if id(p) not in present_ids}

    def _unreduced_now(self) -> tuple[list[str], ...]:
        """Returns the names of parameters that require a gradient although DDP does not reduce them: those that
        required none when it was built, those that are new in the module, those that were cast or moved, and those that
        have another memory format."""
        self._look()
        unfrozen = [name for name, p in self._unreduced.items() if p.requires_grad and name not in self._removed]
        # A tensor that is computed from parameters is not trained itself: MAML calls the model with such tensors.
        new = [name for name, p in self._new.items() if p.requires_grad and p.is_leaf]
        moved, reordered = ([n for n in names if n not in self._removed] for names in self._accumulators.lost())
        return unfrozen, new, moved, reordered


#: Torch's words where a backward pass has not reached all parameters.
_UNFINISHED = "Expected to have finished reduction"


def _waits_for_frozen(names: list[str]) -> str:
    """Returns the error of a backward pass that has not reached parameters which require no gradient any more."""
    return (
        f"DistributedDataParallel still waits for the gradient of parameter {listed(names)}, which was frozen "
        "after the forward pass had begun, or after the model was wrapped, and no rank got the others' gradients. "
        "If parameters take turns, as under Lightning's toggle_optimizer, wrap with find_unused_parameters=True, which "
        "GQSGDStrategy and GQSGDKwargs take, too. Otherwise freeze before the forward pass, and wrap anew then, by "
        "state.rewrap(DistributedDataParallel) (Lightning's strategy does that for what is frozen in "
        f"on_train_batch_start, or earlier). {_IN_TRANSFORMERS}"
    )


def _waits_for_others(names: list[str], gone: int, *, is_static: bool) -> str:
    """Returns the error of a backward pass that has not reached all parameters.

    Args:
        names: those that have no gradient. There may be none, because gradients of earlier backward passes are kept
            unless they are set to None.
        gone: number of those that have left the module.
        is_static: whether DDP was told that the graph is the same in every step.
    """
    if is_static:
        # In the first step, DDP counts how often gradients reach a parameter, also those of other models' losses.
        remedy = (
            "static_graph=True needs parameters that take part in every step, and in no other model: leave it out "
            "where DistributedDataParallel models share layers"
        )
    else:
        remedy = (
            "Parameters that do not take part in every step need find_unused_parameters=True, or "
            "state.rewrap(DistributedDataParallel)"
        )
    causes = [f"{listed(names)} {'has' if len(names) == 1 else 'have'} none"] if names else []
    causes += [f"{counted(gone, 'parameter')} left the module after it was wrapped"] if gone else []
    known = f" ({'; '.join(causes)})" if causes else ""
    return (
        f"DistributedDataParallel still waits for gradients of some parameters{known}, so this step's gradients "
        f"are not averaged. {remedy}. After an exception in a backward pass, state.rewrap drops the pass's gradients, "
        "and training goes on"
    )


class _Tree:
    """The modules and parameters of a DDP model, as the objects that they were when this was made.

    A walk through the tree takes a millisecond for a thousand parameters, and a comparison of all its dictionaries
    30 microseconds. It keeps the module inside alive, but not the DDP model.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._contents: list[dict[str, Any]] = [
            part for each in model.modules() for part in (each._parameters, each._modules)
        ]
        self._before = [dict(content) for content in self._contents]
        # Two parameters with one equal coordinate each are equal to Python, though not the same.
        self._single = [
            (content, name, value)
            for content in self._contents
            for name, value in content.items()
            if isinstance(value, Tensor) and not is_lazy(value) and value.numel() == 1
        ]

    def has_changed(self) -> bool:
        """Returns whether a module or parameter was replaced, added or removed."""
        if any(content.get(name) is not value for content, name, value in self._single):
            return True
        try:
            # Python compares identities first, so that equal dictionaries cost little.
            return self._contents != self._before
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
    So only those parameters are asked whose storage is another one. It has another address as long as something holds
    the storage of before, for example a copy of the state that shares it. Once that storage is freed, its address may
    be used again. So each storage carries a token, which is freed with it. ``torch.nn.utils.parametrize`` gives a
    parameter another accumulator by ``set_``, with the same storage; it also changes the modules (see `ask_all`).

    A parameter with another memory format has another storage, too, and the same accumulator.

    Args:
        parameters: the parameters that DDP reduces, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._gone: set[str] = set()
        self._addresses = self._addresses_now()
        self._nodes = {name: _accumulator_of(p) for name, p in parameters.items()}
        self._orders = {name: order_of(p) for name, p in parameters.items()}
        self._mark(parameters)

    def lost(self) -> tuple[list[str], list[str]]:
        """Returns the names of the parameters that require a gradient and have another accumulator now, and of those
        that have another memory format."""
        addresses = self._addresses_now()
        if addresses != self._addresses:
            before = zip(self._parameters, self._addresses, addresses, strict=True)
            self._gone.update(name for name, address, now in before if address != now)
            self._addresses = addresses
        if not self._gone:
            return [], []
        asked = {name: p for name in sorted(self._gone) if (p := self._parameters.get(name)) is not None}
        trained = {name: p for name, p in asked.items() if p.requires_grad}
        lost = [name for name, p in trained.items() if _accumulator_of(p) is not self._nodes[name]]
        kept = {name: p for name, p in trained.items() if name not in lost}
        reordered = [name for name, p in kept.items() if order_of(p) != self._orders[name]]
        kept = {name: p for name, p in kept.items() if name not in reordered}
        self._mark(kept)  # it may free tokens that name the same parameters
        self._gone.difference_update(kept)  # those that are frozen are asked again once they are trained
        return lost, reordered

    def ask_all(self) -> None:
        """Let the next call of `lost` ask every parameter."""
        self._gone.update(self._parameters)

    def _addresses_now(self) -> list[int]:
        return list(map(Tensor.data_ptr, self._parameters.values()))

    def _mark(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let the storage of each parameter carry a token; several parameters may share one."""
        shared: dict[int, list[str]] = {}
        for name, parameter in parameters.items():
            shared.setdefault(parameter.untyped_storage()._cdata, []).append(name)
        for names in shared.values():
            storage = parameters[names[0]].untyped_storage()
            storage._gqsgd_token = _Token(names, self._gone)  # type: ignore[attr-defined]


def _accumulator_of(parameter: nn.Parameter) -> Node:
    """Returns the node that accumulates a parameter's gradient."""
    with torch.inference_mode(False):  # in which PyTorch shows no node
        return get_gradient_edge(parameter).node


def average(gradients: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over ranks, uncompressed. A collective."""
    for gradient in gradients:
        mean = gradient.div(group.size()).contiguous()  # a gradient may have other strides on other ranks
        dist.all_reduce(mean, group=group)
        gradient.copy_(mean)


class BackwardWatch:
    """Watches the backward passes of one DDP model on this rank.

    Args:
        model: the DDP model, with the hook on it.
        parameters: the parameters that DDP reduces, in its order.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self._model = weakref.ref(model)
        self._reduced = {id(p) for p in parameters}
        every = max(1, len(parameters) // (WATCHED - 1))
        watched = list(dict.fromkeys([*parameters[::every][: WATCHED - 1], parameters[-1]]))
        self._watched = [weakref.ref(parameter) for parameter in watched]
        self._has_hook = True  # not plain DDP in its place
        self._expects = False  # a forward pass has announced a backward pass that DDP reduces
        self._is_local = False  # the latest forward pass was one of no_sync
        self._has_begun = False  # the announced backward pass has accumulated a gradient
        # Ids of parameters whose gradients are looked at when a backward pass ends, and the number of that pass.
        self._strays: set[int] = set()
        self._stray_pass: int | None = None
        # Other DDP models that have the parameters, without our hook, and whether one of them reduces that pass.
        self._others = DDPModels(self._reduced)
        self._is_others = False
        self._local: set[int] = set()  # ids of watched parameters with gradients of no_sync that wait for a reduction
        self._has_said = False
        self._reductions = 0
        self._unseen = 0  # how often the weights were other ones in a forward pass, without any backward pass
        self._forward_version: int | None = None  # of the weights in the latest forward pass
        # Versions of the weights, which every change in place counts: when a gradient was left unaveraged, and when the
        # latest mean was computed, while no optimizer has used it.
        self._stray_version: int | None = None
        self._mean_version: int | None = None
        self._handles = on_gradients(watched, model, partial(_count_gradient, weakref.ref(self)))
        _WATCHES.add(self)
        _watch_optimizers()

    @property
    def is_waiting(self) -> bool:
        """True if a backward pass that DDP reduces has begun, and DDP has not handed over all of its gradients."""
        return self._expects and self._has_begun

    def remove(self) -> None:
        """Watch no longer: another DDP model is wrapped around the module, or the hook was closed."""
        remove_all(self._handles)
        _WATCHES.discard(self)
        self._others.forget()

    def before_forward(self, model: DistributedDataParallel, *, has_hook: bool) -> None:
        """Note a forward pass in which gradients are enabled.

        Args:
            model: the DDP model.
            has_hook: whether the hook reduces the gradients, and not plain DDP.

        Raises:
            ConfigError: the backward pass before has not reached DDP.
        """
        self._say_if_trained_astray()
        self._is_local = not model.require_backward_grad_sync
        if self._is_local:
            return
        if self._expects and self._has_begun and self._has_hook:
            self._check_reached(model)
        version = self._version()
        if self._expects and not self._has_begun and self._has_hook and version != self._forward_version:
            self._count_unseen()
        self._forward_version = version
        self._has_hook = has_hook
        self._expects = True
        self._has_begun = False

    def end_reduction(self) -> None:
        """Note that DDP has handed over the last gradients of a backward pass."""
        self._reductions += 1
        self._unseen = 0
        self._expects = False
        self._has_begun = False
        self._stray_version = None  # what was left unaveraged before is part of this mean
        for watch in _WATCHES:  # another DDP model may have accumulated gradients of the same parameters
            if watch._local:  # Python would look at all parameters of the mean to take them from an empty set
                watch._local -= self._reduced
        self._mean_version = self._version()

    def count_gradient(self, parameter: Tensor) -> None:
        """Note that a watched parameter has accumulated a gradient."""
        if torch.compiler.is_compiling():
            return
        if self._expects or self._is_local:
            # In Lightning's manual optimization, no_sync begins after DDP's forward pass and before the backward pass.
            # If an exception ended a forward pass that had announced a reduction, the latest one may be one of no_sync.
            model = self._model()
            is_reduced = self._expects and not self._is_local and (model is None or model.require_backward_grad_sync)
            self._has_begun = self._has_begun or is_reduced
            if not is_reduced:
                self._local.add(id(parameter))
            return
        if self._has_said:
            return
        self._say_if_trained_astray()
        number = torch._C._current_graph_task_id()
        if number != self._stray_pass:  # a pass that was broken off by an exception has not come to its end
            self._stray_pass = number
            self._strays = set()
            self._is_others = self._others.take_called()
            # Lightning's manual optimization prepares DDP right before the backward pass, and another DDP model that
            # has the parameter, too, may reduce it. So only the end of the backward pass tells.
            before = {watch: watch._reductions for watch in _WATCHES}
            Variable._execution_engine.queue_callback(lambda: self._end_stray(before))
        self._strays.add(id(parameter))

    def before_optimizer_step(self, optimizer: Optimizer, *, has_closure: bool = False) -> None:
        """Note that an optimizer is about to step, or, within its step, to use the gradients of a closure.

        Args:
            optimizer: the optimizer.
            has_closure: whether a closure will compute gradients first, and this is called again behind it. What
                no_sync has left may then be a part of their mean.

        Raises:
            ConfigError: DDP still waits for gradients of the backward pass, or for `finalize_backward`, so none of its
                means is complete.
        """
        self._mean_version = None
        model = self._model()
        is_early = model is not None and _waits_for_finalize(model)
        has_news = self._stray_version is not None or self.is_waiting or bool(self._local) or is_early
        if model is None or not has_news or self._reduced.isdisjoint(map(id, parameters_of([optimizer]))):
            return
        if torch._C._current_graph_task_id() != -1:
            self._say(
                "an optimizer steps while the backward pass is under way, with gradients that are not averaged yet, "
                "so that ranks train different models. Call optimizer.step() after backward()"
            )
        elif self._stray_version is not None:
            self._check_finished(model)  # a compiled forward pass has announced nothing
            self._say_stray()
        elif is_early:
            raise ConfigError(
                "an optimizer steps before finalize_backward() has put the means of all ranks into the gradients, so "
                "that ranks would train different models; call model.finalize_backward() before optimizer.step()"
            )
        elif not self.is_waiting:
            if not has_closure:
                self._say_if_local(optimizer)
        else:
            self._check_reached(model)

    # --- findings ----------------------------------------------------------------------------------------------------

    def _end_stray(self, before: Mapping[BackwardWatch, int]) -> None:
        """Note the end of a backward pass that no forward pass of DDP has announced.

        Args:
            before: the number of reductions of each model when the backward pass began.
        """
        for watch, reductions in before.items():
            if watch._reductions != reductions:
                self._strays -= watch._reduced
        if not self._strays:
            return
        version = self._version()
        if self._mean_version is not None and self._mean_version == version:
            self._say_stray()  # a mean that no optimizer has used is a mean no longer
        self._stray_version = version

    def _count_unseen(self) -> None:
        """Count a forward pass whose weights are not those of the one before, between which DDP has seen no backward
        pass."""
        self._unseen += 1
        if self._unseen == UNSEEN:
            self._say(
                f"weights have changed {UNSEEN} times without a gradient that DistributedDataParallel has averaged, so "
                "that ranks may train different models. DistributedDataParallel averages gradients in backward() only, "
                "and not those that torch.autograd.grad returns: call loss.backward(), or give the gradients of each "
                "rank to lightning_gqsgd.all_reduce before weights are trained with them"
            )

    def _say_if_trained_astray(self) -> None:
        """Say that weights were changed by hand since a gradient was left unaveraged."""
        if self._stray_version is not None and self._stray_version != self._version():
            self._say_stray()

    def _say_stray(self) -> None:
        if all(parameter.grad is None for parameter in self._watched_now()):
            self._stray_version = None  # the gradients were thrown away
            return
        if not self._is_others:
            # Nobody knows whether new ones were called. The next backward pass tells.
            self._is_others = self._others.look(but=[watch._model() for watch in _WATCHES])
        if self._is_others:
            self._stray_version = None
            return
        self._say(
            "a backward pass added gradients that DistributedDataParallel does not average, so that ranks train "
            "different models. It was not the first one after a forward pass of the model: either the forward pass "
            "called model.module or single layers, or backward() was called again through the same graph, or after "
            f"two forward passes. {_CALL_THE_MODEL}"
        )

    def _say_if_local(self, optimizer: Optimizer) -> None:
        """Say that an optimizer trains with gradients of no_sync. It may step while others' gradients accumulate."""
        parameters = [parameter for parameter in parameters_of([optimizer]) if id(parameter) in self._local]
        self._local.difference_update(map(id, parameters))
        if any(parameter.grad is not None for parameter in parameters):
            self._say(
                "an optimizer steps with gradients that were computed under no_sync(), which DistributedDataParallel "
                "has not averaged, so that ranks train different models. Leave no_sync() before the last forward pass "
                "ahead of optimizer.step(): it counts where the forward pass is called"
            )

    def _check_reached(self, model: DistributedDataParallel) -> None:
        """Raise ConfigError if the backward pass under way since the latest forward pass is over and not reduced."""
        self._has_begun = False
        self._check_finished(model)
        if not self._has_hook:
            self.end_reduction()
            return
        raise ConfigError(
            "the latest backward pass has computed gradients, and none of them has reached DistributedDataParallel, so "
            "each rank would train its own. The model was changed after it was wrapped, for example cast to another "
            "dtype and back: wrap anew, `model = state.rewrap(DistributedDataParallel)`"
        )

    def _check_finished(self, model: DistributedDataParallel) -> None:
        """Raise ConfigError if DDP still waits for gradients of a backward pass."""
        try:
            model.reducer._check_reducer_finalized()
        except RuntimeError as error:
            reduced = {name: p for name, p in model.module.named_parameters() if id(p) in self._reduced}
            frozen = [name for name, p in reduced.items() if not p.requires_grad]
            without = [name for name, p in reduced.items() if p.requires_grad and p.grad is None]
            gone = len(self._reduced) - len(reduced)
            is_static = getattr(model, "static_graph", False)
            text = _waits_for_frozen(frozen) if frozen else _waits_for_others(without, gone, is_static=is_static)
            raise ConfigError(text) from error

    def _version(self) -> int:
        """Returns a number that grows whenever a watched parameter is changed in place."""
        return sum(parameter._version for parameter in self._watched_now())

    def _watched_now(self) -> list[nn.Parameter]:
        """Returns the watched parameters that still exist."""
        return [parameter for ref in self._watched if (parameter := ref()) is not None]

    def _say(self, text: str) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning("gqsgd: %s", text)
        self._stray_version = None


def _count_gradient(watch: weakref.ref[BackwardWatch], parameter: Tensor) -> None:
    """Hook on a watched parameter, for as long as the watch is there."""
    here = watch()
    if here is not None:
        here.count_gradient(parameter)


#: The watches of this process, which the steps of all optimizers are shown to.
_WATCHES: weakref.WeakSet[BackwardWatch] = weakref.WeakSet()


def _waits_for_finalize(model: DistributedDataParallel) -> bool:
    """Returns whether a backward pass has ended whose means only `finalize_backward` puts into the gradients, as torch
    2.15 can be told."""
    if not getattr(model, "_require_manual_backward_finalization", False):
        return False
    try:
        model._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


@cache
def _watch_optimizers() -> None:
    """Show the steps of all optimizers to all watches, from now on."""
    register_optimizer_step_pre_hook(_before_optimizer_step)


def _before_optimizer_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Hook on all optimizers. Returns other arguments of ``step`` where it has a closure: the same, but for a look at
    the gradients behind it, before the optimizer uses them. Lightning's optimizers always step with a closure."""
    if torch.compiler.is_compiling() or not _WATCHES:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    has_closure = callable(closure)
    _show_step(optimizer, has_closure=has_closure)
    if not has_closure:
        return None

    def watched(*given: Any, **named: Any) -> Any:
        loss = closure(*given, **named)
        _show_step(optimizer)
        return loss

    return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})


def _show_step(optimizer: Optimizer, *, has_closure: bool = False) -> None:
    for watch in list(_WATCHES):
        watch.before_optimizer_step(optimizer, has_closure=has_closure)
