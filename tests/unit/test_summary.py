"""What is said at the start and at the end of a training of what is compressed."""

from __future__ import annotations

import math
import time

import pytest
import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.session.parameters import Parameter
from lightning_gqsgd.session.report import in_words, report, ring_bytes_in_fp32, summary
from lightning_gqsgd.wire.telemetry import Telemetry


def _trained(steps: int = 10) -> Telemetry:
    """Counters of a training of two ranks: 1,000,000 coordinates in each step, 1 MB sent, an error of a tenth."""
    telemetry = Telemetry()
    for _ in range(steps):
        bucket = telemetry.bucket(0)
        bucket.calls += 1
        bucket.numel += 1_000_000
        bucket.add_sent(1_000_000, 1_000_000)
        telemetry.add_sample(torch.tensor(1.0), torch.tensor(100.0))
        telemetry.end_step()
    return telemetry


def test_numbers_and_their_units() -> None:
    telemetry = _trained()
    values = summary(telemetry, ring_bytes_in_fp32(telemetry.buckets.values(), ranks=2))
    assert values["steps"] == 10
    assert values["bytes_sent"] == 10_000_000
    assert values["fp32_bytes"] == 40_000_000  # a ring of two ranks sends every coordinate once
    assert values["compression_ratio"] == 4
    assert values["bits_per_coordinate"] == 8
    assert values["mean_rel_l2"] == pytest.approx(0.1)
    assert math.isnan(values["step_s"])
    assert ring_bytes_in_fp32(telemetry.buckets.values(), ranks=4) == 60_000_000


def test_pauses_between_steps_and_steps_of_plain_ddp_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry, now = Telemetry(), 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    for step in range(9):
        telemetry.end_backward()
        telemetry.expose(0.0, 0.25)  # booked after the last bucket of a step has been filled
        # A validation after the fourth step; plain DDP carries steps after the sixth.
        now += {3: 100.0, 5: 7.0}.get(step, 1.0)
        if step == 5:
            telemetry.add_plain_step(10, 40, 40)
    values = summary(telemetry, ring_bytes_in_fp32(telemetry.buckets.values(), ranks=2))
    assert (values["step_s"], values["exposed_s"], values["waiting_share"]) == (1.0, 0.25, 0.25)


def test_the_line() -> None:
    values = {
        **{"steps": 1200, "bytes_sent": 4.81e6, "fp32_bytes": 19.08e6, "compression_ratio": 19.08 / 4.81},
        **{"bits_per_coordinate": 8.07, "mean_rel_l2": 0.0081},
        **{"step_s": 0.0305, "exposed_s": 0.003, "waiting_share": 0.1},
    }
    assert in_words(values) == (
        "gqsgd: in 1,200 steps, rank 0 sent 4.8 MB of gradients instead of 19.1 MB in fp32, 4.0 times less (8.07 bits "
        "per coordinate); the relative error of the mean gradient was 0.81 %; a step took 30.5 ms, and waited for "
        "gradients in 10 % of it"
    )
    unknown = {**values, "mean_rel_l2": math.nan, "waiting_share": math.nan, "compression_ratio": 0.5}
    assert in_words(unknown).endswith("2.0 times more (8.07 bits per coordinate)")
    same = in_words({**values, "compression_ratio": 1.02})
    assert "sent 4.8 MB of gradients, about as much as in fp32 (8.07 bits" in same
    small = in_words({**values, "bytes_sent": 48_100, "fp32_bytes": 190_800})
    assert "sent 0.048 MB of gradients instead of 0.19 MB in fp32, 4.0 times less" in small
    assert in_words({**values, "steps": 1, "bytes_sent": 0}) == (
        "gqsgd: 1 step, in which this process has sent no gradients"
    )


@pytest.mark.parametrize(
    ("numels", "words"),
    [
        ([10, 20], "2 smaller than 1024). Parameters of at least min_numel=1024 values would be, unless they are "),
        ([10, 20], "excluded; lower min_numel, or give a larger model"),
        ([2000, 20], "(1 smaller than 1024, 1 excluded by name)"),
        ([2000, 20], "excluded; exclude fewer of them"),
    ],
)
def test_a_training_that_compresses_nothing_says_how_to_change_that(numels: list[int], words: str) -> None:
    config = GQSGDConfig(reducer="gather")
    parameters = [Parameter(number, f"layer{number}", numel, raw=True) for number, numel in enumerate(numels)]
    line = report(config, [config], parameters, world_size=2, step=0)
    assert line.startswith("gqsgd: NOTHING IS COMPRESSED over 2 ranks: ")
    assert words in line


def test_a_model_with_tables_alone_has_a_line_with_a_subject() -> None:
    config = GQSGDConfig(reducer="gather")
    small = [Parameter(0, "layer", 10, raw=True)]
    assert report(config, [config], [], 2, 0, has_tables=True) == "gqsgd: tables over 2 ranks"
    line = report(config, [config], small, 2, 0, has_tables=True)
    assert line == "gqsgd: tables over 2 ranks; uncompressed: 10 values in 1 tensor (1 smaller than 1024)"
