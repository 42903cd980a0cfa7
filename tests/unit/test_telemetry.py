"""Counters of numbers and tensors; `test_streams` has those that are kept on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_gqsgd.wire.telemetry import SAMPLE_NUMEL, BucketCounters, Meter, Tally, Telemetry, moment, sample_of


def test_a_tally_adds_numbers_and_tensors() -> None:
    tally = Tally()
    assert tally.total() == 0
    tally.add(2)
    assert tally.total() == 2
    tally.add(torch.tensor(3))
    tally.add(torch.tensor(4))
    assert int(tally.total()) == 9


@pytest.mark.parametrize("columns", [64, 96, 768, 1000, 1024, 4096])
def test_a_sample_has_coordinates_of_all_layers_and_of_all_columns(columns: int) -> None:
    numel = 1 << 19
    sample = sample_of(torch.arange(2 * numel).view(2, numel))
    of_each = len(sample[0].unique())
    assert SAMPLE_NUMEL / 2 <= of_each <= SAMPLE_NUMEL
    assert sample[0].equal(sample[1] - numel)
    layers = (sample[0] // (numel // 16)).flatten().bincount(minlength=16)
    assert layers.min() > of_each / 16 / 1.5
    places = (sample[0] % columns // (columns // 8)).flatten().bincount(minlength=8)[:8]
    assert places.min() > of_each / 8 / 4


def test_a_small_piece_is_sampled_as_a_whole() -> None:
    piece = torch.arange(100.0)[None]
    assert sample_of(piece).flatten().equal(piece[0])


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
