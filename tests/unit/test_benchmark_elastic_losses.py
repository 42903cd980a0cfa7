"""Members under a virtual clock, who train to as many samples as ddp."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks import elastic_losses as losses
from benchmarks.virtual_members import Clock, Training, VirtualMembers

ELASTIC = "elastic, rounds of 16 steps"
CLOCK = Clock(every=8.0, merge=2.0, kill_every=12.0, down=10.0)


def counts(model: nn.Module, optimizer: Optimizer, batches: torch.Generator, seen: int) -> None:
    """A step that takes 1 off the weight, so that a model counts the steps that it has."""
    with torch.no_grad():
        next(model.parameters()).sub_(1.0)


def counting(samples: int) -> Training:
    """A model that counts steps, of two samples each."""

    def model() -> nn.Module:
        made = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    return Training(model, lambda made: torch.optim.SGD(made.parameters(), lr=1.0), counts, 2, samples)


def members(seed: int, samples: int = 2000, clock: Clock = CLOCK) -> VirtualMembers:
    """Members that count their steps."""
    return VirtualMembers(counting(samples), clock, seed, outer="sgd")


@pytest.mark.parametrize("seed", range(4))
def test_members_have_the_same_anchors_and_the_samples_that_were_asked_for(seed: int) -> None:
    world = members(seed)
    world.run()
    alive = world._alive()
    assert len({(member.shared.merges, member.shared.checksum()) for member in alive}) == 1
    assert world.kills > 3
    most = 2 * sum(1 / step for step in CLOCK.steps) * CLOCK.every
    assert abs(world.samples - 2000) < 2 * most


def test_without_kills_the_model_has_the_mean_steps_of_its_members() -> None:
    clock = Clock(every=8.0, kill_every=0.0)
    world = members(0, clock=clock)
    model = world.run()
    moved = -float(next(model.parameters()).detach())
    # Each merge moves the anchor by the mean over samples: the square of steps over steps.
    fast, slow = clock.every, clock.every / 4
    mean = (3 * fast**2 + slow**2) / (3 * fast + slow)
    steps = world.samples / 2
    assert moved == pytest.approx(steps * mean / (3 * fast + slow), rel=0.1)


@pytest.mark.slow
def test_a_seed_says_all_that_happens() -> None:
    first, second, other = (losses.elastic(CLOCK, 1e-3, seed, 1600) for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.slow
def test_both_ways_learn_and_what_is_over_is_kept(tmp_path: Path) -> None:
    trainings = losses.Trainings(tmp_path, 1280, 60.0)
    found = {way: trainings.result(way, 4e-3, 0) for way in ("ddp", ELASTIC)}
    assert all(result is not None and result["loss"] < 4.5 for result in found.values())
    late = losses.Trainings(tmp_path, 1280, 0.0)
    assert {way: late.result(way, 4e-3, 0) for way in found} == found
    assert late.result("ddp", 4e-3, 1) is None


def test_what_is_not_over_is_named(tmp_path: Path) -> None:
    options = argparse.Namespace(folder=str(tmp_path), samples=1280, minutes=0.0, way=[ELASTIC])
    report = losses._measure(options)
    assert report.rows == []
    assert f"Not over yet: {ELASTIC}." in report.notes
