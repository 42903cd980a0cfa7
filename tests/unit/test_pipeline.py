"""Ordering, overlap and failure in the pipeline, over a wire that the test controls."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch

from lightning_gqsgd.ddp.functional import Reduction
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.base import Exchange, Steps
from lightning_gqsgd.wire import pipeline
from lightning_gqsgd.wire.pipeline import MAX_ON_STREAM, MAX_UNDER_WAY, Job, Sequencer, StreamRunner
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry
from lightning_gqsgd.wire.workers import VARIABLE, codec_threads, spare_threads


class FakeWork:
    """Completes when the test says so."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._error: Exception | None = None

    def get_future(self) -> torch.futures.Future[None]:
        return self._future

    def complete(self, error: Exception | None = None) -> None:
        self._error = error
        self._future.set_result(None)

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._future.done():
            self.complete()


class FakeCommunicator:
    """Records what is started."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []  # (stage, piece)
        self.works: list[FakeWork] = []
        self.changed = threading.Condition()

    def start(self, exchange: Exchange, stage: int, turn: int) -> FakeWork:
        with self.changed:
            self.started.append((stage, int(exchange.input[0])))
            self.works.append(FakeWork())
            self.changed.notify_all()
            return self.works[-1]

    def describe(self, error: BaseException, what: str) -> Exception:
        return RuntimeError(f"{what} {error}")

    def wait_for(self, count: int) -> list[FakeWork]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.works) >= count, timeout=10)
            return self.works[:count]


def piece(number: int, stages: int = 2, fails_in: int | None = None) -> Callable[[], Steps]:
    def steps() -> Steps:
        for stage in range(stages):
            if stage == fails_in:
                raise ValueError(f"piece {number} broke")
            yield (Exchange("sum", torch.tensor([number]), torch.tensor([number])),)
        return 1

    return steps


def job(pieces: list[Callable[[], Steps]], name: str = "bucket", agreement: Callable[[], Steps] | None = None) -> Job:
    telemetry = Telemetry()
    one = Job(torch.zeros(3), pieces, name, BucketCounters(), telemetry, ends_step=True, agreement=agreement)
    one.threads = THREADS.get()
    return one


#: Threads that compute for the jobs of a test.
THREADS: ContextVar[int] = ContextVar("THREADS", default=1)


def agreeing_job(first: int) -> Job:
    """Three pieces, the first of which begins with an agreement."""
    return job([piece(first + number) for number in range(3)], agreement=piece(first, stages=1))


@pytest.fixture(params=[1, 3], ids=["one thread", "three workers"])
def sequencer(request: pytest.FixtureRequest):
    before = THREADS.set(request.param)
    one = Sequencer()
    yield one
    one.stop()
    THREADS.reset(before)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("gqsgd")]


def test_stages_start_in_order_whatever_completes_first(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    jobs = [job([piece(2 * number), piece(2 * number + 1)]) for number in range(3)]
    for one in jobs:
        sequencer.submit(wire, one)  # type: ignore[arg-type]
    done: set[int] = set()
    rng = random.Random(0)  # noqa: S311
    while len(done) < 12:
        with wire.changed:
            assert wire.changed.wait_for(lambda: len(wire.works) > len(done), timeout=10)
            index = rng.choice([i for i in range(len(wire.works)) if i not in done])
        done.add(index)
        wire.works[index].complete()
    for one in jobs:
        assert torch.equal(one.future.wait(), torch.zeros(3))
    for stage in (1, 2):
        assert [number for at, number in wire.started if at == stage] == list(range(6))


def test_nothing_is_sent_before_the_agreement_of_its_job(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    jobs = [agreeing_job(0), agreeing_job(3)]
    for one in jobs:
        sequencer.submit(wire, one)  # type: ignore[arg-type]
    agreements = wire.wait_for(2)
    assert wire.started == [(0, 0), (0, 3)]
    agreements[1].complete()  # the later one first: its pieces still wait for their predecessors
    assert len(wire.works) == 2
    agreements[0].complete()
    for count in range(3, 15):
        wire.wait_for(count)[-1].complete()
    for one in jobs:
        one.future.wait()
    for stage in (1, 2):
        assert [number for at, number in wire.started if at == stage] == list(range(6))


def test_later_pieces_are_encoded_while_earlier_ones_are_on_the_wire(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    one = job([piece(number) for number in range(MAX_UNDER_WAY + 3)])
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    works = wire.wait_for(MAX_UNDER_WAY)
    assert wire.started == [(1, number) for number in range(MAX_UNDER_WAY)]  # and no more: scratch memory is bounded
    works[0].complete()
    wire.wait_for(MAX_UNDER_WAY + 1)
    assert wire.started[-1] == (2, 0)
    finished: set[int] = {0}
    while not one.future.done():
        with wire.changed:
            ready = [i for i in range(len(wire.works)) if i not in finished]
        for i in ready:
            finished.add(i)
            wire.works[i].complete()
    assert len(wire.works) == 2 * (MAX_UNDER_WAY + 3)


def test_a_failing_stage_fails_all_that_is_under_way_and_all_that_follows(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    jobs = [job([piece(0), piece(1, fails_in=1)], "first"), job([piece(2)], "second")]
    for one in jobs:
        sequencer.submit(wire, one)  # type: ignore[arg-type]
    for work in wire.wait_for(3):
        work.complete()
    with pytest.raises(RuntimeError, match="first, stage 2, piece 1 broke"):
        jobs[0].future.wait()
    with pytest.raises(RuntimeError, match="second, behind it, piece 1 broke"):
        jobs[1].future.wait()
    assert all(one.tensor.isnan().all() for one in jobs)
    later = job([piece(3)], "third")
    sequencer.submit(wire, later)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="third, after an earlier failure, piece 1 broke"):
        later.future.wait()
    other = FakeCommunicator()  # other communicators go on
    healthy = job([piece(0)], "healthy")
    sequencer.submit(other, healthy)  # type: ignore[arg-type]
    other.wait_for(1)[0].complete()
    other.wait_for(2)[1].complete()
    assert torch.equal(healthy.future.wait(), torch.zeros(3))


def test_a_failing_collective_carries_its_error(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    one = job([piece(0)])
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    wire.wait_for(1)[0].complete(ConnectionError("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        one.future.wait()


def refusing() -> Steps:
    """An agreement that fails once all stamps are there."""
    yield (Exchange("sum", torch.tensor([9]), torch.tensor([9])),)
    raise ConfigError("ranks 0 and 1 do not agree")


def test_a_lost_connection_is_not_the_cause_where_a_rank_has_refused(sequencer: Sequencer) -> None:
    """The rank that refuses closes its connections, which this one may notice before it has read the stamps."""
    wire = FakeCommunicator()
    one = job([piece(0), piece(1)], agreement=refusing)
    one.agreement_blocks = False
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    works = wire.wait_for(3)
    assert wire.started[0] == (0, 9)
    works[1].complete(RuntimeError("connection closed"))
    threading.Timer(0.05, works[0].complete).start()
    with pytest.raises(Exception, match="ranks 0 and 1 do not agree"):
        one.future.wait()


@pytest.mark.parametrize("ends", [True, False])
def test_a_lost_connection_is_the_cause_where_ranks_agree(
    ends: bool, sequencer: Sequencer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "REFUSAL_S", 0.05)
    wire = FakeCommunicator()
    one = job([piece(0), piece(1)], agreement=piece(9, stages=1))
    one.agreement_blocks = False
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    works = wire.wait_for(3)
    works[1].complete(RuntimeError("connection closed"))
    if ends:
        works[0].complete()
    with pytest.raises(Exception, match="connection closed"):
        one.future.wait()


def test_closing_fails_what_is_under_way(sequencer: Sequencer) -> None:
    wire = FakeCommunicator()
    one = job([piece(0)])
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    wire.wait_for(1)
    sequencer.close(wire)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="it was closed"):
        one.future.wait()
    wire.works[0].complete()  # what arrives late does no harm
    again = job([piece(1)])
    sequencer.submit(wire, again)  # type: ignore[arg-type]
    wire.wait_for(2)[1].complete()
    wire.wait_for(3)[2].complete()
    assert torch.equal(again.future.wait(), torch.zeros(3))


def test_a_job_that_is_over_is_kept_by_nobody(sequencer: Sequencer) -> None:
    """Its tensor may be a whole model, and the next job may never come."""
    wire = FakeCommunicator()
    one = job([piece(0)])
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    for count in (1, 2):
        wire.wait_for(count)[-1].complete()
    one.future.wait()
    kept = weakref.ref(one)
    wire.works.clear()
    del one
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:  # the thread may still be on its way back to its queue
        gc.collect()
    assert kept() is None


def test_asking_whether_a_job_is_over_keeps_nothing() -> None:
    one = job([piece(0)])
    reduction = Reduction(one, one.tensor, one.tensor)
    before = sys.getrefcount(one)
    assert not any(reduction.done() for _ in range(100))
    assert sys.getrefcount(one) == before
    one.finish()
    assert reduction.done()


def test_stream_runner_takes_all_pieces_through_a_stage_before_the_next() -> None:
    wire = FakeCommunicator()
    one = job([piece(number) for number in range(MAX_ON_STREAM)])
    StreamRunner([None]).submit(wire, one)  # type: ignore[arg-type]
    assert wire.started == [(stage, number) for stage in (1, 2) for number in range(MAX_ON_STREAM)]
    assert torch.equal(one.future.wait(), torch.zeros(3))
    assert one.counters.nonfinite_blocks == MAX_ON_STREAM
    wire = FakeCommunicator()
    StreamRunner([None]).submit(wire, agreeing_job(0))  # type: ignore[arg-type]
    assert wire.started == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (1, 2), (2, 2)]
    broken = job([piece(0), piece(1, fails_in=1)])
    StreamRunner([None]).submit(wire, broken)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="stage 2, piece 1 broke"):
        broken.future.wait()
    assert broken.tensor.isnan().all()


def test_stream_runner_has_no_more_pieces_under_way_than_its_window() -> None:
    """So that the scratch memory of a large job is bounded: a piece starts only once another one is through."""
    under_way: list[int] = []
    most_under_way: list[int] = []
    order: list[int] = []

    def counted(number: int) -> Callable[[], Steps]:
        def steps() -> Steps:
            under_way.append(number)
            order.append(number)
            most_under_way.append(len(under_way))
            result = yield from piece(number)()
            under_way.remove(number)
            return result

        return steps

    wire, count = FakeCommunicator(), 2 * MAX_ON_STREAM + 3
    large = job([counted(number) for number in range(count)])
    StreamRunner([None]).submit(wire, large)  # type: ignore[arg-type]
    large.future.wait()
    assert max(most_under_way) == MAX_ON_STREAM
    assert not under_way
    assert order == list(range(count))
    assert large.counters.nonfinite_blocks == count
    # The window is full before any piece takes its second stage.
    assert wire.started[: MAX_ON_STREAM + 1] == [*((1, number) for number in range(MAX_ON_STREAM)), (2, 0)]
    for number in range(count):
        assert [stage for stage, started in wire.started if started == number] == [1, 2]


def test_several_pieces_are_computed_at_once_and_no_more_than_threads(sequencer: Sequencer) -> None:
    wire, threads = FakeCommunicator(), THREADS.get()
    count = threads + 2
    inside, most, gate = 0, 0, threading.Condition()

    def meeting(number: int) -> Callable[[], Steps]:
        def steps() -> Steps:
            nonlocal inside, most
            with gate:
                inside += 1
                most = max(most, inside)
                gate.notify_all()
                gate.wait_for(lambda: most >= threads, timeout=10)
                gate.wait_for(lambda: most > threads, timeout=0.05)  # so long, one too many may come
                inside -= 1
            yield (Exchange("sum", torch.tensor([number]), torch.tensor([number])),)
            return 0

        return steps

    sequencer.submit(wire, job([meeting(number) for number in range(count)]))  # type: ignore[arg-type]
    works = wire.wait_for(count)
    assert most == threads
    assert wire.started == [(1, number) for number in range(count)]
    for work in works:
        work.complete()


def test_a_worker_that_is_late_writes_nothing_into_a_result_that_failed() -> None:
    """The other pieces of a failed job are waited for, because they write into its tensor."""
    wire, sequencer = FakeCommunicator(), Sequencer()
    begun, goes_on = threading.Event(), threading.Event()
    tensor = torch.zeros(3)

    def late() -> Steps:
        begun.set()
        goes_on.wait(10)
        tensor.fill_(5)
        yield (Exchange("sum", torch.tensor([1]), torch.tensor([1])),)
        return 0

    one = Job(tensor, [piece(0), late], "bucket", BucketCounters(), Telemetry(), ends_step=True)
    one.threads = 2
    sequencer.submit(wire, one)  # type: ignore[arg-type]
    assert begun.wait(10)
    wire.wait_for(1)[0].complete(ConnectionError("Connection closed by peer"))
    threading.Timer(0.2, goes_on.set).start()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        one.future.wait()
    sequencer.stop()  # waits for the worker, too: by now, it has written
    assert tensor.isnan().all()


@pytest.mark.parametrize(
    ("share", "compute_threads", "threads"), [(1, 1, 1), (8, 1, 4), (8, 6, 2), (8, 8, 1), (0, 1, 1), (3, 1, 2)]
)
def test_threads_are_those_for_which_there_are_processors(share: int, compute_threads: int, threads: int) -> None:
    assert spare_threads(share, compute_threads) == threads


def test_a_task_of_srun_has_threads_for_its_own_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert codec_threads(4) == 1
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert codec_threads(4) == 3


def test_the_number_of_threads_can_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, " 3 ")
    assert codec_threads(8) == 3
    for wrong in ("0", "17", "-1", "two", "1.5"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"GQSGD_THREADS='{wrong}' is not a number of threads; give 1 to 16"):
            codec_threads(8)
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    assert codec_threads(1) == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE='two' is not a number of processes of this node"):
        codec_threads(1)
