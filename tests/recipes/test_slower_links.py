"""What a comparison on one machine says of slower links."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.comparison.page import Section, write_page
from recipes.comparison.plan import make_plan
from recipes.comparison.results import Run, compare
from recipes.comparison.slower_links import LINKS, Elsewhere, elsewhere
from tests.recipes.made_up_runs import made_up_run


@pytest.fixture
def on_one_machine(tmp_path: Path) -> dict[str, list[Run]]:
    """Two strategies on two processes; the steps of gqsgd take longer."""
    return {
        "ddp": [made_up_run(tmp_path / "ddp", [0.5, 0.9], step_s=0.02)],
        "gqsgd": [made_up_run(tmp_path / "gqsgd", [0.5, 0.9], step_s=0.025, codec=True)],
    }


@pytest.mark.slow
def test_slower_links_are_predicted_where_the_links_are_those_of_one_machine(
    on_one_machine: dict[str, list[Run]], tmp_path: Path
) -> None:
    configs = [cell.config for cell in make_plan(["+exp=quickstart"]).cells]
    links = elsewhere(configs, on_one_machine)
    assert links is not None
    assert links.compute_s == pytest.approx(0.015)  # a quarter of the step waits
    assert list(links.predicted) == list(LINKS)
    ratios = [row["ddp"] / row["gqsgd"] for row in links.predicted.values()]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 2
    assert all(row["ddp"] >= links.compute_s for row in links.predicted.values())
    assert links.lines[0].startswith("These 2 processes exchange gradients through the memory of one machine")
    assert links.lines[2].split() == ["this", "machine,", "measured", "20.0", "25.0", "(0.8×)"]

    section = Section("quickstart", tmp_path, on_one_machine, compare(on_one_machine, 0.9), 0.9, links)
    write_page([section], "quickstart", "a command", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "later" not in text
    assert "10 Mbit/s" in text


def test_a_prediction_below_the_measured_step_is_explained() -> None:
    measured = {"ddp": 0.042, "gqsgd": 0.05}
    below = Elsewhere(0.03, measured, {"1gbit": {"ddp": 0.039, "gqsgd": 0.06}}, processes=2)
    assert below.lines[-1].startswith(
        "A predicted step may be shorter than the measured one, although its link is slower"
    )
    above = Elsewhere(0.03, measured, {"1gbit": {"ddp": 0.043, "gqsgd": 0.06}}, processes=2)
    assert above.note == ""
    assert above.lines[-1].split() == ["1", "Gbit/s", "43.0", "60.0", "(0.7×)"]


@pytest.mark.parametrize(
    "overrides",
    [["hardware=netlab"], ["strategy=gqsgd"], ["strategy=ddp,dore"]],
)
def test_nothing_is_predicted_for_other_comparisons(on_one_machine: dict[str, list[Run]], overrides: list[str]) -> None:
    cells = make_plan(["+exp=quickstart", *overrides]).cells
    runs = {cell.variant: on_one_machine["ddp"] for cell in cells}
    assert elsewhere([cell.config for cell in cells], runs) is None


def test_steps_are_means_over_seeds_and_a_preset_with_other_bits_is_not_predicted(tmp_path: Path) -> None:
    runs = {
        name: [made_up_run(tmp_path / f"{name}{seed}", [0.5, 0.9], step_s=step_s, seed=seed) for seed in (0, 1)]
        for name, step_s in (("ddp", 0.02), ("gqsgd", 0.03))
    }
    runs["ddp"][1] = made_up_run(tmp_path / "ddp1", [0.5, 0.9], step_s=0.04, seed=1)
    cells = make_plan(["+exp=quickstart", "seed=0,1"]).cells
    links = elsewhere([cell.config for cell in cells], runs)
    assert links is not None
    assert links.measured == pytest.approx({line.variant: line.step_s for line in compare(runs, 0.4)})
    assert links.compute_s == pytest.approx(0.75 * 0.03)
    cells = make_plan(["+exp=quickstart", "strategy=gqsgd", "strategy.bits=4"]).cells
    plain = make_plan(["+exp=quickstart", "strategy=ddp"]).cells
    assert elsewhere([cell.config for cell in (*plain, *cells)], runs) is None


@pytest.mark.parametrize("model", [{"_target_": "mine.Network"}, {"sparse": True}], ids=["own", "sparse"])
def test_nothing_is_predicted_for_networks_that_the_model_does_not_know(
    on_one_machine: dict[str, list[Run]], model: dict[str, object]
) -> None:
    configs = [cell.config for cell in make_plan(["+exp=quickstart"]).cells]
    other = [{**config, "model": {**config["model"], **model}} for config in configs]
    assert elsewhere(other, on_one_machine) is None
