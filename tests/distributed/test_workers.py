"""Several threads that encode and decode give the bits of one, whatever the reducer."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.wire.workers import VARIABLE
from tests.distributed.models import fingerprint, train, wrapped
from tests.distributed.ranks import on_ranks, run

#: Three pieces, the last of which is short.
NUMEL = 2 * 524_288 + 1_001

CASES: list[dict[str, Any]] = [
    {"bits": 8, "reducer": "two_shot"},
    {"bits": 4, "reducer": "gather", "sample_every": 1},
    {"bits": 8, "reducer": "sum"},
    {"bits": 4, "reducer": "gather", "codec": "linear", "coder": "elias", "dither": "stochastic"},
    {"bits": 3, "reducer": "two_shot", "rotation": True},
    {"bits": 8, "reducer": "hierarchical", "node_size": 2},
]


def _means(rank: int, threads: int) -> list[torch.Tensor]:
    os.environ[VARIABLE] = str(threads)
    torch.manual_seed(rank)
    tensors = [torch.randn(NUMEL, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    waiting = [all_reduce(x, step=3, async_op=True, **case) for case in CASES for x in tensors]
    means = [one.wait() for one in waiting]
    used = {thread.name for thread in threading.enumerate() if thread.name.startswith("gqsgd-codec")}
    assert (len(used) > 1) == (threads > 1)
    close()
    return [mean.clone() for mean in means]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks(timeout=240)
def test_threads_change_no_bit(rank: int, ranks: int) -> None:
    pairs = zip(_means(rank, 1), _means(rank, 3), strict=True)
    assert all(torch.equal(one, three) for one, three in pairs)


def _trains(rank: int, preset: str) -> list[str]:
    prints = []
    for threads in (1, 4):
        os.environ[VARIABLE] = str(threads)
        torch.manual_seed(0)
        wide = torch.nn.Sequential(torch.nn.Linear(32, 40_000), torch.nn.ReLU(), torch.nn.Linear(40_000, 10))
        model, state = wrapped({}, {"preset": preset, "min_numel": 0}, wide)
        train(model, rank, range(3))
        prints.append(fingerprint(model))
        state.close()
    return prints


@pytest.mark.parametrize(  # the second has a memory, which belongs to one thread
    "preset", [pytest.param("gqsgd_4bit", marks=pytest.mark.slow), "topk_ef"]
)
def test_a_model_trained_by_several_threads_is_that_of_one(preset: str, tmp_path: Path) -> None:
    results = run(_trains, 2, tmp_path, preset, timeout=240)
    assert len({fingerprint for prints in results for fingerprint in prints}) == 1


def _refused(rank: int) -> str:
    os.environ[VARIABLE] = "many" if rank else "2"
    with pytest.raises(Exception, match="GQSGD_THREADS='many' is not a number of threads") as caught:
        all_reduce(torch.ones(5000))
    return type(caught.value).__name__


def test_a_wrong_number_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    assert set(run(_refused, 2, tmp_path)) == {"ConfigError"}
