"""Quantised mean of any tensor over the ranks of a process group, outside DDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gqsgd.compiling import compile_kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.plan import Plan, check_gradient
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import Scope, Setting, Steps, new_store, resolve, stages
from lightning_gqsgd.telemetry import Telemetry
from lightning_gqsgd.transport.communicator import Communicator, agreement, is_alive, parent_group
from lightning_gqsgd.transport.pipeline import Job, Runner, release, runner_for

Stages = tuple[tuple[Scope, ...], ...]


class _Context:
    """What all calls on one process group and device share."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup, stages: Stages) -> None:
        self.communicator = Communicator(device, group, stages=stages)
        self.runner: Runner = runner_for(self.communicator)
        self.plans: dict[tuple[GQSGDConfig, int, torch.dtype], Plan] = {}
        self.telemetry = Telemetry()
        self.calls = 0
        self.latest: Job | None = None

    @property
    def failed(self) -> bool:
        """True after an error: the order of collectives on its groups is lost."""
        return self.latest is not None and self.latest.future.done() and self.latest.error is not None

    def plan(self, x: Tensor, config: GQSGDConfig) -> Plan:
        key = (config, x.numel(), x.dtype)
        if key not in self.plans:
            compile_kernels(config, x.dtype, x.device, self.communicator.size)
            raw = x.numel() < config.min_numel
            setting = Setting(config, self.communicator.size, x.dtype, self.communicator.piece_numel)
            self.plans[key] = Plan([Segment(0, x.numel(), raw)], setting)
        return self.plans[key]

    def close(self) -> None:
        self.runner.close(self.communicator)
        release(self.runner)
        self.communicator.close()


_contexts: dict[tuple[dist.ProcessGroup, torch.device, Stages], _Context] = {}


class Reduction:
    """An allreduce under way."""

    def __init__(self, job: Job, flat: Tensor, out: Tensor) -> None:
        self._job, self._flat, self._out = job, flat, out

    def done(self) -> bool:
        """True once the result or an error is there (on a GPU, once all work for it is issued)."""
        return self._job.future.done()

    def wait(self) -> Tensor:
        """The mean; waits for it (on a GPU, the current stream does).

        Raises:
            ConfigError: the ranks do not agree.
            CollectiveError: a collective failed; the result is all NaN.
        """
        try:
            self._job.future.wait()
        except Exception:
            self._job.join()
            if self._job.error is None:
                raise
            raise self._job.error from None
        finally:
            if self._flat.data_ptr() != self._out.data_ptr():
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
    preset: str | None = None,
    **fields: Any,
) -> Tensor: ...


@overload
def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
    async_op: Literal[True],
    step: int | None = None,
    preset: str | None = None,
    **fields: Any,
) -> Reduction: ...


def all_reduce(
    tensor: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    out: Tensor | None = None,
    async_op: bool = False,
    step: int | None = None,
    preset: str | None = None,
    **fields: Any,
) -> Tensor | Reduction:
    """Mean of a tensor over the ranks of a group, quantised on the wire; the same bits on every rank.

    A collective: every rank calls it with a tensor of the same shape and dtype and the same configuration. Tensors of
    fewer than ``min_numel`` elements (1024 by default) travel uncompressed.

    Args:
        tensor: floating-point tensor of any shape, fp32, fp16, bf16 or fp64; not changed unless it is ``out``.
        group: process group; None is the default group.
        out: where to put the mean, of the tensor's shape, dtype and device; None makes a new tensor.
        async_op: return a `Reduction` at once, whose `wait` gives the mean.
        step: number of the dither; the same number gives the same dither. None counts the calls on the group.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Raises:
        ConfigError: a tensor or configuration that cannot work, or ranks that do not agree.
        CollectiveError: a collective failed; the result is all NaN. The next call makes its process groups anew.
    """
    check_gradient(tensor, "the tensor")
    _check_out(tensor, out)
    parent = parent_group(group)
    config = resolve(make_config(preset, **fields), dist.get_world_size(parent))
    if config.remembers:
        raise ConfigError(
            "all_reduce does not know what it reduces, so it cannot remember anything; give memory='none', or register "
            "the hook on a DDP model (register_gqsgd)"
        )
    context = _context(tensor.device, parent, tuple(stages(config, dist.get_world_size(parent))))
    step = context.calls if step is None else step
    context.calls += 1

    out = torch.empty_like(tensor, memory_format=torch.contiguous_format) if out is None else out
    with torch.no_grad():
        out = out.detach().copy_(tensor) if out is not tensor else out.detach()
    flat = out.contiguous().view(-1)
    reduction = Reduction(_start(context, flat, config, step), flat, out)
    return reduction if async_op else reduction.wait()


def close() -> None:
    """Stop the threads and destroy the process groups that `all_reduce` has made; the next call makes them anew."""
    while _contexts:
        _contexts.popitem()[1].close()


def _start(context: _Context, flat: Tensor, config: GQSGDConfig, step: int) -> Job:
    counters, telemetry = context.telemetry.bucket(0), context.telemetry
    starts: list[Callable[[], Steps]] = []
    if context.communicator.size > 1 and flat.numel():
        facts = {**config.to_dict(), "numel": flat.numel(), "dtype": str(flat.dtype), "step": step}
        store = new_store(config, context.communicator.size, {}, flat.dtype, flat.device)
        starts = context.plan(flat, config).starts(flat, context.communicator.rank, step, store, counters, telemetry)
        communicator = context.communicator
        starts[0] = partial(_after_agreement, facts, starts[0], communicator.size, communicator.control_device)
    name = f"all_reduce number {step}"
    job = context.latest = Job(flat, starts, name, counters, telemetry, last_of_step=True, first_stage=0)
    if starts:
        context.runner.submit(context.communicator, job)
    else:
        job.finish()
    return job


def _after_agreement(facts: dict[str, Any], start: Callable[[], Steps], ranks: int, device: torch.device) -> Steps:
    """The first piece's steps once all ranks have said that they reduce the same: unlike messages abort Gloo."""
    yield from agreement(facts, ranks, device)
    return (yield from start())


def _context(device: torch.device, group: dist.ProcessGroup, stages: Stages) -> _Context:
    for known in [key for key, context in _contexts.items() if context.failed or not is_alive(key[0])]:
        _contexts.pop(known).close()
    key = (group, device, stages)
    if key not in _contexts:
        _contexts[key] = _Context(device, group, stages)
    return _contexts[key]


def _check_out(tensor: Tensor, out: Tensor | None) -> None:
    if out is not None and (out.shape, out.dtype, out.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise ConfigError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}, the tensor {tuple(tensor.shape)} {tensor.dtype} "
            f"on {tensor.device}; they must be alike"
        )
