"""Memory that stays bounded, and tensors of unusual kinds."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_gqsgd.ddp import functional
from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.wire.plan import MAX_PLAN_BYTES
from tests.distributed.models import Branches, batch, finish, mlp, train, wrapped
from tests.distributed.ranks import on_ranks, run

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
CALLS: list[dict[str, Any]] = [
    {"reducer": "two_shot"},
    {"reducer": "gather"},
    {"reducer": "sum"},
    {"reducer": "native"},
    {"reducer": "tree", "codec": "exponential"},
    {"reducer": "two_shot", "rotation": True, "dither": "stochastic"},
    {"reducer": "gather", "codec": "top_k", "memory": "none"},
]


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_tensors_of_many_sizes_take_no_more_and_more_memory(rank: int) -> None:
    process = psutil.Process()
    for number in range(60):
        x = torch.ones(2_000_000 + 1000 * number)
        all_reduce(x, bits=4)
        if number == 20:
            gc.collect()
            before = process.memory_info().rss
    latest = weakref.ref(x)
    del x
    gc.collect()
    assert latest() is None  # nobody keeps the last tensor
    (reductions,) = functional._reductions.values()
    kept = sum(cached.plan.nbytes for cached in reductions.engine.plans._plans.values())
    grown = (process.memory_info().rss - before) / 2**20
    close()
    assert kept <= MAX_PLAN_BYTES
    assert grown < 100  # MiB; without a limit, these 40 sizes would take as much again


def _after_rebuild(rank: int) -> list[int]:
    model, state = wrapped({"bucket_cap_mb": 0.02}, {"bits": 4})
    counts = []
    for step in range(6):
        train(model, rank, range(step, step + 1))
        counts.append(len(state._engine.plans))
    buckets = len(state.telemetry.buckets)
    state.close()
    return [*counts, buckets]


def test_the_plan_of_the_whole_model_is_dropped_after_ddp_has_rebuilt_its_buckets(tmp_path: Path) -> None:
    for *counts, buckets in run(_after_rebuild, 2, tmp_path):
        assert counts[0] == 1
        assert counts[-1] == buckets > 1


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_tensors_that_were_made_in_inference_mode(rank: int) -> list[list[float]]:
    found = []
    for dtype in DTYPES:
        for call in CALLS:
            x = torch.randn(5000, generator=torch.Generator().manual_seed(rank)).to(dtype)
            outside = all_reduce(x, step=1, **call)
            with torch.inference_mode():
                y = torch.randn(5000, generator=torch.Generator().manual_seed(rank)).to(dtype)
                inside = all_reduce(y, step=1, **call)
                waiting = all_reduce(
                    y, step=1, out=torch.empty(100, 50).t()[:, :50].to(dtype).new_empty(5000), async_op=True, **call
                )
            assert inside.is_inference()
            assert torch.equal(inside.clone(), outside)
            assert torch.equal(waiting.wait().clone(), outside)
            found.append(outside.double().tolist())
    close()
    return found


@on_ranks(2)
def test_what_is_finite_stays_finite_in_16_bits(rank: int) -> None:
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        # Under a rotation, numbers near the largest one of fp32, which is about bf16's, have sums that fp32 lacks.
        for call in [*CALLS[:3], CALLS[6], *([CALLS[5]] if dtype == torch.float16 else [])]:
            for sign in (1, -1):
                limit = torch.finfo(dtype).max
                x = torch.full((5000,), sign * limit, dtype=dtype)
                x[::3] = 1.0 + rank
                for bits in (8, 3) if call["reducer"] in ("two_shot", "gather") and "codec" not in call else (None,):
                    mean = all_reduce(x, min_numel=0, **({"bits": bits} if bits else {}), **call)
                    found[f"{dtype} {call} {bits} bits, {sign}"] = int((~mean.isfinite()).sum())
        y = torch.ones(5000, dtype=dtype)
        y[7] = torch.inf if rank else 1.0
        for exact in ({"reducer": "native"}, {"min_numel": 10_000}):
            assert all_reduce(y, **exact)[7] == torch.inf  # what is infinite stays so where it travels as it is
        assert int((~all_reduce(y, bits=8).isfinite()).sum()) == 128
    close()
    assert {name for name, count in found.items() if count} == set()


@pytest.mark.parametrize("hook", [{"preset": "topk_ef"}, {"preset": "signsgd_ef"}, {"preset": "dore"}], ids=str)
@on_ranks(2)
def test_memory_of_a_parameter_that_no_rank_uses_stays(rank: int, hook: dict[str, Any]) -> list[Any]:
    model, state = wrapped({"find_unused_parameters": True}, {"min_numel": 0, **hook}, Branches())
    number = [name for name, _ in model.module.named_parameters()].index("layers.1.weight")

    def step(number: int, use: int) -> None:
        x, y = batch(rank, number)
        model.zero_grad()
        nn.functional.cross_entropy(model(x, use), y).backward()

    for count in range(3):
        step(count, 1)
    used = {kind: row.clone() for kind, row in state._store.rows(number).items()}
    assert max(float(row.norm()) for row in used.values()) > 0
    for count in range(3, 6):
        step(count, 0)  # no rank uses layer 1
        assert model.module.layers[1].weight.grad is None
        for kind, row in state._store.rows(number).items():
            assert torch.equal(row, used[kind]), f"{kind} has changed"
    step(6, rank)  # one rank uses it
    changed = any(not torch.equal(row, used[kind]) for kind, row in state._store.rows(number).items())
    result = [changed, finish(state, model)["bits"]]
    assert result[0]
    return result


@on_ranks(2)
def test_a_default_device_of_the_user_s_changes_nothing(rank: int) -> list[str]:
    bits = []
    for device in (None, "meta"):
        module = mlp()
        torch.set_default_device(device)
        model, state = wrapped({}, {"bits": 4, "sample_every": 2}, module)
        torch.set_default_device(None)
        x, y = batch(rank, 0)
        torch.set_default_device(device)
        for _ in range(3):
            nn.functional.cross_entropy(model(x), y).backward()
        all_reduce(x, min_numel=0, reducer="gather", coder="elias", dither="stochastic")
        torch.set_default_device(None)
        bits.append([finish(state, model)["bits"], *(p.grad.double().sum().item() for p in model.parameters())])
        close()
    assert bits[0] == bits[1]
    return bits


_AT_EXIT = """
import sys, torch, torch.distributed as dist
from lightning_gqsgd import all_reduce
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
all_reduce(torch.ones(3000))
print("done", flush=True)
"""


@pytest.mark.slow
def test_a_process_that_closes_nothing_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _AT_EXIT, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE) for rank in range(2)]
    try:
        assert [process.communicate(timeout=120)[0] for process in processes] == [b"done\n"] * 2
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()


@on_ranks(2)
def test_no_thread_is_left_after_closing(rank: int) -> None:
    all_reduce(torch.ones(3000))
    dist.barrier()
    close()
    assert [thread.name for thread in threading.enumerate() if "gqsgd" in thread.name] == []
