"""Local steps of virtual workers as a user calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.local import Crowd
from lightning_gqsgd.research.simulation.problems import Quadratic

PROBLEM = Quadratic(300, condition=10, spread=1.0, dtype=torch.float64)


class TwoParameters(Quadratic):
    """The same with two parameters, so that there may be two fragments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.segments = [Segment(0, 400, raw=False), Segment(1, 600, raw=False)]


def run(preset: str = "ddp", steps: int = 12, **fields: Any) -> Any:
    """A short run of four workers."""
    return simulate(preset, PROBLEM, workers=4, steps=steps, progress=False, record_every=1, **fields)


def test_an_average_after_every_step_is_training_without_local_steps() -> None:
    local = run(local_steps=1, outer="sgd")
    np.testing.assert_allclose(local.parameters, run().parameters, rtol=1e-12)
    assert local.bytes_sent.tolist() == run().bytes_sent.tolist()


def test_a_round_by_hand() -> None:
    """Workers with 3, 1, 2 and 3 steps of momentum SGD, two rounds and a step more, with DiLoCo's outer optimizer."""
    steps_of, anchor = [3, 1, 2, 3], PROBLEM.start()
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    points = [torch.nn.Parameter(anchor.clone()) for _ in steps_of]
    inner = [torch.optim.SGD([point], lr=0.1, momentum=0.5) for point in points]
    for step in range(7):
        stacked = torch.stack([point.detach() for point in points])
        for worker, gradient in enumerate(PROBLEM.gradients(stacked, step, 4)):
            if step % 3 < steps_of[worker]:
                points[worker].grad = gradient
                inner[worker].step()
        if step % 3 == 2 or step == 6:
            mean = torch.stack([anchor - point.detach() for point in points]).mean(0)
            if step == 6:  # the round is cut off: the mean of the models
                anchor -= mean
            else:
                anchor.grad = mean
                outer.step()
            for point in points:
                point.data.copy_(anchor)
    record = run(
        steps=7,
        local_steps_of=steps_of,
        outer="nesterov",
        outer_after=0,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    )
    np.testing.assert_allclose(record.parameters, anchor.numpy(), rtol=1e-12)
    assert record.bytes_sent[[1, 2, 3]].tolist() == [0, 0, record.bytes_sent[3]]


def test_as_many_workers_as_asked_take_part_and_all_in_the_long_run() -> None:
    crowd = Crowd(10, participation=4, seed=3)
    rounds = [crowd.of_round(number) for number in range(50)]
    assert all(len(set(workers)) == 4 for workers in rounds)
    assert set(sum(rounds, [])) == set(range(10))
    assert rounds != [Crowd(10, participation=4, seed=4).of_round(number) for number in range(50)]
    half = run(local_steps=2, participation=2, preset="gqsgd_4bit", reducer="gather")
    whole = run(local_steps=2, preset="gqsgd_4bit", reducer="gather")
    assert half.bytes_sent[-1] * 6 == whole.bytes_sent[-1]  # half of the workers, each to one other, not to three
    assert half.loss[-1] < half.loss[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"preset": "gqsgd_diloco", "local_steps": 4, "fragments": 2, "delay": 1},
        {"preset": "ecq_sgd", "local_steps": 3, "outer": "sgd"},
        {"preset": "topk_ef", "local_steps": 2, "outer": "sgd", "density": 0.2},
    ],
)
def test_fragments_a_delay_and_memories_go_downhill(fields: dict[str, Any]) -> None:
    given = {"workers": 3, "steps": 24, "lr": 0.2, "progress": False, **fields}
    record = simulate(problem=TwoParameters(), **given)
    assert record.loss[-1] < 0.9 * record.loss[0]
    assert record.diverged_at is None


def test_changes_that_are_not_finite_are_left_out() -> None:
    record = run(local_steps=2, lr=1e200, outer="sgd")
    assert np.array_equal(record.parameters, PROBLEM.start().numpy())
    assert np.isnan(record.relative_error[-1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"participation": 2}, "participation=2 is for local steps; give local_steps=32 as well"),
        ({"delay": 1}, "delay=1 is for local steps"),
        ({"local_steps": 2, "participation": 5}, "participation=5 is out of range: 1 to 4"),
        ({"local_steps": 2, "local_steps_of": [1, 2]}, "has 2 numbers for 4 workers"),
        ({"local_steps": 2, "local_steps_of": [1, 2, 3, 1]}, "has more steps than a round of local_steps=2"),
        ({"local_steps_of": [1, 2, 0, 1]}, r"local_steps_of\[2\]=0 is out of range"),
        ({"local_steps": 0}, "local_steps=0 is out of range"),
        ({"local_steps": "20s"}, "local_steps=20 s with elastic=False: virtual workers have no clocks"),
        ({"local_steps": 4, "participation": 2, "delay": 1}, "a worker takes part in whole rounds"),
        ({"preset": "dore", "local_steps": 4, "participation": 2}, "goes without a memory"),
        ({"local_steps": 4, "bit": 2}, "unknown field 'bit'"),
        ({"preset": "fedpaq"}, "unknown preset 'fedpaq'"),
    ],
)
def test_what_cannot_work(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(**fields)


def test_rules_by_name_by_numbers_and_what_is_none() -> None:
    assert LocalOptions(rule={"name": "mean"}) == LocalOptions()
    with pytest.raises(ConfigError, match="rule='median' is not one of 'mean'"):
        LocalOptions(rule="median")
    with pytest.raises(ConfigError, match="give the fields of Mean"):
        LocalOptions(rule={"name": "mean", "weight": 2})
