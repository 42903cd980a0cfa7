"""The picture that says how much sooner a target is reached."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipes.comparison.headline import save_headline
from recipes.comparison.results import Run, common_target, compare
from tests.recipes.made_up_runs import made_up_run

STEPS = {"ddp": 0.4, "ddp_bf16": 0.2, "gqsgd": 0.1, "gqsgd_4bit": 0.05}


def runs_of(
    tmp_path: Path, steps: dict[str, float], seeds: int = 1, values: tuple[float, ...] = (0.5, 0.8, 0.9)
) -> dict:
    return {
        name: [
            made_up_run(tmp_path / f"{name}-{seed}", [value - 0.01 * seed for value in values], step_s=step, seed=seed)
            for seed in range(seeds)
        ]
        for name, step in steps.items()
    }


def drawn(variants: dict[str, list[Run]], tmp_path: Path, target: float | None = None) -> bool:
    target = common_target(variants) if target is None else target
    file = tmp_path / "headline.png"
    there = save_headline(variants, compare(variants, target), target, "what was trained", file)
    assert there == file.exists()
    return there


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_gain_is_drawn(tmp_path: Path, seeds: int) -> None:
    assert drawn(runs_of(tmp_path, STEPS, seeds), tmp_path)


def test_times_of_hours_are_drawn_too(tmp_path: Path) -> None:
    assert drawn(runs_of(tmp_path, {name: 1000 * step for name, step in STEPS.items()}), tmp_path)


@pytest.mark.parametrize(
    "steps",
    [{"gqsgd": 0.1, "gqsgd_4bit": 0.05}, {"ddp": 0.4, "ddp_bf16": 0.2}, {"ddp": 0.1, "gqsgd": 0.1}],
    ids=["without ddp", "nothing but baselines", "no gain"],
)
def test_where_nothing_is_gained_there_is_no_picture(tmp_path: Path, steps: dict[str, float]) -> None:
    assert not drawn(runs_of(tmp_path, steps), tmp_path)


def test_a_target_that_a_curve_misses_has_no_time(tmp_path: Path) -> None:
    assert not drawn(runs_of(tmp_path, STEPS), tmp_path, target=0.99)
    assert not drawn(runs_of(tmp_path, STEPS), tmp_path, target=math.nan)
