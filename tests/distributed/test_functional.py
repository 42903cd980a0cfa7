"""`all_reduce` of any tensor on real processes."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp import functional
from lightning_gqsgd.ddp.functional import Reduction, _Reductions, all_reduce, close
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.wire import engine, plan
from lightning_gqsgd.wire.communicator import CollectiveError
from lightning_gqsgd.wire.engine import Engine
from tests.distributed.ranks import on_ranks, run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 7, 255, 256, 257, 5000]


def _values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(timeout=240)
def test_all_sizes_and_dtypes(rank: int, ranks: int) -> list[list[float]]:
    n = dist.get_world_size()
    results = []
    for reducer in ("sum", "two_shot", "gather", "native"):
        for dtype in DTYPES:
            for numel in SIZES:
                x = _values(rank, numel, dtype=dtype)
                kept = x.clone()
                y = all_reduce(x, reducer=reducer, min_numel=0)
                assert torch.equal(x, kept)
                assert (y.shape, y.dtype) == (x.shape, x.dtype)
                exact = torch.stack([_values(r, numel, dtype=dtype).double() for r in range(n)]).mean(0)
                if numel > 200:
                    error = (y.double() - exact).norm() / exact.norm()
                    assert error < (0.08 if reducer == "sum" else 0.02)
                results.append(y.double().tolist())
    close()
    return results


@on_ranks(2)
def test_several_pieces(rank: int) -> list[float]:
    x = _values(rank, 3_500_000)  # several pieces
    y = all_reduce(x, bits=6, reducer="two_shot")
    exact = torch.stack([_values(r, 3_500_000) for r in range(2)]).mean(0)
    error = (y - exact).norm() / exact.norm()
    assert error < 0.05
    close()
    return [float(y.sum()), float(y[-1])]


@on_ranks(2)
def test_layouts_outputs_and_steps(rank: int) -> None:
    x = _values(rank, 40, 50)
    plain = all_reduce(x, step=3)
    # The same numbers, however they lie in memory and wherever the result goes.
    assert torch.equal(all_reduce(x.t().contiguous().t(), step=3), plain)
    out = torch.empty_like(x)
    assert all_reduce(x, step=3, out=out).data_ptr() == out.data_ptr()
    assert torch.equal(out, plain)
    strided = torch.empty(50, 40).t()
    all_reduce(x, step=3, out=strided)
    assert torch.equal(strided, plain)
    inplace = x.clone()
    all_reduce(inplace, step=3, out=inplace)
    assert torch.equal(inplace, plain)
    negated = (x * 1j).conj().imag  # lazily: memory has the numbers without their sign
    assert negated.is_neg()
    assert torch.equal(all_reduce(negated, step=3), all_reduce(-x, step=3))
    all_reduce(negated, step=3, out=negated)
    assert torch.equal(negated, all_reduce(-x, step=3))
    learned = x.clone().requires_grad_()
    assert not all_reduce(learned, step=3).requires_grad
    native = all_reduce(x, step=3, reducer="native")
    with torch.inference_mode():
        made_there = x.clone()
        assert torch.equal(all_reduce(made_there, step=3, reducer="native", out=made_there), native)
    # The counter numbers calls without a step.
    assert not torch.equal(all_reduce(x), all_reduce(x))
    assert torch.equal(all_reduce(x, step=3), plain)
    close()


@on_ranks(3)
def test_asynchronous_calls_keep_their_order(rank: int) -> list[float]:
    tensors = [_values(rank + 10 * number, 3000 + number) for number in range(20)]
    waiting = [all_reduce(x, async_op=True, step=number) for number, x in enumerate(tensors)]
    assert all(isinstance(one, Reduction) for one in waiting)
    means = [one.wait() for one in reversed(waiting)][::-1]
    assert all(one.done() for one in waiting)
    for number, (x, mean) in enumerate(zip(tensors, means, strict=True)):
        assert torch.equal(all_reduce(x, step=number), mean)
    close()
    return [float(mean.sum()) for mean in means]


def _groups(rank: int) -> list[float]:
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    x = torch.full((2000,), float(rank))
    mine = all_reduce(x, group=low if rank < 2 else high, bits=8)
    everyone = all_reduce(x)
    close()
    return [float(mine.mean()), float(everyone.mean())]


def test_groups(tmp_path: Path) -> None:
    results = run(_groups, 4, tmp_path)
    assert [round(one, 1) for one, _ in results] == [0.5, 0.5, 2.5, 2.5]
    assert len({everyone for _, everyone in results}) == 1


def _overlapping(rank: int) -> list[float]:
    """Rank 0 makes twice as many groups as the others, in both orders, and makes them anew."""
    groups = {other: dist.new_group([0, other]) for other in (1, 2)}
    x = torch.full((2000,), float(rank))
    means = []
    for order in ((1, 2), (2, 1)):
        for other in order:
            if rank in (0, other):
                means.append(all_reduce(x, group=groups[other])[0].item())
        close()
    return means


def test_overlapping_groups_that_are_made_anew(tmp_path: Path) -> None:
    means = run(_overlapping, 3, tmp_path)
    assert [[round(one, 1) for one in row] for row in means] == [[0.5, 1.0, 1.0, 0.5], [0.5, 0.5], [1.0, 1.0]]


@on_ranks(2)
def test_calls_that_cannot_work_say_why_and_leave_everything_usable(rank: int) -> None:
    x = _values(rank, 2000)
    with pytest.raises(ConfigError, match="dtype torch.int64; only floating-point"):
        all_reduce(torch.arange(5))
    with pytest.raises(ConfigError, match="sparse"):
        all_reduce(x.to_sparse())
    with pytest.raises(ConfigError, match=r"out is \(3,\)"):
        all_reduce(x, out=torch.empty(3))
    with pytest.raises(ConfigError, match="unknown field 'bit'; did you mean 'bits'"):
        all_reduce(x, bit=3)
    with pytest.raises(ConfigError, match="at most 1 rank, not 2"):
        all_reduce(x, reducer="sum", bits=2, dither="stochastic")
    mean = all_reduce(x, step=0)
    with pytest.raises(ConfigError, match="ranks 0 and 1 do not agree: bits: 4 != 5"):
        all_reduce(x, bits=4 + rank)
    assert torch.equal(all_reduce(x, step=0), mean)
    with pytest.raises(ConfigError, match=r"shape: \[2000\] != \[1500\]"):
        all_reduce(x[: 2000 - 500 * rank])
    assert torch.equal(all_reduce(x, step=0), mean)
    with pytest.raises(ConfigError, match=r"shape: \[2000\] != \[0\]"):
        all_reduce(x[: 2000 * (1 - rank)])
    with pytest.raises(ConfigError, match=r"shape: \[40, 50\] != \[50, 40\]"):
        all_reduce(x.view(40 + 10 * rank, 50 - 10 * rank))
    with pytest.raises(ConfigError, match=r"exclude=\('\*',\): all_reduce reduces tensors that have no names"):
        all_reduce(x, exclude=("*",))
    with pytest.raises(ConfigError, match="warmup_steps=3: all_reduce counts no steps"):
        all_reduce(x, warmup_steps=3)
    for step in (-1, 2**63, 1.5, "3"):
        with pytest.raises(ConfigError, match=r"step=.* (must be an integer|is out of range)"):
            all_reduce(x, step=step if rank == 0 else 1)  # type: ignore[call-overload]
    refused = x.clone()
    for _ in range(2):  # a configuration that is new, and one that this rank has used
        with pytest.raises(ConfigError, match="ranks 0 and 1 do not agree: bits: 8 != 4"):
            all_reduce(refused, out=refused, bits=8 - 4 * rank)
        assert torch.equal(refused, x)  # nothing was sent
        all_reduce(x, bits=4)
    assert torch.equal(all_reduce(x, step=0), mean)
    with pytest.raises(ConfigError, match='device: "cpu" != "meta"'):
        all_reduce(x.to("meta") if rank else x, step=0)
    assert torch.equal(all_reduce(x, step=0), mean)
    close()
    close()
    with pytest.raises(ConfigError, match='device: "cpu" != "meta"'):
        all_reduce(x.to("meta") if rank else x)
    assert "gqsgd-sequencer" not in [thread.name for thread in threading.enumerate()]


@on_ranks(2)
def test_calls_after_an_output_that_cannot_be_written_belong_together(rank: int) -> None:
    means = []
    all_reduce(torch.ones(2000))
    memory = torch.ones(5000)
    for number, out in enumerate([torch.zeros(1).expand(2000), memory.as_strided((2000,), (0,)), memory[:2000]]):
        x = memory[1:2001] if rank else torch.ones(2000)  # shares memory with the last one
        with pytest.raises(ConfigError, match=r"share memory|cannot be written"):
            all_reduce(x, out=out if rank else None, step=7)
        means.append(float(all_reduce(torch.full((2000,), 10.0**number), step=7).mean()))
    inplace = torch.ones(1).expand(2000)
    with pytest.raises(ConfigError, match="share memory"):
        all_reduce(inplace, out=inplace if rank else None, step=7)
    means.append(float(all_reduce(torch.full((2000,), 3.0), step=7).mean()))
    close()
    assert means == pytest.approx([1, 10, 100, 3], rel=0.05)


@on_ranks(2)
def test_calls_that_do_not_belong_together_are_refused(rank: int) -> None:
    all_reduce(torch.ones(2000), step=7)
    if rank:  # as by an interrupt, after which the program goes on
        next(next(iter(functional._reductions.values())).numbers)
    with pytest.raises(ConfigError, match="number of the call on this process group: 1 != 2"):
        all_reduce(torch.ones(2000), step=7)
    close()


@on_ranks(2)
def test_plans_of_tensors_of_many_sizes_do_not_pile_up(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "MAX_PLAN_BYTES", 0)
        for numel in (2000, 2001):
            all_reduce(torch.ones(numel), reducer="native")
        (reductions,) = functional._reductions.values()
        kept = len(reductions.engine.plans)
    close()
    assert kept == 1


class _Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def _not_plain(rank: int) -> float:
    all_reduce(nn.Parameter(torch.ones(2000)))
    wrapped = torch.Tensor._make_wrapper_subclass(_Wrapped, (2000,))
    with pytest.raises(ConfigError, match="the tensor is a _Wrapped; give a plain tensor"):
        all_reduce(wrapped if rank else torch.ones(2000))
    nested = torch.nested.nested_tensor([torch.ones(1000), torch.ones(1000)])
    with pytest.raises(ConfigError, match="the tensor is a nested tensor; give one of its tensors at a time"):
        all_reduce(nested if rank else torch.ones(2000))
    with pytest.raises(ConfigError, match=r"torch.func \(vmap, grad or jvp\) has wrapped"):
        torch.vmap(all_reduce)(torch.ones(2, 2000))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2000), torch.ones(2000))
        with pytest.raises(ConfigError, match="the tensor has a tangent of forward-mode differentiation"):
            all_reduce(dual)
        all_reduce(torch.ones(2000))
    mean = float(all_reduce(torch.ones(2000)).mean())
    close()
    return mean


def test_tensors_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    assert run(_not_plain, 2, tmp_path) == pytest.approx([1, 1], rel=0.05)


@on_ranks(2)
def test_a_process_group_that_was_destroyed_is_refused(rank: int) -> None:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(nn.Linear(40, 40), process_group=group)
    dist.destroy_process_group(group)
    with pytest.raises(ConfigError, match="the process group was destroyed"):
        all_reduce(torch.ones(2000), group=group)
    with pytest.raises(ConfigError, match="the process group was destroyed"):
        register_gqsgd(model)


@on_ranks(1, initialise=False, timeout=30)
def test_a_process_group_without_other_processes_is_refused_at_once(rank: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    for call in (all_reduce, lambda x: register_gqsgd(DistributedDataParallel(nn.Linear(40, 40)))):
        with pytest.raises(ConfigError, match="backend 'fake': its 4 ranks are this process alone"):
            call(torch.ones(2000))


@pytest.mark.slow
@on_ranks(4)
def test_nodes_are_those_of_the_groups_ranks(rank: int) -> list[list[float]]:
    """Of two nodes of two processes, all ranks, and one of each node."""
    os.environ["GROUP_RANK"] = str(rank // 2)
    x = _values(rank, 2000)
    pair = dist.new_group([0, 2]), dist.new_group([1, 3])
    across = all_reduce(x, group=pair[rank % 2], reducer="hierarchical", bits=4)
    exact = (_values(rank % 2, 2000) + _values(rank % 2 + 2, 2000)) / 2
    assert 0.001 < (across - exact).norm() / exact.norm() < 0.3  # compressed
    whole = all_reduce(x, reducer="hierarchical", bits=4)
    assert torch.equal(whole, all_reduce(x, reducer="hierarchical", node_size=2, bits=4, step=0))
    close()
    return whole.tolist()


def _killed(rank: int) -> str:
    x = _values(rank, 4_000_000)
    all_reduce(x)
    if rank == 1:
        threading.Timer(0.002, lambda: os._exit(7)).start()
    out = torch.zeros_like(x)
    try:
        for _ in range(200):
            all_reduce(x, out=out)
    except CollectiveError as error:
        assert out.isnan().all()  # never a mixture
        return str(error)
    return "no error"


def test_a_killed_rank_is_an_error_and_the_result_is_nan(tmp_path: Path) -> None:
    text, _ = run(_killed, 2, tmp_path, dies=(1,))
    assert "failed on rank 0 of 2" in text


@pytest.mark.slow
@on_ranks(2, collective_timeout=2)
def test_after_a_rank_has_connected_too_late_for_a_new_configuration_the_next_call_works(rank: int) -> None:
    os.environ["GQSGD_SHARED_MEMORY"] = "0"
    means = [float(all_reduce(torch.ones(2000)).mean())]
    with pytest.MonkeyPatch.context() as patch:
        connect = Engine.connect

        def connect_late(*args: Any) -> None:
            time.sleep(6)
            connect(*args)

        if rank:
            patch.setattr(Engine, "connect", connect_late)
        with pytest.raises(CollectiveError, match="connecting to 2 ranks failed"):
            all_reduce(torch.ones(2000), connections=2)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"failed/{rank}", "")
    store.wait(["failed/0", "failed/1"], timedelta(seconds=60))
    means.append(float(all_reduce(torch.ones(2000), connections=2).mean()))
    close()
    assert means == pytest.approx([1, 1], rel=0.05)


@on_ranks(2)
def test_threads_may_begin_with_groups_of_their_own_while_others_reduce(rank: int) -> None:
    """Another thread begins with a group while this one looks which of its own can be used."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    all_reduce(torch.ones(2000), group=groups[0])
    is_usable = _Reductions.is_usable
    looks = threading.Event()
    other = threading.Thread(target=lambda: looks.wait() and all_reduce(torch.ones(2000), group=groups[1]))
    other.start()

    def look_slowly(reductions: _Reductions) -> bool:
        if threading.current_thread() is not other and not looks.is_set():
            looks.set()
            other.join(60)
        return is_usable(reductions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Reductions, "is_usable", look_slowly)
        mean = all_reduce(torch.ones(2000), group=groups[0])
    close()
    assert float(mean.mean()) == pytest.approx(1, rel=0.05)


@pytest.mark.slow
@on_ranks(2, collective_timeout=2)
def test_a_rank_that_compiles_is_waited_for(rank: int) -> float:
    """One rank is late by more than the timeout of collectives, as if it were compiling."""
    if rank == 1:
        compile_kernels = engine.compile_kernels

        def compile_slowly(*args: object) -> None:
            time.sleep(5)
            compile_kernels(*args)

        engine.compile_kernels = compile_slowly
    return float(all_reduce(_values(rank, 3000)).sum())


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"not initialised; call torch\.distributed\.init_process_group first"):
        all_reduce(torch.zeros(3))
