"""One mean beside other tools: torch's hooks on a bucket of our own, the rows of the table, and who is ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks import rival_means as means

#: Groups that torch's hooks have used. Their callbacks end on a thread of Gloo. A group whose last reference ended
#: there would wait for its own thread, which aborts the process.
_USED: list[Any] = []


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(means, "SIDE", 16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _USED.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_hooks_of_torch_take_the_bucket() -> None:
    own = means.gradient(0)
    buffer = own.clone()
    bucket: Any = means.OneBucket(buffer)
    world: Any = None  # torch's name for the default group
    means._put(buffer, default_hooks.fp16_compress_hook(world, bucket).wait())
    assert torch.equal(buffer, own.half().float())
    state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
    for _ in range(3):
        buffer.copy_(own)
        means._put(buffer, powerSGD_hook.powerSGD_hook(state, bucket).wait())
    assert torch.linalg.matrix_rank(buffer.view(16, 16)) <= 2


def test_the_gradient_is_that_of_a_layer() -> None:
    torch.set_num_threads(1)
    rows = means.gradient(0).view(means.SIDE, means.SIDE)[:256, :256]
    assert torch.linalg.matrix_rank(rows) == means.SAMPLES
    assert not torch.equal(means.gradient(0), means.gradient(1))


def case(seconds: float, processor: float, **more: Any) -> dict[str, Any]:
    return {"seconds": [seconds] * 3, "processor": [processor] * 3, **more}


def test_a_row_has_a_ratio_to_fp32_of_the_same_run() -> None:
    row = means.row_of("x", "1gbit", case(0.05, 0.01, error=0.25, equal=False), case(0.2, 0.01))
    assert row == ["x", "1gbit", pytest.approx(50), "50 to 50", pytest.approx(10), pytest.approx(4), 25.0, "no"]
    assert means.row_of("x", "1gbit", case(0.05, 0.01), case(0.2, 0.01))[-2:] == [None, "–"]


def test_a_rival_that_is_ahead_is_named() -> None:
    cases = {means.FP32: case(0.2, 0.01), "gqsgd, 4 bit": case(0.05, 0.04), "torch PowerSGD, rank 1": case(0.03, 0.03)}
    rows = [means.row_of(name, "1gbit", one, cases[means.FP32]) for name, one in cases.items()]
    said = means.in_words(rows, "1gbit")
    assert "`gqsgd, 4 bit` with 50 ms; faster than that: `torch PowerSGD, rank 1` with 30 ms" in said
    assert f"The least processor time has `{means.FP32}` with 10 ms" in said
    assert "no other way is faster" in means.in_words(rows[:2], "1gbit")
