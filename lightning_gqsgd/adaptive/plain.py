"""Replaces the hook by plain DDP during a training, and plain DDP by the hook.

If `auto` has decided for 32 bits, no hook is as fast as DDP without one. DDP divides gradients by the number of ranks
while it copies them into buckets, and calls no Python. A hook costs another pass over all gradients, and a call for
each bucket. Two ranks of one machine are the exception: the hook adds their gradients through shared memory, which
saves more than that, so it stays (`ddp.hook.LEAST_IN_MEMORY`).

DDP's Reducer keeps the first hook that it gets. So a new Reducer is built, by the same methods by which DDP builds one
for a model that was unpickled. It is built before a forward pass, when no backward pass is under way. All ranks build
it between the same two steps, because all of them follow the same decisions. Like every new Reducer, it has one bucket
in its first step, and rebuilds its buckets in the next forward pass. Gradients that are views of buckets become views
of the new buckets, as they do whenever DDP rebuilds its buckets.

While plain DDP reduces the gradients, steps are counted and timed without DDP's help. Every few steps, ranks compare
how long their steps took, and whether a state was loaded. The comparison uses a separate process group. It is started
before one step and read before the next, so no rank waits for it.
"""

from __future__ import annotations

import inspect
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.session.copies import on_gradients, remove_all
from lightning_gqsgd.spec.decisions import Rules
from lightning_gqsgd.wire.agreement import Stamp, StepCounter
from lightning_gqsgd.wire.engine import Engine
from lightning_gqsgd.wire.pipeline import Job

#: Undocumented attributes of a DDP model that are needed to rebuild its Reducer.
_NEEDED = (
    "reducer",
    "logger",
    "require_backward_grad_sync",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
    "_comm_hooks",
    "_ddp_init_helper",
    "_has_rebuilt_buckets",
    "_join_config",
)

#: Parameters of DDP's method that builds the Reducer.
_BUILDER = ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]

#: A communication hook of DDP: the state and the function.
Hook = tuple[Any, Callable[..., Any]]


def obstacle(model: DistributedDataParallel) -> str:
    """Returns the reason why plain DDP cannot take the hook's place on a model, in a few words; empty if it can."""
    missing = [name for name in _NEEDED if not hasattr(model, name)]
    missing += [] if hasattr(torch._C, "_current_graph_task_id") else ["torch._C._current_graph_task_id"]
    missing += [] if hasattr(getattr(model, "reducer", None), "_remove_autograd_hooks") else ["_remove_autograd_hooks"]
    if missing:
        return f"torch {torch.__version__}, which has no {', '.join(missing)}"
    if list(inspect.signature(model._ddp_init_helper).parameters) != _BUILDER:
        return f"torch {torch.__version__}, whose DDP builds its Reducer in another way"
    # A Reducer learns a static graph in its first step, and Lightning ends that step with its own call, only once per
    # model.
    if model.static_graph:
        return "static_graph=True"
    if getattr(model, "_delay_all_reduce_params", ()):
        return "delay_all_reduce_named_params"
    return ""


def rebuild_reducer(model: DistributedDataParallel, reduced: Sequence[Tensor], hook: Hook | None) -> bool:
    """Rebuild a DDP model's Reducer, with a hook or without one.

    This is no collective. If an exception is raised, the model still has its old Reducer.

    Args:
        model: the DDP model.
        reduced: the parameters that the old Reducer reduces, in DDP's order.
        hook: the hook; None means plain DDP.

    Returns:
        False if the module has other parameters than those, or if a CUDA graph is captured, which keeps the buckets of
        its Reducer. Nothing was changed then.
    """
    if model.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    # If a rank has frozen a parameter and parameters may be unused, it has to rebuild together with the others. The new
    # Reducer reduces that parameter, as the old one did.
    frozen = [parameter for parameter in reduced if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        return _build_anew(model, reduced, hook)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _build_anew(model: DistributedDataParallel, reduced: Sequence[Tensor], hook: Hook | None) -> bool:
    """Rebuild the Reducer. All parameters require a gradient here; see `rebuild_reducer`."""
    built = zip(*model._build_params_for_reducer(), strict=True)
    known = set(map(id, reduced))
    # A parameter that was unfrozen since is not reduced; `ddp.unaveraged.TrainedParameters.check` refuses it.
    kept = [(parameter, is_sparse) for parameter, is_sparse in built if id(parameter) in known]
    parameters = [parameter for parameter, _ in kept]
    expects_sparse = [is_sparse for _, is_sparse in kept]
    if list(map(id, parameters)) != list(map(id, reduced)):
        return False
    old = model.reducer
    old_logger = model.logger
    try:
        names = model._build_debug_param_to_name_mapping(parameters)
        model._ddp_init_helper(parameters, expects_sparse, names, model.static_graph)
        if getattr(model, "_require_manual_backward_finalization", False):
            model.reducer._set_manual_finalization_required(True)
        if hook is not None:
            state, function = hook
            assert model.logger is not None  # DDP's method has created it
            # `register_comm_hook` would also add the hook to the model's list, which still has it.
            model.logger._set_comm_hook_name(function.__qualname__)
            dist._register_comm_hook(model.reducer, state, function)
    except BaseException:
        if model.reducer is not old:
            model.reducer._remove_autograd_hooks()
        model.reducer = old
        model.logger = old_logger
        raise
    old._remove_autograd_hooks()
    model._has_rebuilt_buckets = False
    return True


class PlainPath:
    """Lets plain DDP reduce the gradients of one model while `auto` has decided for 32 bits.

    Args:
        model: the DDP model, with the hook on it; `obstacle` is empty.
        engine: the engine of the hook.
        steering: the steering of the hook.
        steps: number of the step, which is counted here while plain DDP reduces the gradients.
        is_countable: the value of this attribute on the previous DDP model of the same module.

    Attributes:
        is_countable: whether the latest steps of the hook would have been counted correctly without it.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        engine: Engine,
        steering: Steering,
        steps: StepCounter,
        *,
        is_countable: bool = False,
    ) -> None:
        self.is_countable = is_countable
        self._steps = steps
        self._engine = engine
        self._steering = steering
        self._parameters, _ = model._build_params_for_reducer()
        self._bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self._numel = sum(p.numel() for p in self._parameters)
        self._expects = False  # whether a forward pass has announced a backward pass that is not counted yet
        # number of backward passes so far, and of those that were processed
        self._counted = 0
        self._seen = 0
        self._matches = 0
        self._since = 0  # steps since plain DDP replaced the hook
        self._lengths: deque[int] = deque(maxlen=Rules.window)  # in microseconds
        self._comparing: tuple[int, Job] | None = None
        self._goes_back = False
        # If DDP allows unused parameters, a backward pass may not use the last parameter, so all are watched.
        watched = self._parameters if model.find_unused_parameters else self._parameters[-1:]
        self._handles = on_gradients(watched, model, partial(_count_gradient, weakref.ref(self)))

    def forget_comparison(self) -> None:
        """Ignore a comparison that is under way, because the step was set, perhaps by a loaded state.

        If other ranks have loaded no state, the next comparison detects that.
        """
        self._comparing = None

    def forget(self) -> None:
        """Count no backward pass before the next forward pass, and release the parameters, because the hook was
        closed."""
        self._expects = False
        self._comparing = None
        self._parameters = []

    def remove(self) -> None:
        """Stop counting backward passes, because the module was wrapped in another DDP model."""
        self.forget()
        self._steps.compares_first = True
        self._steering.end_plain()
        remove_all(self._handles)

    def end_hook_step(self) -> None:
        """Note that the hook has received the last bucket of a step, and whether the step was also counted without the
        hook.

        The two counts differ if forward passes and reductions do not alternate, such as in training loops that prepare
        DDP for several backward passes after one forward pass. The hook stays then.
        """
        self._matches = self._matches + 1 if self._counted == self._seen + 1 else 0
        self._seen = self._counted
        self.is_countable = self._matches >= Rules.matches

    def is_due(self, model: DistributedDataParallel) -> bool:
        """Returns whether to call `go_on` before a forward pass. The backward pass that may follow is counted.

        Under torch's `Join`, some ranks make no forward passes. So nothing is counted or changed there, nor afterwards,
        because torch keeps a model prepared for `Join` once it was used.
        """
        self._expects = model.require_backward_grad_sync and not model._join_config.enable
        if not self._expects or self._engine.is_closed:  # if it is closed, the backward pass raises the error
            return False
        if self._steering.is_plain:
            return self._goes_back or self._counted != self._seen
        if model.static_graph:  # set by `_set_static_graph` since the hook was registered
            self._steering.permit_plain(obstacle(model))
        return self._steering.leaves_hook

    def go_on(self, model: DistributedDataParallel, stamp: Stamp, hook: Hook) -> None:
        """Replace the hook by plain DDP or the other way round, or count a step that plain DDP has reduced.

        Args:
            model: the DDP model.
            stamp: this rank's stamp of the step that begins, with the digest of all facts.
            hook: the hook, to be registered again.

        Raises:
            ConfigError: if ranks do not agree, because a state was loaded on some of them only.
        """
        if not self._steering.is_plain:
            self._leave_hook(model, stamp.step)
            return
        if not self._goes_back:
            self._end_plain_step(stamp)
        if self._goes_back:
            self._return_to_hook(model, stamp.step, hook)

    def count_gradient(self) -> None:
        """Count a backward pass that a forward pass has announced, at its first watched gradient."""
        if not self._expects:
            return
        self._expects = False
        self._counted += 1
        if self._steering.is_plain:
            self._engine.check_open()
            self._steps.number += 1
            self._steering.count_step()
            sent = ring_bytes(self._bytes, self._engine.world_size)
            self._engine.telemetry.add_plain_step(self._numel, self._bytes, sent)

    def _leave_hook(self, model: DistributedDataParallel, step: int) -> None:
        if not rebuild_reducer(model, self._parameters, None):
            return
        self._steering.begin_plain()
        self._since = 0
        self._lengths.clear()
        self._engine.agreed()
        self._engine.plans.clear()
        self._engine.telemetry.choice = self._steering.choice()
        self._steering.say(f"plain DDP reduces the gradients from step {step} on")

    def _end_plain_step(self, stamp: Stamp) -> None:
        """Time a step, and start or read a comparison."""
        self._seen = self._counted
        self._since += 1
        length = self._steering.clock.begin_step()
        if length:
            self._lengths.append(length)
        if self._comparing is not None:
            self._read(stamp.step)
        if not self._goes_back and self._since % Rules.compare_every == 0:
            period_us = self._steering.watched_us(self._lengths)
            stamp = stamp._replace(digest=self._steering.plain_digest(stamp.digest), period_us=period_us)
            self._comparing = stamp.step, self._engine.compare(stamp)

    def _read(self, begins: int) -> None:
        """Read the comparison that was started a step ago, and decide whether the hook is needed again in the step that
        begins."""
        assert self._comparing is not None
        step, job = self._comparing
        self._comparing = None
        job.wait()
        period_us = self._engine.agreed(at_once=True)[step].period_us
        self._steering.watch_plain(Rules.compare_every, period_us, begins)
        self._engine.telemetry.choice = self._steering.choice()
        self._goes_back = not self._steering.rests

    def _return_to_hook(self, model: DistributedDataParallel, step: int, hook: Hook) -> None:
        if not rebuild_reducer(model, self._parameters, hook):
            return
        self._steering.end_plain()
        self._goes_back = False
        self._matches = 0
        self.is_countable = False
        self._steps.compares_first = True  # before the hook sends any message again
        self._steering.say(f"the hook reduces the gradients again from step {step} on")


def _count_gradient(path: weakref.ref[PlainPath], _: Tensor) -> None:
    """Hook on a watched parameter, which does nothing once the path is deleted."""
    here = path()
    if here is not None:
        here.count_gradient()
