"""`all_reduce`: the quantised mean of any tensor over the ranks of a process group, without DDP."""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import MAX_INTEGER, ConfigError, check_integer, plain_integer
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.levels import fitted
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.session.nodes import Nodes, nodes_of_groups
from lightning_gqsgd.session.opening import Side, facts_of, open_engines, prepare_later
from lightning_gqsgd.session.parameters import check_for_tensors
from lightning_gqsgd.sparse.options import refuse_for
from lightning_gqsgd.wire.agreement import Card
from lightning_gqsgd.wire.communicator import parent_group, timeout_of
from lightning_gqsgd.wire.engine import Engine, Request, Words, untraced
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.peers import is_alive
from lightning_gqsgd.wire.pipeline import Job
from lightning_gqsgd.wire.plan import check_gradient

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.spec.fields import FieldArguments

_PURPOSE = "all_reduce"
#: What the number of a call is called in messages. A call that a rank has left early, by an interrupt, pairs wrongly.
_NUMBER = "number of the call on this process group"
_WORDS = Words("all_reduce", "call all_reduce in a process of its own, started by spawn")


class _Reductions:
    """All calls on one process group and device."""

    def __init__(self, engine: Engine, group: dist.ProcessGroup, nodes: Nodes) -> None:
        self.engine = engine
        self.nodes = nodes
        self._group = group
        self.numbers = count(1)  # of calls; 0 is the one that makes this object
        self._prepared: set[tuple[GQSGDConfig, torch.dtype]] = set()

    def is_usable(self) -> bool:
        """Returns False after an error, or once the process group was destroyed."""
        return not self.engine.failed and not self.engine.is_closed and is_alive(self._group)

    def start(self, x: Tensor, config: GQSGDConfig, facts: Mapping[str, Any], step: int, number: int) -> Job:
        """Start to replace a flat tensor by its mean.

        Args:
            x: the flat tensor.
            config: the configuration, with its reducer chosen.
            facts: see `_facts`, of the tensor as it was given.
            step: number of the dither.
            number: that of the call, which the step may differ from.
        """
        card = Card(_PURPOSE, {**facts, "step": step, _NUMBER: number})
        if (config, x.dtype) not in self._prepared:
            prepare_later(self.engine, self._group, card, config, x.dtype)
            self._prepared.add((config, x.dtype))
        segments = (Segment(0, x.numel(), raw=x.numel() < config.min_numel),)
        job = self.engine.reduce(x, Request(f"{_PURPOSE} number {step}", (config,), segments, step, agreement=card))
        self.engine.plans.trim()
        return job


_reductions: dict[tuple[dist.ProcessGroup, torch.device], _Reductions] = {}


class Reduction:
    """Handle of an asynchronous `all_reduce`."""

    def __init__(self, job: Job, flat: Tensor, out: Tensor) -> None:
        self._job = job
        self._flat = flat
        self._out = out

    def done(self) -> bool:
        """Returns True if there is a result or an error (on a GPU: if all work for the result has been issued)."""
        return self._job.is_over

    @untraced
    def wait(self) -> Tensor:
        """Wait for the mean. On a GPU, the current stream waits for it, but the host does not.

        Returns:
            The mean, with the tensor's shape and dtype.

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed. The result is then all NaN.
        """
        try:
            self._job.wait()
        finally:
            if self._flat.data_ptr() != self._out.data_ptr():
                with torch.inference_mode(self._out.is_inference()):
                    self._out.copy_(self._flat.view(self._out.shape))
        return self._out


@overload
def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
    async_op: Literal[False] = False,
    step: int | None = None,
    preset: str | GQSGDConfig | None = None,
    **fields: Unpack[FieldArguments],
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
    async_op: Literal[True],
    step: int | None = None,
    preset: str | GQSGDConfig | None = None,
    **fields: Unpack[FieldArguments],
) -> Reduction: ...


@untraced
def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    step: int | None = None,
    preset: str | GQSGDConfig | None = None,
    **fields: Unpack[FieldArguments],
) -> Tensor | Reduction:
    """Returns the mean of a tensor over the ranks of a group, sent in quantised form and bit-identical on all ranks.

    This is a collective: every rank has to call it with a tensor of the same shape and dtype and with the same
    configuration. Tensors of fewer than ``min_numel`` elements (1024 by default) are sent uncompressed. Autograd does
    not record this call: the mean never requires a gradient.

    Args:
        tensor: floating-point tensor of any shape, fp32, fp16, bf16 or fp64; not changed unless it is ``out``.
        group: process group; None is the default group.
        out: the tensor that receives the mean, with the shape, dtype and device of ``tensor``. None creates a new
            tensor.
        async_op: return a `Reduction`; its `wait` returns the mean. Over Gloo, it is returned at once. Over NCCL, ranks
            first compare their calls, for which the host waits until all ranks have made this call, and until the GPU
            has done all work that the tensor waits for.
        step: number from which the dither is derived, 0 to 2^63 - 1; the same number gives the same dither. None uses
            the number of calls on the group so far.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        **fields: fields of `GQSGDConfig`, except those that need names of parameters, steps or a memory.

    Raises:
        ConfigError: if the tensor or the configuration cannot work, or if ranks do not agree. If one rank refuses, all
            ranks raise. ``out`` then has the values of ``tensor``, or its own on the rank that refuses.
        CollectiveError: if a collective failed, and then the result is all NaN; or if not all ranks call this within
            the timeout. The next call creates its process groups again.
    """
    parent = parent_group(group)
    step = plain_integer(step)
    reductions = _usable(parent, tensor)
    number = 0
    # Earlier calls for any device are enough to tell ranks of an error.
    known = reductions or next((one for (group, _), one in list(_reductions.items()) if group is parent), None)
    if known is not None:
        number = next(known.numbers)  # counted on all ranks, also where one refuses
        try:
            config = _checked(tensor, out, step, make_config(preset, **fields), known.nodes)
            target, flat = _copied(tensor, out)
        except Exception as error:
            # The other ranks hear of it in what would be the call's agreement. This rank need not wait for them.
            known.engine.compare(Card(_PURPOSE, {}, str(error)))
            raise
    if known is not None and reductions is None:  # a device of which other ranks might not have a tensor
        known.engine.compare(Card(_PURPOSE, {**_facts(tensor, config), _NUMBER: number})).wait()
    if reductions is None:
        number = 0
        device = tensor.device if isinstance(tensor, Tensor) else torch.device("cpu")
        with Meeting(_PURPOSE, [parent], timeout_of(parent, device)) as meeting:
            (nodes,) = nodes_of_groups(meeting, device)
            config = _checked(tensor, out, step, make_config(preset, **fields), nodes)
            target, flat = _copied(tensor, out)
            side = Side(parent, _facts(tensor, config), [])  # `_Reductions` connects each configuration as it comes
            with open_engines(meeting, [side], tensor.device, words=_WORDS) as (engine,):
                reductions = _reductions[parent, tensor.device] = _Reductions(engine, parent, nodes)
    job = reductions.start(flat, config, _facts(tensor, config), number if step is None else step, number)
    reduction = Reduction(job, flat, target)
    return reduction if async_op else reduction.wait()


def close() -> None:
    """Stop the threads and destroy the process groups of `all_reduce`. The next call creates them again."""
    while _reductions:
        _reductions.popitem()[1].engine.close()


atexit.register(close)  # Gloo groups that are still open at exit can abort the process


def _usable(group: dist.ProcessGroup, tensor: object) -> _Reductions | None:
    """Returns the engine and the nodes of earlier calls on a group for a tensor's device; None if there are none.

    Those that cannot be used any more are closed, for all groups.
    """
    for key, reductions in list(_reductions.items()):  # another thread may add its own meanwhile
        if not reductions.is_usable() and _reductions.pop(key, None) is not None:
            reductions.engine.close()
    return _reductions.get((group, tensor.device)) if isinstance(tensor, Tensor) else None


def _checked(
    tensor: Tensor,
    out: Tensor | None,
    step: int | None,
    config: GQSGDConfig,
    nodes: Nodes,
) -> GQSGDConfig:
    """Returns the configuration of a call, with its reducer chosen; raises ConfigError if arguments cannot work."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"all_reduce takes one tensor, not {type(tensor).__name__}; call it once for each tensor")
    _check_plain(tensor, "the tensor")
    check_gradient(tensor, "the tensor")
    if out is not None and not isinstance(out, Tensor):
        raise ConfigError(f"out={out!r:.100} is not a tensor; leave it out, or give one like the tensor")
    if out is not None:
        _check_plain(out, "out")
    if out is not None and (out.shape, out.dtype, out.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise ConfigError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the tensor {tuple(tensor.shape)} {tensor.dtype} "
            f"on {tensor.device}; they must be alike"
        )
    if step is not None:
        check_integer("step", step, 0, MAX_INTEGER)
    # Numbers of coordinates of the same power of two share a prediction, and a reducer.
    numel = 1 << tensor.numel().bit_length()
    config = resolve(fitted(config, nodes, numel, tensor.dtype).config, len(nodes.of_ranks))
    refuse_for(config, "all_reduce, which takes dense tensors")
    check_for_tensors(config, "all_reduce")
    return config


def _check_plain(tensor: Tensor, what: str) -> None:
    """Raise ConfigError for a tensor whose numbers are not in memory as its shape says, such as a DTensor."""
    if tensor.is_nested:
        raise ConfigError(f"{what} is a nested tensor; give one of its tensors at a time, or its values()")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise ConfigError(
            f"{what} is one that torch.func (vmap, grad or jvp) has wrapped; call all_reduce outside of that function"
        )
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ConfigError(
            f"{what} has a tangent of forward-mode differentiation, which would not be averaged; give its primal, and "
            "its tangent in a call of its own"
        )
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        name = type(tensor).__name__
        raise ConfigError(f"{what} is a {name}; give a plain tensor, e.g. its to_local() if it is a DTensor")


def _copied(tensor: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the tensor for the mean, which holds the values of ``tensor``, and the same values as a flat tensor.

    Raises:
        ConfigError: ``out`` cannot be written.
    """
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format) if out is None else out
    if _overlaps(out):
        raise ConfigError(
            f"out has elements that share memory (shape {tuple(out.shape)}, strides {out.stride()}), so that it cannot "
            "hold a mean; leave it out, or give out.contiguous()"
        )
    try:
        with torch.no_grad():
            out = out.detach().copy_(tensor) if out is not tensor else out.detach()
    except RuntimeError as error:
        raise ConfigError(f"out cannot be written: {error}; leave it out, or give torch.empty_like(tensor)") from error
    # Kernels read memory, where a lazy minus sign is not seen.
    return out, out.resolve_neg().contiguous().view(-1)


def _overlaps(tensor: Tensor) -> bool:
    """Returns False only if no two elements of a tensor share memory."""
    reach = 0
    dimensions = [(stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    for stride, size in sorted(dimensions):
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def _facts(tensor: Tensor, config: GQSGDConfig) -> dict[str, Any]:
    """Returns what all ranks must have in common in a call: plain values by name."""
    return facts_of(config, {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "device": tensor.device.type})
