"""Pictures of comparisons: that they are drawn, in which colours, and where labels are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from PIL import Image

from lightning_gqsgd.predict.model import Prediction
from pictures.labels import place_labels
from pictures.style import COLOURS
from recipes.comparison import plots
from recipes.comparison.page import STEP_WIDTHS
from recipes.comparison.plan import check_target
from recipes.comparison.plots import MANY, save_curves, save_family, save_step_times
from recipes.comparison.results import Run, common_target, compare, headings
from recipes.measuring.metrics import Metric
from recipes.strategies.choices import ALL, strategies
from tests.recipes.made_up_runs import made_up_run


@pytest.mark.parametrize("axis", ["time", "epoch", "mb_sent"])
def test_curves_are_drawn(variants: dict[str, list[Run]], tmp_path: Path, axis: Any) -> None:
    save_curves(variants, axis, "title", tmp_path / "plot.png", target=0.9)
    with Image.open(tmp_path / "plot.png") as picture:
        assert picture.width == 900
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**20)}
    assert {(0x4D, 0x4D, 0x4D), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= colours


def test_plots_of_runs_without_points_or_communication(tmp_path: Path) -> None:
    empty = {"ddp": [made_up_run(tmp_path, [])]}
    for axis in ("time", "epoch", "mb_sent"):
        save_curves(empty, axis, "title", tmp_path / f"{axis}.png")
    run = made_up_run(tmp_path / "alone", [0.4, 0.5])
    silent = Run(run.facts, run.time, run.epoch, 0 * run.mb_sent, run.value, math.nan)
    save_curves({"other name": [silent]}, "mb_sent", "title", tmp_path / "silent.png")


def test_a_single_validation_of_several_seeds_has_its_range(tmp_path: Path) -> None:
    runs = {"ddp": [made_up_run(tmp_path / str(value), [value], seed=seed) for seed, value in enumerate((0.4, 0.6))]}
    (axes,) = plots._draw_together(runs, "epoch", "title", math.nan, plots.SIZE).axes
    (drawn,) = axes.collections
    assert isinstance(drawn, LineCollection)  # an area would have no width
    assert np.asarray(drawn.get_paths()[0].vertices)[:, 1].tolist() == [0.4, 0.6]


def test_numbers_are_written_in_one_way(variants: dict[str, list[Run]]) -> None:
    (axes,) = plots._draw_together(variants, "time", "title", 0.9, plots.SIZE).axes
    assert {text.get_text()[-2:] for text in axes.get_yticklabels()} == {" %"}  # as the target's
    assert [plots._three_digits(value) for value in (6.77, 15, 99.97, 1234)] == ["6.77", "15.0", "100", "1,234"]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_metric_of_ones_own_may_be_below_zero_and_above_one(tmp_path: Path, higher_is_better: bool) -> None:
    metric = Metric("gain", "gain/pixel (dB)", higher_is_better, digits=0)
    values = [-20.0, 3.0, -2.0] if higher_is_better else [20.0, -3.0, -2.0]
    run = made_up_run(tmp_path, values, metric=metric)
    assert run.metric == metric
    assert metric.file == "gain-pixel-dB".lower()
    target = common_target({"ddp": [run]})
    assert math.isfinite(run.time_to(target))
    figure = plots._draw_together({"ddp": [run]}, "time", "title", target, plots.SIZE)
    low, high = figure.axes[0].get_ylim()
    assert low <= min(values)
    assert max(values) <= high
    assert headings(metric, target)[4] == f"time to {target:,.0f} (s)"
    check_target(-7.0, metric)


def test_step_times_are_drawn(variants: dict[str, list[Run]], tmp_path: Path) -> None:
    save_step_times(variants, "title", tmp_path / "steps.png")
    with Image.open(tmp_path / "steps.png") as picture:
        assert picture.width == 900


@pytest.mark.parametrize("width", [plots.SIZE[0], *STEP_WIDTHS])
def test_the_legend_of_steps_is_inside_of_the_picture(
    variants: dict[str, list[Run]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: float
) -> None:
    def check(figure: Any, file: Path) -> None:
        figure.set_dpi(plots.DPI)  # letters have other widths at each number
        FigureCanvasAgg(figure).draw()  # here, where fonts are those of the style
        (legend,) = figure.legends
        kinds.append(len(legend.get_texts()))
        place = legend.get_window_extent()
        assert figure.bbox.x0 <= place.x0 < place.x1 <= figure.bbox.x1

    kinds: list[int] = []
    monkeypatch.setattr(plots, "save", check)
    step = Prediction(0.2, 0.1, 0.0, 0.0, 0, (), 0)
    for predicted in ({}, dict.fromkeys(variants, step)):
        save_step_times(variants, "title", tmp_path / "steps.png", width, predicted)
    assert kinds == [3, 4]


@pytest.mark.parametrize(
    ("axis", "variants"),
    [
        pytest.param("time", ALL[-MANY - 1 :], marks=pytest.mark.slow),
        *(pytest.param(axis, ALL, marks=pytest.mark.slow) for axis in ("time", "epoch", "mb_sent")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} variants",
)
def test_many_curves_get_panels_of_their_own(tmp_path: Path, axis: Any, variants: Sequence[str]) -> None:
    run = made_up_run(tmp_path / "run", [0.5, 0.9, 0.97, 1.0])
    many: dict[str, list[Run]] = {name: [run] for name in variants}
    assert len(many) > MANY
    save_curves(many, axis, "title", tmp_path / "curves.png", target=0.9)
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width == 1350
        colours = {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in picture.convert("RGB").getcolors(2**20)}
    assert {COLOURS[name] for name in many} <= colours
    save_step_times(many, "title", tmp_path / "steps.png")


def test_every_strategy_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(strategies())
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.slow
def test_family_is_drawn_from_three_variants_on(tmp_path: Path) -> None:
    errors = {"gqsgd": 0.02, "gqsgd_4bit": 0.3, "cd_adam": 1.2, "mine bits=2": 0.01}
    runs = {name: [made_up_run(tmp_path / name, [0.5] * 6, codec=True, rel_l2=error)] for name, error in errors.items()}
    runs["ddp"] = [made_up_run(tmp_path / "ddp", [0.5])]
    lines = compare(runs, 0.9)
    assert not save_family([*lines[:2], lines[-1]], "title", tmp_path / "family.png")
    assert not (tmp_path / "family.png").exists()
    assert save_family(lines, "title", tmp_path / "family.png")
    with Image.open(tmp_path / "family.png") as picture:
        assert picture.width == 1350
        found = {colour for _, colour in picture.convert("RGB").getcolors(2**20)}
    assert {(0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73)} <= found


@pytest.mark.parametrize("spread", [5, 50, 500])
def test_labels_cover_neither_each_other_nor_points(spread: float) -> None:
    rng = np.random.default_rng(1)
    points = [(float(x), float(y)) for x, y in 500 + spread * rng.standard_normal((20, 2)).clip(-0.9, 0.9)]
    sizes = [(float(width), 12.0) for width in rng.integers(30, 120, 20)]
    legend = (900.0, 900.0, 1000.0, 1000.0)
    places = place_labels(points, sizes, (0, 0, 1000, 1000), gap=8, taken=[legend])
    dots = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    for number, (left, bottom, right, top) in enumerate(places):
        assert (right - left, top - bottom) == pytest.approx(sizes[number])
        assert 0 <= left <= right <= 1000
        assert 0 <= bottom <= top <= 1000
        for other in [*places[:number], *dots, legend]:
            apart = max(left, other[0]) >= min(right, other[2]) or max(bottom, other[1]) >= min(top, other[3])
            assert apart, (number, other)


def test_labels_without_room_are_still_placed() -> None:
    assert len(place_labels([(5, 5), (5, 5)], [(30, 30), (30, 30)], (0, 0, 10, 10), gap=2)) == 2
    assert place_labels([], [], (0, 0, 1, 1), gap=1) == []
