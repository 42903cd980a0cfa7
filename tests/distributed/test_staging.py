"""Collectives through host memory, over real Gloo: with CPU tensors, the copies are plain and there is no event."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire import communicator
from lightning_gqsgd.wire.agreement import Card, compared
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.staging import StagedWork, Staging
from tests.distributed.models import means_of, train, trained_under, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

CPU = torch.device("cpu")


def _staged(**fields: Any) -> Communicator:
    communicator.needs_staging = lambda *_: True
    made = Communicator(CPU, dist.group.WORLD, "test", **fields)
    made.extend([(ALL, Scope("node", 2)), (ALL,)])
    return made


def _agree(wire: Communicator, facts: dict[str, Any]) -> None:
    for exchanges in compared(Card("test", facts), wire.numbers, wire.control_device):
        for exchange in exchanges:
            wire.start(exchange, 0).wait()


def _threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("gqsgd-staging")


@on_ranks(2)
def test_all_kinds_of_exchanges(rank: int) -> None:
    one = _staged()
    _agree(one, {"same": 1})
    with pytest.raises(ConfigError, match="ranks 0 and 1 do not agree: mine: 0 != 1"):
        _agree(one, {"mine": rank})
    assert one.gather(torch.tensor([[rank, 7]]), "a test").tolist() == [[[0, 7]], [[1, 7]]]

    out = torch.zeros(6, dtype=torch.uint8)
    one.start(Exchange("all_to_all", out, torch.arange(6, dtype=torch.uint8) + 10 * rank), 1).wait()
    first = 3 * rank
    assert out.tolist() == [*range(first, first + 3), *range(first + 10, first + 13)]

    mine, theirs = ([1, 2], [1, 3]) if rank == 0 else ([3, 0], [2, 0])  # elements of output, of input, for each rank
    out = torch.full((sum(mine),), -1)
    values = torch.arange(sum(theirs)) + 100 * rank
    one.start(Exchange("all_to_all", out, values, (mine, theirs)), 1).wait()
    assert out.tolist() == ([0, 100, 101] if rank == 0 else [1, 2, 3])

    out = torch.zeros(2, 3)
    one.start(Exchange("all_gather", out, torch.full((3,), float(rank)), scope=Scope("node", 2)), 1).wait()
    assert out.tolist() == [[0.0] * 3, [1.0] * 3]

    for kind, expected in (("sum", [1, 5]), ("max", [1, 3])):
        x = torch.tensor([rank, 2 + rank])
        work = one.start(Exchange.in_place(kind, x), 2)
        assert x.tolist() == [rank, 2 + rank]  # before it is waited for
        work.wait()
        assert x.tolist() == expected
    one.close()
    assert not _threads()


def _order(rank: int) -> list[int]:
    """Ranks ask at different speeds, and wait in different orders."""
    one = _staged()
    tensors = [torch.tensor([number * (rank + 1)]) for number in range(40)]
    works, done = [], []
    for number, x in enumerate(tensors):
        work = one.start(Exchange.in_place("sum", x), 1 + number % 2)
        work.get_future().add_done_callback(lambda _, number=number: done.append(number))
        works.append(work)
        time.sleep(0.002 * rank)
    for work in works if rank else reversed(works):
        work.wait()
    one.close()
    assert sorted(done) == list(range(40))
    return [int(x) for x in tensors]


def test_collectives_start_in_the_order_in_which_they_were_asked_for(tmp_path: Path) -> None:
    assert run(_order, 2, tmp_path) == [[3 * number for number in range(40)]] * 2


def _peer_that_dies(rank: int) -> str:
    one = _staged()
    _agree(one, {})
    if rank == 1:
        return ""
    x = torch.ones(3)
    work = one.start(Exchange.in_place("sum", x), 1)
    work.get_future().wait()
    text = error_text(RuntimeError, work.wait)
    assert x.tolist() == [1.0] * 3
    one.close()
    return text


def test_an_error_of_gloo_reaches_who_waits(tmp_path: Path) -> None:
    assert run(_peer_that_dies, 2, tmp_path, collective_timeout=5)[0]


class _Never:
    """A work that is never through."""

    def get_future(self) -> torch.futures.Future[None]:
        return torch.futures.Future()


def test_a_collective_that_cannot_start_completes_with_its_error() -> None:
    def start(exchange: Exchange, stage: int, turn: int) -> Any:
        raise ValueError(f"no {exchange.kind} in stage {stage}")

    staging = Staging(start, timedelta(seconds=5))
    work = staging.start(Exchange.in_place("sum", torch.zeros(1)), 3)
    work.get_future().wait()
    with pytest.raises(ValueError, match="no sum in stage 3"):
        work.wait()
    staging.close()


class _NotComputed:
    """An event that a GPU never reaches."""

    def query(self) -> bool:
        return False


def test_a_collective_whose_input_the_gpu_never_computes_completes_with_an_error() -> None:
    work = StagedWork(Exchange.in_place("sum", torch.zeros(1)), timedelta(seconds=0.1))
    work._copied = _NotComputed()  # type: ignore[assignment]
    work.begin(lambda *_: _Never(), 1, 0)
    work.get_future().wait()
    with pytest.raises(RuntimeError, match="because the GPU has not computed its input"):
        work.wait()


def test_closing_fails_what_has_not_started_and_all_that_comes_after() -> None:
    busy, go_on = threading.Event(), threading.Event()

    def start(exchange: Exchange, stage: int, turn: int) -> Any:
        busy.set()
        assert go_on.wait(10)
        return _Never()

    staging = Staging(start, timedelta(seconds=0.1))
    staging.start(Exchange.in_place("sum", torch.zeros(1)), 1)
    assert busy.wait(10)
    behind = staging.start(Exchange.in_place("sum", torch.zeros(1)), 1)
    with pytest.raises(RuntimeError, match="a sum did not start within 0 s, because the GPU has not computed its"):
        behind.wait()
    threading.Timer(0.2, go_on.set).start()
    staging.close()
    assert behind.get_future().done()
    with pytest.raises(RuntimeError, match="the communicator was closed"):
        behind.wait()
    with pytest.raises(RuntimeError, match="the communicator was closed"):
        staging.start(Exchange.in_place("sum", torch.zeros(1)), 1)
    assert not _threads()


#: Cases of `means_of`, and hooks.
CASES: list[dict[str, Any]] = [{"reducer": name} for name in ("two_shot", "gather", "sum", "native")]
CASES.append({"reducer": "tree", "codec": "exponential"})
HOOKS: list[dict[str, Any]] = [{"bits": 4}, {"reducer": "sum"}, {"memory": "ef", "codec": "sign", "bits": 1}]


@pytest.mark.slow
@on_ranks(2)
def test_results_are_the_same_as_without(rank: int) -> None:
    plain = means_of(CASES), trained_under(HOOKS)
    communicator.needs_staging = lambda *_: True
    started = []
    first_start = Staging.start
    Staging.start = lambda *args: started.append(1) or first_start(*args)
    staged = means_of(CASES), trained_under(HOOKS)
    assert len(started) > 100
    assert not _threads()
    assert staged == plain


def _killed(rank: int) -> str:
    communicator.needs_staging = lambda *_: True
    model, state = wrapped({}, {})
    train(model, rank, range(2))
    if rank == 1:
        return ""
    text = error_text(RuntimeError, train, model, rank, range(2, 4))
    state.close()
    return text


def test_a_rank_that_has_left_is_an_error_in_backward(tmp_path: Path) -> None:
    assert "failed on rank 0 of 2" in run(_killed, 2, tmp_path, collective_timeout=5)[0]
