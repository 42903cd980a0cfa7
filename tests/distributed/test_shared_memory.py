"""Ranks of one machine exchange through shared memory: what Gloo gives, to the bit, and its errors in time."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.kernels.layout import PIECE_NUMEL
from lightning_gqsgd.reducers.base import ALL, Exchange, Scope
from lightning_gqsgd.wire import neighbours
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.neighbours import MEMORY_BYTES, VARIABLE
from lightning_gqsgd.wire.shared_memory import SharedGroup
from lightning_gqsgd.wire.workers import VARIABLE as THREADS
from tests.distributed.models import fingerprint, train, wrapped
from tests.distributed.ranks import logged, on_ranks, run

CPU = torch.device("cpu")
NODE, PEERS = Scope("node", 2), Scope("peers", 2)
INTEGERS = (torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64, torch.float16)
#: Far longer than any test may take: an error that comes at all comes before it.
LONG_S = 3600


def made(key: str, timeout_s: float = LONG_S, *, stages: Any = ((ALL,),)) -> Communicator:
    """A communicator of all ranks."""
    assert dist.group.WORLD is not None
    communicator = Communicator(CPU, dist.group.WORLD, key, timedelta(seconds=timeout_s))
    communicator.extend(stages)
    return communicator


def gathered(communicator: Communicator, nbytes: int = 1000) -> torch.Tensor:
    """The messages of all ranks, which consist of their numbers."""
    own = torch.full((nbytes,), communicator.rank, dtype=torch.uint8)
    everyone = torch.empty(communicator.size, nbytes, dtype=torch.uint8)
    try:
        communicator.start(Exchange("all_gather", everyone, own), stage=1).wait()
    except RuntimeError as error:
        raise communicator.describe(error, "a message") from error
    return everyone


# The same bits


def _random(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(dtype)


def _exchanges(rank: int, ranks: int) -> list[Exchange]:
    exchanges: list[Exchange] = []
    for seed, size in enumerate((1, 1000, MEMORY_BYTES // ranks + 24)):
        for dtype in (*INTEGERS, torch.bfloat16):
            numel = -(-size // dtype.itemsize)
            x = _random(numel, dtype, 10 * seed + rank)
            exchanges.append(Exchange("all_gather", torch.empty(ranks, numel, dtype=dtype), x))
            x = _random(numel * ranks, dtype, 10 * seed + rank)
            exchanges.append(Exchange("all_to_all", torch.empty_like(x), x))
            # Rank r sends rank s its own number of elements; some send nothing.
            sends = [[numel * ((r + s) % 3) // 2 for s in range(ranks)] for r in range(ranks)]
            takes = [row[rank] for row in sends]
            x = _random(sum(sends[rank]), dtype, 10 * seed + rank)
            exchanges.append(Exchange("all_to_all", torch.empty(sum(takes), dtype=dtype), x, (takes, sends[rank])))
        for kind in ("sum", "max"):
            exchanges += [Exchange.in_place(kind, _random(-(-size // d.itemsize), d, seed + rank)) for d in INTEGERS]
        exchanges += [Exchange.in_place("sum", _random(-(-size // d.itemsize), d, seed + rank)) for d in FLOATS]
    return exchanges


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
@on_ranks()
def test_every_exchange_has_the_bits_that_it_has_over_gloo(rank: int, ranks: int) -> None:
    results = []
    for wanted in ("0", "1"):
        with mock.patch.dict(os.environ, {VARIABLE: wanted}):
            communicator = made(f"wanted: {wanted}")
        assert bool(communicator._shared) == (wanted == "1")
        exchanges = _exchanges(rank, ranks)
        works: list[Any] = []
        for number, exchange in enumerate(exchanges):
            if number >= 8:  # several are under way, as in training, and more than the memory holds
                works[number - 8].wait()
            works.append(communicator.start(exchange, stage=1))
        for work in works:
            work.wait()
        results.append([exchange.output for exchange in exchanges])
        communicator.close()
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


MEANS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 8, "reducer": "two_shot"},
    {"bits": 4, "reducer": "gather", "sample_every": 1},
    {"bits": 3, "codec": "linear", "dither": "stochastic", "reducer": "gather", "coder": "elias"},
    {"bits": 8, "reducer": "sum"},
    {"bits": 5, "reducer": "tree", "codec": "exponential"},
    {"bits": 8, "norm": "l2", "codec": "linear", "scale": "global", "norm_over_ranks": "l2"},
    {"reducer": "lossless"},
    {"reducer": "native"},
]
LEVELS = {"bits": 4, "reducer": "hierarchical", "node_size": 2}
#: Of all reducers, and of those whose messages have another form in other dtypes.
DTYPES = (torch.float32, torch.bfloat16)
FURTHER_DTYPES = (torch.float16, torch.float64)
REMEMBERS = {"bits": 8, "codec": "linear", "memory": "diana", "reducer": "two_shot"}


def _means(rank: int, ranks: int) -> list[Any]:
    """The bits that all reducers make of this rank's numbers."""
    means: list[Any] = []
    for fields in MEANS + ([LEVELS] if ranks % 2 == 0 else []):
        for dtype in DTYPES + (FURTHER_DTYPES if fields in (MEANS[0], {"reducer": "native"}) else ()):
            mean = all_reduce(_random(70_001, dtype, rank), step=1, **fields)
            means.append((fields, dtype, mean.view(torch.uint8).numpy().tobytes()))
    close()
    model, state = wrapped({}, REMEMBERS)
    train(model, rank, range(4))
    means.append(fingerprint(model))
    state.close()
    return means


#: Collectives through shared memory in this process.
started: list[str] = []


def _equal_means(rank: int, ranks: int) -> int:
    start = SharedGroup.start

    def count(group: SharedGroup, exchange: Exchange) -> Any:
        started.append(exchange.kind)
        return start(group, exchange)

    with mock.patch.object(SharedGroup, "start", count):
        with mock.patch.dict(os.environ, {VARIABLE: "0"}):
            over_gloo = _means(rank, ranks)
        assert not started
        assert _means(rank, ranks) == over_gloo
    return len(started)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))])
def test_every_reducer_gives_the_bits_that_it_gives_over_gloo(ranks: int, tmp_path: Path) -> None:
    counts = run(_equal_means, ranks, tmp_path, ranks)
    assert len(set(counts)) == 1
    assert counts[0] > 2 * len(MEANS)


# Pieces

NUMEL = 8 * PIECE_NUMEL


def _collectives(rank: int, wanted: str, threads: str) -> tuple[int, bytes]:
    counted = []
    start = Communicator.start

    def count(communicator: Communicator, exchange: Exchange, stage: int, turn: int = 0) -> Any:
        counted.append(stage)
        return start(communicator, exchange, stage, turn)

    with mock.patch.dict(os.environ, {VARIABLE: wanted, THREADS: threads}):
        all_reduce(torch.zeros(1), bits=8)  # connects
        with mock.patch.object(Communicator, "start", count):
            mean = all_reduce(_random(NUMEL, torch.float32, rank), step=1, bits=8)
    close()
    return counted.count(1), mean.numpy().tobytes()


def test_pieces_are_fewer_where_one_thread_encodes_and_memory_carries_them(tmp_path: Path) -> None:
    results = {
        name: run(_collectives, 2, tmp_path, *arguments)
        for name, arguments in {"memory": ("1", "1"), "threads": ("1", "2"), "gloo": ("0", "1")}.items()
    }
    assert {name: result[0][0] for name, result in results.items()} == {"memory": 2, "threads": 8, "gloo": 8}
    assert len({bits for result in results.values() for _, bits in result}) == 1


def _other_threads(rank: int) -> tuple[int, bytes]:
    return _collectives(rank, "1", "12"[rank])


def test_ranks_with_other_numbers_of_threads_cut_the_same_pieces(tmp_path: Path) -> None:
    (count, first), (other, second) = run(_other_threads, 2, tmp_path)
    assert count == other == 8
    assert first == second


# Sums of floating-point numbers

#: The other rank has the same numbers in another order.
UNUSUAL = (float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45, 1e-39, 1.0)


@pytest.mark.parametrize("flushes", [False, True])
@on_ranks(2)
def test_two_ranks_have_the_same_bits_whatever_they_add(rank: int, flushes: bool) -> list[bytes]:
    communicator = made("sums")
    assert communicator.adds_in_memory(torch.float32)
    assert not communicator.adds_in_memory(torch.bfloat16)
    # The mode of this thread is another one on each rank, as where a library has set it on one of them.
    torch.set_flush_denormal(flushes and rank == 1)
    sums = []
    try:
        for shift in (0, 1, 5, 6):
            own = torch.tensor(UNUSUAL).roll(shift * rank).repeat(1 << 17)  # more than the memory holds
            if rank == 1:
                own = own.roll(1)
            communicator.start(Exchange.in_place("sum", own), stage=1).wait()
            sums.append(own.numpy().tobytes())
    finally:
        torch.set_flush_denormal(False)
    communicator.close()
    return sums


@on_ranks(3)
def test_more_than_two_ranks_leave_sums_to_gloo_whose_order_decides_on_their_bits(rank: int) -> None:
    communicator = made("three")
    answers = [communicator.adds_in_memory(dtype) for dtype in (torch.float32, torch.float64)]
    communicator.close()
    assert answers == [False, False]


# Who shares


@on_ranks(4)
def test_ranks_of_several_nodes_share_memory_inside_of_each(rank: int) -> None:
    # A launcher's numbers of nodes count, though all ranks are on this machine.
    os.environ["GROUP_RANK"] = str(rank // 2)
    communicator = made("two nodes", stages=[(ALL, NODE), (PEERS,)])
    assert {scope for _, scope, _ in communicator._shared} == {NODE}
    assert gathered(communicator)[:, 0].tolist() == [0, 1, 2, 3]
    x = torch.tensor([rank])
    communicator.start(Exchange("sum", x, x, scope=NODE), stage=1).wait()
    assert x.item() == (1, 1, 5, 5)[rank]
    communicator.close()


def _refuse(reason: str) -> Any:
    """What makes this rank one that cannot share memory."""
    if reason == "variable":
        return mock.patch.dict(os.environ, {VARIABLE: "0"})
    if reason == "memory":
        full = OSError(errno.ENOSPC, "No space left on device")
        return mock.patch.object(os, "posix_fallocate", side_effect=full)
    return mock.patch.object(neighbours, "_check_user", side_effect=ValueError("a process of user 1000"))


def _one_cannot(rank: int, reason: str) -> list[str]:
    words = logged()
    with _refuse(reason) if rank == 1 else mock.patch.dict(os.environ), mock.patch.object(neighbours, "PATIENCE_S", 1):
        communicator = made("one cannot")
    assert not communicator._shared
    assert gathered(communicator)[:, 0].tolist() == [0, 1, 2]
    communicator.close()
    assert not _mapped()
    return [word for word in words if "shared memory" in word]


@pytest.mark.parametrize("reason", ["variable", "memory", "user"])
def test_all_ranks_stay_on_gloo_if_one_of_them_cannot_share_memory(reason: str, tmp_path: Path) -> None:
    words = [word for of_rank in run(_one_cannot, 3, tmp_path, reason) for word in of_rank]
    if reason == "user":  # one line for each group, on the first rank with a reason
        assert words
        assert all("exchange over Gloo, not through shared memory: " in word for word in words)
    else:
        assert not words


def _no_file_may_be_opened(rank: int) -> list[str]:
    """Rank 1 cannot take the memory of another rank. The system drops it in silence."""
    words = logged()
    greeted = neighbours._greeted

    def limited(*args: Any) -> Any:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
        try:
            return greeted(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    with mock.patch.object(neighbours, "_greeted", limited if rank == 1 else greeted):
        made("no file").close()
    return [word for word in words if "shared memory" in word]


def test_a_limit_of_open_files_is_named_and_not_what_it_leads_to_on_other_ranks(tmp_path: Path) -> None:
    words = [word for of_rank in run(_no_file_may_be_opened, 2, tmp_path) for word in of_rank]
    assert words
    assert all("raise the limit of open files (ulimit -n, here 1)" in word for word in words)


def test_the_variable_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "no")
    with pytest.raises(ConfigError, match="GQSGD_SHARED_MEMORY='no' is neither 0 nor 1"):
        neighbours.is_wanted()


# Failures


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except CollectiveError as error:
        return str(error)
    raise AssertionError("no error")


def _one_dies(rank: int, child_too: bool, folder: str) -> str:
    communicator = made("one dies")
    gathered(communicator)
    if rank == 1:
        if child_too and not os.fork():  # e.g. a worker of a DataLoader, which lives on for a while
            Path(folder, "child").write_text(str(os.getpid()))
            while not Path(folder, "seen").exists():
                time.sleep(0.02)
            os._exit(0)
        while child_too and not Path(folder, "child").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    words = _error_of(lambda: gathered(communicator))
    if child_too:
        os.kill(int(Path(folder, "child").read_text()), 0)  # it is alive
    _error_of(lambda: gathered(communicator))  # all that comes after fails, too
    if rank == 0:
        Path(folder, "seen").touch()
    communicator.close()
    return words


@pytest.mark.parametrize("child_too", [False, True])
def test_a_rank_that_is_killed_is_noticed_before_the_timeout(child_too: bool, tmp_path: Path) -> None:
    words = run(_one_dies, 3, tmp_path, child_too, str(tmp_path), dies=(1,))
    assert "a message failed on rank 0 of 3 (global rank 0, gloo): RuntimeError: Connection closed by" in words[0]
    assert "global rank 1" in words[0] + words[2]


def _one_is_late(rank: int) -> str:
    communicator = made("one is late", timeout_s=3)
    gathered(communicator)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("has failed")
    words = _error_of(lambda: gathered(communicator))
    store.set("has failed", "1")
    communicator.close()
    return words


def test_a_rank_that_does_not_come_is_named_after_the_timeout(tmp_path: Path) -> None:
    first, late = run(_one_is_late, 2, tmp_path)
    assert "Timed out after 3 s waiting for global rank 1" in first
    # Also where all that the late rank needs was sent to it before: it must not go on where the other has not.
    assert "Connection closed by global rank 0, which has failed: Timed out after 3 s" in late


def _other_sizes(rank: int) -> str:
    communicator = made("other sizes")
    words = _error_of(lambda: gathered(communicator, 1000 + rank))
    communicator.close()
    return words


def test_messages_of_other_sizes_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    words = run(_other_sizes, 2, tmp_path)
    assert any("bytes where 100" in word and "ranks have other tensors" in word for word in words)


@on_ranks(3)
def test_a_rank_may_close_when_its_own_collective_is_through(rank: int) -> None:
    for number in range(20):
        communicator = made(f"closes {number}")
        everyone = gathered(communicator, 3 << 20)
        communicator.close()  # at once, though others may still read
        assert everyone[:, ::4096].unique(dim=1).view(-1).tolist() == [0, 1, 2]


# What is left behind


def _mapped() -> list[str]:
    gc.collect()
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:gqsgd" in line]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return sum(thread.name == "gqsgd-shared-memory" for thread in threading.enumerate())


@on_ranks(2)
def test_nothing_is_left_behind_by_a_group_that_was_closed_or_dropped(rank: int) -> None:
    made("warms up").close()
    before = _descriptors()
    communicator = made("leaves nothing")
    gathered(communicator)
    assert len(_mapped()) == 2 * 2  # own and other, at two stages
    assert _threads() == 2
    communicator.close()
    assert not _threads()
    assert not _mapped()

    dropped = made("is dropped")  # by a caller who has never closed it
    gathered(dropped)
    del dropped
    gc.collect()
    deadline = time.monotonic() + 60
    while _threads() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _threads()
    assert not _mapped()
    dist.barrier()
    assert _descriptors() <= before
