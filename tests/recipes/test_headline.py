"""The picture that says how much sooner a target is reached."""

from __future__ import annotations

import io
import itertools
import math
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from recipes.comparison import headline
from recipes.comparison.embedding import on_dark
from recipes.comparison.headline import Headline, save_headline
from recipes.comparison.results import REFERENCE, Run, common_target, compare, seeds_in_words
from tests.recipes.made_up_runs import made_up_run

#: Width of a page's text on a screen of 390, in CSS pixels.
TEXT = 342
FILES = ["headline.png", "headline_dark.svg", "headline_narrow.svg", "headline_narrow_dark.svg"]

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


def drawn(variants: dict[str, list[Run]], tmp_path: Path, target: float | None = None) -> list[str]:
    """The names of the files that are drawn."""
    target = common_target(variants) if target is None else target
    folder = tmp_path / "drawn"
    folder.mkdir(exist_ok=True)
    files = save_headline(variants, compare(variants, target), target, "what was trained", folder / "headline.png")
    assert sorted(files) == sorted(folder.iterdir())
    return [file.name for file in files]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_gain_is_drawn(tmp_path: Path, seeds: int) -> None:
    assert drawn(runs_of(tmp_path, STEPS, seeds), tmp_path) == FILES


def test_names_of_curves_with_one_end_do_not_lie_on_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(headline, "save", lambda figure, file: figures.append(figure))
    monkeypatch.setattr(headline, "svg", lambda save: save(io.BytesIO()) or "")
    steps = {"ddp": 0.11, "ddp_bf16": 0.105, "gqsgd": 0.1}
    drawn_from = runs_of(tmp_path, steps, values=(0.5, 0.98, 0.98))
    target = 0.9
    save_headline(drawn_from, compare(drawn_from, target), target, "words", tmp_path / "headline.png")
    (axes,) = figures[0].axes
    figures[0].canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts if "at the end" in text.get_text()]
    assert len(boxes) == 3
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert max(axes.get_yticks()) <= 1


def test_text_can_be_read_on_a_narrow_screen(tmp_path: Path) -> None:
    drawn(runs_of(tmp_path, STEPS, 2), tmp_path)
    for name in FILES[2:]:
        image = (tmp_path / "drawn" / name).read_text()
        width = float(re.search(r'viewBox="0 0 ([\d.]+)', image)[1])
        # Matplotlib makes outlines of letters at 100 points smaller.
        points = [100 * float(scale) for scale in re.findall(r"scale\(([\d.]+) -[\d.]+\)", image)]
        assert points
        assert min(points) / width * TEXT >= 9, name


def test_dark_pictures_have_a_dark_ground(tmp_path: Path) -> None:
    drawn(runs_of(tmp_path, STEPS), tmp_path)
    for name in FILES[1:]:
        image = (tmp_path / "drawn" / name).read_text()
        assert ("#ffffff" in image) is ("dark" not in name)
        assert (on_dark("#ffffff") in image) is ("dark" in name)


def test_a_comparison_without_a_gain_removes_the_pictures_of_an_earlier_one(tmp_path: Path) -> None:
    variants = runs_of(tmp_path, STEPS)
    assert drawn(variants, tmp_path)
    assert not drawn({REFERENCE: variants[REFERENCE]}, tmp_path, 0.8)


def test_every_curve_has_its_own_number_of_seeds(tmp_path: Path) -> None:
    def notes(variants: dict[str, list[Run]]) -> str:
        return Headline(compare(variants, 0.8), variants, 0.8, "what was trained").notes

    one, two = runs_of(tmp_path / "one", STEPS), runs_of(tmp_path / "two", STEPS, 2)
    assert notes(one).endswith("what was trained; one seed")
    assert notes(two).endswith("what was trained; mean and range of 2 seeds")
    mixed = notes({"ddp": two["ddp"], "ddp_bf16": one["ddp_bf16"], "gqsgd": two["gqsgd"]})
    assert mixed.endswith("mean and range of seeds: ddp 2, ddp_bf16 1, gqsgd 2")
    assert [seeds_in_words(counts) for counts in ([1, 1], [2, 2], [2, 1])] == ["one seed", "2 seeds", "up to 2 seeds"]


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
