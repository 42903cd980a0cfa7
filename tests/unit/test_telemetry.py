"""Counters that are kept on a GPU and read without waiting, as far as a fake one can show."""

from __future__ import annotations

import math

import torch

from lightning_gqsgd.wire.telemetry import MAX_MEASURING, BucketCounters, Meter, Tally, Telemetry, moment
from tests.unit.fake_cuda import DEVICE, FakeCuda, cuda, on_gpu

__all__ = ["cuda"]


def test_a_tally_adds_numbers_and_tensors() -> None:
    tally = Tally()
    assert tally.total() == 0
    tally.add(2)
    assert tally.total() == 2
    tally.add(torch.tensor(3))
    tally.add(torch.tensor(4))
    assert int(tally.total()) == 9


def test_each_stream_adds_to_a_sum_of_its_own(cuda: FakeCuda) -> None:
    tally, first, second = Tally(), cuda.new_stream(), cuda.new_stream()
    added = []
    for stream, value in ((first, 1), (second, 10), (first, 100)):
        with cuda.stream(stream):
            added.append(on_gpu(torch.tensor(value)))
            tally.add(added[-1])
    assert not first.waited_for
    assert not second.waited_for
    assert int(tally.total()) == 111
    assert cuda.default.waited_for == ["own 0", "own 1"]
    assert added[1].streams == ["default"]  # its memory is not given away before that has been read


def test_samples_that_are_not_finite_are_left_out() -> None:
    telemetry = Telemetry()
    assert math.isnan(telemetry.last_rel_l2)
    assert (telemetry.error, telemetry.reference) == (0.0, 0.0)
    telemetry.end_step()  # without a sample
    assert math.isnan(telemetry.last_rel_l2)
    telemetry.add_sample(torch.tensor(1.0), torch.tensor(50.0))
    telemetry.add_sample(torch.tensor(math.nan), torch.tensor(7.0))
    telemetry.add_sample(torch.tensor(7.0), torch.tensor(math.inf))
    telemetry.add_sample(torch.tensor(3.0), torch.tensor(50.0))
    telemetry.end_step()
    assert telemetry.last_rel_l2 == 0.2
    telemetry.end_step()
    telemetry.add_sample(torch.tensor(math.nan), torch.tensor(1.0))
    telemetry.end_step()  # nothing finite: the latest step that was measured stays
    telemetry.add_sample(torch.tensor(1.0), torch.tensor(0.0))
    telemetry.end_step()
    assert telemetry.last_rel_l2 == 0.2
    assert (telemetry.error, telemetry.reference) == (4.0, 100.0)
    telemetry.add_sample(torch.tensor(9.0), torch.tensor(100.0))
    telemetry.end_step()
    assert telemetry.last_rel_l2 == 0.3
    assert (telemetry.error, telemetry.reference) == (13.0, 200.0)
    assert telemetry.steps == telemetry.totals()["steps"] == 6


def test_a_step_is_closed_on_the_stream_of_its_last_bucket(cuda: FakeCuda) -> None:
    telemetry, first, second = Telemetry(), cuda.new_stream(), cuda.new_stream()
    for step in range(2):
        for stream in (first, second):
            with cuda.stream(stream):
                telemetry.add_sample(on_gpu(torch.tensor(1.0)), on_gpu(torch.tensor(4.0 + 3 * step)))
        with cuda.stream(second):
            telemetry.end_step()
    assert set(second.waited_for) == {"own 0"}
    assert not first.waited_for
    assert telemetry.last_rel_l2 == math.sqrt(2 / 14)
    assert (telemetry.error, telemetry.reference) == (4.0, 22.0)


def test_counts_are_read_as_numbers() -> None:
    counters = BucketCounters()
    counters.add_nonfinite(2)
    counters.add_nonfinite(torch.tensor(1, dtype=torch.int32))
    assert counters.nonfinite_blocks == 3
    assert type(counters.nonfinite_blocks) is int
    telemetry = Telemetry(buckets={0: counters, 1: BucketCounters()})
    assert telemetry.totals()["nonfinite_blocks"] == 3


def test_exposed_time_on_the_cpu_is_the_clock_s() -> None:
    telemetry = Telemetry()
    telemetry.expose(1.5, 2.0)
    assert telemetry.exposed_s == 0.5
    assert isinstance(moment(torch.device("cpu")), float)


def test_exposed_time_on_a_gpu_is_booked_when_it_has_passed(cuda: FakeCuda) -> None:
    telemetry = Telemetry()
    meter = Meter(telemetry)
    for _ in range(2):
        telemetry.expose(moment(DEVICE), moment(DEVICE))
        telemetry.end_step()
    assert telemetry.exposed_s == 0  # and nobody waited
    cuda.has_passed = True
    telemetry.expose(moment(DEVICE), moment(DEVICE))
    assert telemetry.exposed_s == 3
    cuda.has_passed = False
    for _ in range(MAX_MEASURING + 10):
        telemetry.expose(moment(DEVICE), moment(DEVICE))
    cuda.has_passed = True
    assert meter.read()["gqsgd/exposed_s"] == (3 + MAX_MEASURING) / 2  # the oldest were dropped


def test_a_step_of_many_collectives_is_counted_as_a_whole(cuda: FakeCuda) -> None:
    """Under FSDP2, a hundred modules have three collectives each, which are issued before the GPU comes to them."""
    telemetry = Telemetry()
    for _ in range(300):
        telemetry.expose(moment(DEVICE), moment(DEVICE))
    cuda.has_passed = True
    assert telemetry.totals()["exposed_s"] == 300


def test_steps_of_plain_ddp_are_counted_and_leave_times_out() -> None:
    telemetry = Telemetry()
    meter = Meter(telemetry)
    telemetry.add_plain_step(100, 400, 300)
    values = meter.read()
    assert values["gqsgd/bytes_sent"] == 300
    assert values["gqsgd/bits_per_coordinate"] == 32
    assert "gqsgd/exposed_s" not in values
    telemetry.add_plain_step(100, 400, 300)
    telemetry.expose(0.0, 0.5)
    telemetry.end_step()
    assert meter.read()["gqsgd/exposed_s"] == 0.5  # of the one step that was timed
    assert telemetry.totals()["steps"] == 3
