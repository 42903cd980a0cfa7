"""What runs on which stream of a GPU, and that nobody waits for it, over a fake one."""

from __future__ import annotations

import gc
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
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry
from tests.unit.fake_cuda import DEVICE, FakeCuda, FakeEvent, cuda, on_gpu

__all__ = ["cuda"]


class Wire:
    """A communicator whose collectives are over at once, and which notes the stream that each was issued on."""

    rank, size, device = 0, 2, DEVICE

    def __init__(self, cuda: FakeCuda, backend: str = "nccl") -> None:
        self.cuda, self.backend = cuda, backend
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
        return on_gpu(torch.tensor(1))

    return steps


def job(wire: Wire, *numbers: int, fails: bool = False, last: bool = False) -> Job:
    x = on_gpu(torch.zeros(3))
    pieces = [piece(number, wire, fails) for number in numbers]
    return Job(x, pieces, "bucket", BucketCounters(), Telemetry(), ends_step=last)


def test_jobs_take_two_streams_in_turns(cuda: FakeCuda) -> None:
    wire = Wire(cuda)
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
    assert wire.done == [(f"own {n % 2}", what) for n in range(3) for what in ways[n]]
    assert cuda.results == ["own 0", "own 1", "own 0"]
    assert [one.waited_for for one in cuda.made] == [["default", "default"], ["default"]]  # for the bucket, only
    assert [one.tensor.streams for one in jobs] == [["own 0"], ["own 1"], ["own 0"]]
    assert not cuda.default.waited_for
    assert [one.counters.nonfinite_blocks for one in jobs] == [1, 1, 1]
    release(runner)


def test_streams_have_priority_over_the_backward_pass(cuda: FakeCuda) -> None:
    runner = runner_for(Wire(cuda))  # type: ignore[arg-type]
    sequencer = Sequencer()
    sequencer._stream_of(DEVICE)
    assert [stream.priority for stream in cuda.made] == [-1, -1, -1]
    sequencer.stop()
    release(runner)


@pytest.mark.parametrize("blocks", [False, True])
def test_what_ranks_only_compare_is_exchanged_beside_the_first_encoding(cuda: FakeCuda, blocks: bool) -> None:
    """The order of collectives is the same in both cases; what comes before all else stays in the job's stream."""
    wire = Wire(cuda)

    def compared() -> Steps:
        yield (Exchange("sum", torch.tensor([7]), torch.tensor([7])),)
        wire.note("read")
        return 0

    runner = StreamRunner([cuda.new_stream()])  # type: ignore[list-item]
    for _ in range(2):
        one = job(wire, 0)
        one.agreement = compared
        one.agreement_blocks = blocks
        runner.submit(wire, one)  # type: ignore[arg-type]
    where = "own 0" if blocks else "own 1"
    assert len(cuda.made) == (1 if blocks else 2)
    assert wire.done[:5] == [
        *[(where, "start 0 7"), (where, "wait 0 7"), (where, "read")],
        *[("own 0", "encode 1 0"), ("own 0", "start 1 0")],
    ]
    assert "own 1" not in cuda.made[0].waited_for  # nothing of the bucket waits for it
    assert blocks or "default" in cuda.made[1].waited_for  # a stamp has weights that the caller's stream reads
    assert not blocks or {stream for stream, _ in wire.done} == {"own 0"}


def test_a_cuda_graph_is_refused_in_words(cuda: FakeCuda) -> None:
    wire = Wire(cuda)
    cuda.is_capturing = True
    sequencer = Sequencer()
    for runner in (StreamRunner([cuda.new_stream()]), sequencer):  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="bucket would be reduced while a CUDA graph is captured.*no_sync"):
            runner.submit(wire, job(wire, 0))  # type: ignore[arg-type]
    sequencer.stop()
    assert not wire.done


def test_a_bucket_is_waited_for_on_the_stream_that_brought_it(cuda: FakeCuda) -> None:
    wire, backward = Wire(cuda), cuda.new_stream()
    with cuda.stream(backward):
        one = job(wire, 0)
    StreamRunner([cuda.new_stream()]).submit(wire, one)  # type: ignore[arg-type,list-item]
    assert cuda.made[1].waited_for == ["own 0"]


def test_several_communicators_share_one_stream(cuda: FakeCuda) -> None:
    wires = [Wire(cuda), Wire(cuda)]
    runner = runner_for(wires[0], streams=1)  # type: ignore[arg-type]
    for wire in wires:
        runner.submit(wire, job(wire, 0))  # type: ignore[arg-type]
    assert len(cuda.made) == 1
    assert {where for wire in wires for where, _ in wire.done} == {"own 0"}


def test_exposed_time_runs_from_the_last_bucket_to_its_result(cuda: FakeCuda) -> None:
    wire = Wire(cuda)
    one = job(wire, 0, last=True)
    StreamRunner([cuda.new_stream()]).submit(wire, one)  # type: ignore[arg-type,list-item]
    assert one.telemetry.steps == 1
    assert one.telemetry.exposed_s == 0
    since, until = one.telemetry._measuring[0]
    assert (since.where, until.where) == ("default", "own 0")  # type: ignore[attr-defined]
    cuda.has_passed = True
    assert one.telemetry.totals()["exposed_s"] == 1


def test_an_error_makes_the_result_nan_on_the_job_s_stream(cuda: FakeCuda) -> None:
    wire = Wire(cuda)
    one, later, runner = job(wire, 0, fails=True), job(wire, 1), StreamRunner([cuda.new_stream()])  # type: ignore[list-item]
    runner.submit(wire, one)  # type: ignore[arg-type]
    assert one.tensor.isnan().all()
    assert cuda.results == ["own 0"]
    assert str(one.error) == "bucket, stage 3, broke"
    with pytest.raises(RuntimeError, match="bucket, stage 3, broke"):
        one.wait()
    assert cuda.default.waited_for == ["own 0"]  # for the NaN
    asked = len(wire.done)
    runner.submit(wire, later)  # type: ignore[arg-type]
    assert str(later.error) == "bucket, after an earlier failure, broke"
    assert later.tensor.isnan().all()
    assert len(wire.done) == asked  # other ranks are elsewhere


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_tensor_that_its_caller_keeps_is_named_to_no_stream(cuda: FakeCuda, backend: str) -> None:
    """PyTorch would not give its memory to others before the GPU has caught up with the host."""
    wire = Wire(cuda, backend)
    runner = runner_for(wire)  # type: ignore[arg-type]
    one, broken = job(wire, 0), job(wire, 1, fails=True)
    held = [replace(each, is_held=True) for each in (one, broken)]
    caller = cuda.new_stream()
    runner.submit(wire, held[0])  # type: ignore[arg-type]
    with cuda.stream(caller):
        assert held[0].wait() is one.tensor
    (own,) = {where for where, _ in wire.done}
    assert caller.waited_for == [own]
    assert not hasattr(one.tensor, "streams")
    assert not cuda.results
    runner.submit(wire, held[1])  # type: ignore[arg-type]
    with cuda.stream(caller), pytest.raises(RuntimeError, match="broke"):
        held[1].wait()
    (after,) = {where for where, _ in wire.done if where != own} or {own}
    assert caller.waited_for == [own, after]
    assert broken.tensor.streams == [after]  # it becomes NaN there, and its caller lets go of it
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


def test_the_sequencer_issues_work_of_cuda_tensors_on_a_stream_of_its_own(cuda: FakeCuda) -> None:
    wire, sequencer = Wire(cuda, "gloo"), Sequencer()
    jobs = [job(wire, 0, 1), job(wire, 2)]
    for one in jobs:
        sequencer.submit(wire, one)  # type: ignore[arg-type]
    finished = threading.Event()
    jobs[1].future.add_done_callback(lambda _: finished.set())
    assert finished.wait(10)
    sequencer.stop()
    assert {where for where, _ in wire.done} == {"own 0"}
    assert {what for _, what in wire.done} >= {"start 2 1", "wait 2 1", "decode 0", "decode 2"}
    assert cuda.results == ["own 0", "own 0"]
    assert cuda.made[0].waited_for == ["default", "default"]
    assert all(one.tensor.streams == ["own 0"] for one in jobs)
    assert not cuda.default.waited_for
    assert cuda.devices == [("gqsgd-sequencer", DEVICE)]  # otherwise, every rank would take memory of GPU 0


def test_gloo_takes_the_shared_thread_whatever_the_device(cuda: FakeCuda) -> None:
    runner = runner_for(Wire(cuda, "gloo"))  # type: ignore[arg-type]
    assert isinstance(runner, Sequencer)
    assert not cuda.made
    release(runner)


def test_staging_waits_for_the_gpu_on_its_own_thread_only(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_host_like", lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    wire, backward, waited = Wire(cuda, "gloo"), cuda.new_stream(), []

    def query(event: FakeEvent) -> bool:
        assert threading.current_thread().name == "gqsgd-staging"
        waited.append(event.where)
        return len(waited) == 2

    monkeypatch.setattr(FakeEvent, "query", query, raising=False)

    def start(exchange: Exchange, stage: int, turn: int) -> Work:
        assert len(waited) == 2  # the input is there
        assert exchange.input is exchange.output
        assert exchange.input.tolist() == [3]
        exchange.output.fill_(7)
        return Work(wire, "wait")

    thread = staging.Staging(start, timedelta(seconds=10))  # type: ignore[arg-type]
    x = on_gpu(torch.tensor([3]))
    with cuda.stream(backward):
        work = thread.start(Exchange.in_place("sum", x), 1)
    finished = threading.Event()
    work.get_future().add_done_callback(lambda _: finished.set())
    assert finished.wait(10)
    assert waited == ["own 0"] * 2
    assert cuda.devices == [("gqsgd-staging", DEVICE)]
    work.wait()
    assert x.tolist() == [7]
    kept = weakref.ref(work)
    del work
    until = time.monotonic() + 10
    while kept() is not None and time.monotonic() < until:  # the thread may still be on its way back to its queue
        gc.collect()
    assert kept() is None, "the tensors of the last collective are kept until the next one"
    thread.close()


def test_a_table_is_copied_to_a_device_once_and_names_the_streams_that_use_it(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device: on_gpu(tensor.clone()))
    monkeypatch.setattr(layout, "_copies", {})
    blocks = torch.from_numpy(cut([Segment(0, 100, raw=False)], 64))
    with cuda.stream(cuda.new_stream()):
        copy = table_on(DEVICE, blocks)
    with cuda.stream(cuda.new_stream()):
        assert table_on(DEVICE, blocks) is copy
    assert copy.streams == ["own 0", "own 1"]  # type: ignore[attr-defined]
    assert table_on(blocks.device, blocks) is blocks
    del blocks
    gc.collect()
    assert not layout._copies
