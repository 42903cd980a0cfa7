"""What runs on which stream of a GPU, and that nobody waits for it, on a simulated one."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels import layout
from lightning_gqsgd.kernels.layout import Segment, cut, table_on
from lightning_gqsgd.reducers.base import Exchange, Steps
from lightning_gqsgd.wire import staging
from lightning_gqsgd.wire.pipeline import Job, Sequencer, StreamRunner, release, runner_for
from lightning_gqsgd.wire.telemetry import MAX_MEASURING, BucketCounters, Meter, Tally, Telemetry, moment
from tests.simulated_cuda import DEVICE, Event, SimulatedCuda, simulated

__all__ = ["simulated"]


class Wire:
    """A communicator whose collectives are over at once, and which notes the stream that each was issued on."""

    rank, size, device = 0, 2, DEVICE

    def __init__(self, simulated: SimulatedCuda, backend: str = "nccl") -> None:
        self.cuda, self.backend = simulated, backend
        self.done: list[tuple[str, str]] = []

    def start(self, exchange: Exchange, stage: int, turn: int) -> Work:
        self.note(f"start {stage} {int(exchange.input[0])}")
        return Work(self, f"wait {stage} {int(exchange.input[0])}")

    def note(self, what: str) -> None:
        self.done.append((self.cuda.current_stream().name, what))

    def describe(self, error: BaseException, what: str) -> Exception:
        return RuntimeError(f"{what} {error}")


class Work:
    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name

    def wait(self) -> None:
        self._wire.note(self._name)

    def get_future(self) -> torch.futures.Future[None]:
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


def piece(number: int, wire: Wire, fails: bool = False) -> Callable[[], Steps]:
    def steps() -> Steps:
        for stage in (1, 2):
            wire.note(f"encode {stage} {number}")
            yield (Exchange("sum", torch.tensor([number]), torch.tensor([number])),)
        if fails:
            raise ValueError("broke")
        wire.note(f"decode {number}")
        return torch.ones((), device=DEVICE)

    return steps


def job(wire: Wire, *numbers: int, fails: bool = False, last: bool = False) -> Job:
    x = torch.zeros(3, device=DEVICE)
    pieces = [piece(number, wire, fails) for number in numbers]
    return Job(x, pieces, "bucket", BucketCounters(), Telemetry(), ends_step=last)


def completed_on(job: Job) -> str:
    """The stream that those wait for who wait for the job's future."""
    return str(job._done._event.where)  # type: ignore[attr-defined]


def recorded(simulated: SimulatedCuda, *jobs: Job) -> list[set[str]]:
    """The streams that PyTorch's allocator knows of, for the tensor of each job."""
    return [simulated.memory_of(one.tensor).recorded for one in jobs]


def test_jobs_take_two_streams_in_turns(simulated: SimulatedCuda) -> None:
    wire = Wire(simulated)
    runner = runner_for(wire)  # type: ignore[arg-type]
    jobs = []
    for number in range(3):
        jobs.append(job(wire, number))
        runner.submit(wire, jobs[-1])  # type: ignore[arg-type]
        assert jobs[-1].future is jobs[-1]._done  # without a callback, which would take another stream
        assert jobs[-1].future.done()
    ways = [
        [f"encode 1 {n}", f"start 1 {n}", f"wait 1 {n}", f"encode 2 {n}", f"start 2 {n}", f"wait 2 {n}", f"decode {n}"]
        for n in range(3)
    ]
    assert wire.done == [(f"stream {n % 2 + 1}", what) for n in range(3) for what in ways[n]]
    assert list(map(completed_on, jobs)) == ["stream 1", "stream 2", "stream 1"]
    assert [one.waited_for for one in simulated.made] == [["default", "default"], ["default"]]  # for the bucket, only
    assert recorded(simulated, *jobs) == [{"stream 1"}, {"stream 2"}, {"stream 1"}]
    assert not simulated.default.waited_for
    assert [one.counters.nonfinite_blocks for one in jobs] == [1, 1, 1]
    release(runner)


def test_streams_have_priority_over_the_backward_pass(simulated: SimulatedCuda) -> None:
    runner = runner_for(Wire(simulated))  # type: ignore[arg-type]
    sequencer = Sequencer()
    sequencer._stream_of(DEVICE)
    assert [stream.priority for stream in simulated.made] == [-1, -1, -1]
    sequencer.stop()
    release(runner)


@pytest.mark.parametrize("blocks", [False, True])
def test_what_ranks_only_compare_is_exchanged_beside_the_first_encoding(simulated: SimulatedCuda, blocks: bool) -> None:
    """The order of collectives is the same in both cases; what comes before all else stays in the job's stream."""
    wire = Wire(simulated)

    def compared() -> Steps:
        yield (Exchange("sum", torch.tensor([7]), torch.tensor([7])),)
        wire.note("read")
        return 0

    runner = StreamRunner([simulated.new_stream()])  # type: ignore[list-item]
    for _ in range(2):
        one = job(wire, 0)
        one.agreement = compared
        one.agreement_blocks = blocks
        runner.submit(wire, one)  # type: ignore[arg-type]
    where = "stream 1" if blocks else "stream 2"
    assert len(simulated.made) == (1 if blocks else 2)
    assert wire.done[:5] == [
        *[(where, "start 0 7"), (where, "wait 0 7"), (where, "read")],
        *[("stream 1", "encode 1 0"), ("stream 1", "start 1 0")],
    ]
    assert "stream 2" not in simulated.made[0].waited_for  # nothing of the bucket waits for it
    assert blocks or "default" in simulated.made[1].waited_for  # a stamp has weights that the caller's stream reads
    assert not blocks or {stream for stream, _ in wire.done} == {"stream 1"}


def test_a_cuda_graph_is_refused_in_words(simulated: SimulatedCuda) -> None:
    wire = Wire(simulated)
    simulated.is_capturing = True
    sequencer = Sequencer()
    for runner in (StreamRunner([simulated.new_stream()]), sequencer):  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="bucket would be reduced while a CUDA graph is captured.*no_sync"):
            runner.submit(wire, job(wire, 0))  # type: ignore[arg-type]
    sequencer.stop()
    assert not wire.done


def test_several_communicators_share_one_stream(simulated: SimulatedCuda) -> None:
    wires = [Wire(simulated), Wire(simulated)]
    runner = runner_for(wires[0], streams=1)  # type: ignore[arg-type]
    for wire in wires:
        runner.submit(wire, job(wire, 0))  # type: ignore[arg-type]
    assert len(simulated.made) == 1
    assert {where for wire in wires for where, _ in wire.done} == {"stream 1"}


def test_exposed_time_runs_from_the_last_bucket_to_its_result(simulated: SimulatedCuda) -> None:
    wire = Wire(simulated)
    one = job(wire, 0, last=True)
    StreamRunner([simulated.new_stream()]).submit(wire, one)  # type: ignore[arg-type,list-item]
    assert one.telemetry.steps == 1
    assert one.telemetry.exposed_s == 0
    since, until = one.telemetry._measuring[0]
    assert (since.where, until.where) == ("default", "stream 1")  # type: ignore[attr-defined]
    simulated.events_pass = True
    assert one.telemetry.totals()["exposed_s"] == 0.001


def test_an_error_makes_the_result_nan_on_the_job_s_stream(simulated: SimulatedCuda) -> None:
    wire = Wire(simulated)
    one, later, runner = job(wire, 0, fails=True), job(wire, 1), StreamRunner([simulated.new_stream()])  # type: ignore[list-item]
    runner.submit(wire, one)  # type: ignore[arg-type]
    assert completed_on(one) == "stream 1"
    assert str(one.error) == "bucket, stage 3, broke"
    with pytest.raises(RuntimeError, match="bucket, stage 3, broke"):
        one.wait()
    assert simulated.default.waited_for == ["stream 1"]  # for the NaN
    assert one.tensor.isnan().all()
    asked = len(wire.done)
    runner.submit(wire, later)  # type: ignore[arg-type]
    assert str(later.error) == "bucket, after an earlier failure, broke"
    assert len(wire.done) == asked  # other ranks are elsewhere
    with pytest.raises(RuntimeError, match="after an earlier failure"):
        later.wait()
    assert later.tensor.isnan().all()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_tensor_that_its_caller_keeps_is_named_to_no_stream(simulated: SimulatedCuda, backend: str) -> None:
    """PyTorch would not give its memory to others before the GPU has caught up with the host."""
    wire = Wire(simulated, backend)
    runner = runner_for(wire)  # type: ignore[arg-type]
    one, broken = job(wire, 0), job(wire, 1, fails=True)
    held = [replace(each, is_held=True) for each in (one, broken)]
    caller = simulated.new_stream()
    runner.submit(wire, held[0])  # type: ignore[arg-type]
    with simulated.stream(caller):
        assert held[0].wait() is one.tensor
    (own,) = {where for where, _ in wire.done}
    assert caller.waited_for == [own]
    assert recorded(simulated, one) == [set()]
    assert held[0]._done._result is None  # type: ignore[attr-defined]
    runner.submit(wire, held[1])  # type: ignore[arg-type]
    with simulated.stream(caller), pytest.raises(RuntimeError, match="broke"):
        held[1].wait()
    (after,) = {where for where, _ in wire.done if where != own} or {own}
    assert caller.waited_for == [own, after]
    assert recorded(simulated, broken) == [{after}]  # it becomes NaN there, and its caller lets go of it
    release(runner)


def test_a_gpu_that_has_failed_completes_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot even be asked to write NaN."""

    class Broken(torch.Tensor):
        def fill_(self, _: float) -> torch.Tensor:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    one = Job(torch.zeros(3).as_subclass(Broken), [], "bucket", BucketCounters(), Telemetry(), ends_step=True)
    future = one.future
    one.finish(ValueError("the first error"))
    with pytest.raises(Exception, match="the first error"):
        future.wait()


def test_the_sequencer_issues_work_of_cuda_tensors_on_a_stream_of_its_own(simulated: SimulatedCuda) -> None:
    wire = Wire(simulated, "gloo")
    sequencer = runner_for(wire)  # type: ignore[arg-type]
    assert isinstance(sequencer, Sequencer)
    assert not simulated.made
    jobs = [job(wire, 0, 1), job(wire, 2)]
    for one in jobs:
        sequencer.submit(wire, one)  # type: ignore[arg-type]
    finished = threading.Event()
    jobs[1].future.add_done_callback(lambda _: finished.set())
    assert finished.wait(10)
    release(sequencer)
    assert {where for where, _ in wire.done} == {"stream 1"}
    assert {what for _, what in wire.done} >= {"start 2 1", "wait 2 1", "decode 0", "decode 2"}
    assert list(map(completed_on, jobs)) == ["stream 1", "stream 1"]
    assert simulated.made[0].waited_for == ["default", "default"]
    assert recorded(simulated, *jobs) == [{"stream 1"}] * 2
    assert not simulated.default.waited_for
    assert simulated.devices == [("gqsgd-sequencer", DEVICE)]  # otherwise, every rank would take memory of GPU 0


def test_staging_waits_for_the_gpu_on_its_own_thread_only(
    simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, backward, waited = Wire(simulated, "gloo"), simulated.new_stream(), []

    def query(event: Event) -> bool:
        assert threading.current_thread().name == "gqsgd-staging"
        waited.append(event.where)
        simulated.events_pass = len(waited) == 2
        return looked(event)

    looked = Event.query
    monkeypatch.setattr(Event, "query", query)

    def start(exchange: Exchange, stage: int, turn: int) -> Work:
        assert len(waited) == 2  # the input is there
        assert exchange.input is exchange.output
        assert exchange.input.tolist() == [3]
        exchange.output.fill_(7)
        return Work(wire, "wait")

    thread = staging.Staging(start, timedelta(seconds=10))
    with simulated.stream(backward):
        x = torch.full((1,), 3, device=DEVICE)
        work = thread.start(Exchange.in_place("sum", x), 1)
    finished = threading.Event()
    work.get_future().add_done_callback(lambda _: finished.set())
    assert finished.wait(10)
    assert waited == ["stream 1"] * 2
    assert simulated.devices == [("gqsgd-staging", DEVICE)]
    with simulated.stream(backward):
        work.wait()
        assert x.tolist() == [7]
    kept = weakref.ref(work)
    del work
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:  # the thread may still be on its way back to its queue
        gc.collect()
    assert kept() is None, "the tensors of the last collective are kept until the next one"
    thread.close()


def test_a_table_is_copied_to_a_device_once_and_names_the_streams_that_use_it(simulated: SimulatedCuda) -> None:
    blocks = torch.from_numpy(cut([Segment(0, 100, raw=False)], 64))
    with simulated.stream(simulated.new_stream()):
        copy = table_on(DEVICE, blocks)
    with simulated.stream(simulated.new_stream()):
        assert table_on(DEVICE, blocks) is copy
    assert simulated.memory_of(copy).recorded == {"stream 1", "stream 2"}
    assert table_on(blocks.device, blocks) is blocks
    del blocks
    assert not layout._copies


def test_each_stream_adds_to_a_sum_of_its_own(simulated: SimulatedCuda) -> None:
    tally, first, second = Tally(), simulated.new_stream(), simulated.new_stream()
    added = []
    for stream, value in ((first, 1), (second, 10), (first, 100)):
        with simulated.stream(stream):
            added.append(torch.full((), value, device=DEVICE))
            tally.add(added[-1])
    assert not first.waited_for
    assert not second.waited_for
    assert int(tally.total()) == 111
    assert simulated.default.waited_for == ["stream 1", "stream 2"]
    # Its memory is not given away before that has been read.
    assert simulated.memory_of(added[1]).recorded == {"default"}


def test_a_step_is_closed_on_the_stream_of_its_last_bucket(simulated: SimulatedCuda) -> None:
    telemetry, first, second = Telemetry(), simulated.new_stream(), simulated.new_stream()
    for step in range(2):
        for stream in (first, second):
            with simulated.stream(stream):
                sums = torch.tensor([1.0, 4.0 + 3 * step], device=DEVICE)
                telemetry.add_sample(*sums.unbind())
        with simulated.stream(second):
            telemetry.end_step()
    assert set(second.waited_for) == {"stream 1"}
    assert not first.waited_for
    assert telemetry.last_rel_l2 == math.sqrt(2 / 14)
    assert (telemetry.error, telemetry.reference) == (4.0, 22.0)


def test_exposed_time_on_a_gpu_is_booked_when_it_has_passed(simulated: SimulatedCuda) -> None:
    telemetry = Telemetry()
    meter = Meter(telemetry)
    simulated.default.tick()
    for _ in range(2):
        telemetry.expose(moment(DEVICE), moment(DEVICE))
        telemetry.end_step()
    assert telemetry.exposed_s == 0  # and nobody waited
    simulated.events_pass = True
    telemetry.expose(moment(DEVICE), moment(DEVICE))
    assert telemetry.exposed_s == 3 * 0.001
    simulated.events_pass = False
    simulated.default.tick()
    assert MAX_MEASURING > 300  # under FSDP2, a hundred modules have three collectives each in a step
    for _ in range(MAX_MEASURING + 10):
        telemetry.expose(moment(DEVICE), moment(DEVICE))
    simulated.events_pass = True
    exposed = (3 + MAX_MEASURING) * 0.001
    assert meter.read()["gqsgd/exposed_s"] == pytest.approx(exposed / 2)  # the oldest were dropped
