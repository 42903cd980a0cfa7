"""Trainings under rivals' hooks: a few steps of one process, the rows of the table, and the paragraph on who wins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import rival_trainings as trainings
from benchmarks.report import Report


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_ways_start_alike_and_the_gathering_ones_err_little() -> None:
    names = [trainings.COMPUTE, trainings.BASELINE, "torchft fp8", "hivemind blockwise 8 bit"]
    if torch.__version__ >= (2, 15):  # torch 2.14's hook takes the scales of all ranks for those of one
        names.append("torch per-tensor hook")
    batches = trainings.Batches()
    runs, early = trainings.train(names, 0, 3, batches)
    losses = [batches.loss(run.model.module) for run in runs.values()]
    assert losses[0] == losses[1]  # the mean of one rank is its own gradient
    assert losses == pytest.approx([losses[0]] * len(losses), rel=0.01)
    assert all(len(run.seconds) == len(run.sent) == 3 for run in runs.values())
    error, kept = trainings.probe("torchft fp8", early, batches.of(0, 3))
    assert 0.02 < error < 0.06
    assert kept == pytest.approx(1, abs=1e-3)  # the same error every time
    _, other = trainings.train([trainings.BASELINE], 1, 1, batches)
    assert not torch.equal(other["0.weight"], early["0.weight"])


def result() -> dict[str, Any]:
    """What workers found in two steps of two seeds."""
    facts = {
        trainings.COMPUTE: ([0.001, 0.001], 0.0, [9.0, 9.0]),
        trainings.BASELINE: ([0.1, 0.1], 4e4, [0.5, 0.7]),
        "gqsgd_4bit": ([0.02, 0.02], 5e3, [0.5, 0.71]),
        "torch bf16 hook": ([0.05, 0.05], 2e4, [0.4, 0.7]),
        "drive, 1 bit": ([0.01, 0.01], 2e3, [0.6, 0.9]),
    }
    found: dict[str, Any] = {
        name: {"seconds": seconds, "processor": seconds, "sent": sent, "losses": losses}
        for name, (seconds, sent, losses) in facts.items()
    }
    for name, error in (("gqsgd_4bit", 0.1), ("torch bf16 hook", 0.002), ("drive, 1 bit", 0.6)):
        found[name].update(error=error, kept=0.25)
    return {**found, "numel": 10_000}


def test_rows_have_differences_by_seed_and_rivals_that_win_are_named() -> None:
    report = Report("name", "title", {})
    trainings.add_rows(report, 2, "100mbit", result())
    rows = {row[0]: row for row in report.rows}
    assert trainings.COMPUTE not in rows
    assert rows[trainings.BASELINE][2] == pytest.approx(32)
    ours = rows["gqsgd_4bit"]
    assert ours[2:8] == pytest.approx([4.0, 10.0, 0.25, 19.0, 20.0, 5.0])
    assert ours[10] == "+0, +100"
    said = trainings.who_wins(report.rows, "100mbit")
    assert "The fewest bits: a rival has it, `drive, 1 bit` with 1.60; `gqsgd_4bit` has 4.00." in said
    assert "The smallest error at up to 5 bits: this package has it, `gqsgd_4bit` with 10.00;" in said
    assert "The lowest loss: a rival has it, `torch bf16 hook` with 0.5500;" in said
    assert "up to 9 bits" in said
    assert "Losses above plain DDP's with every seed: `drive, 1 bit`." in said
    assert "Losses below plain DDP's with every seed: none." in said
    assert "at up to 3 bits" not in said  # there is nobody of this package to compare with
