"""What a comparison on shaped links shows of the performance model."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest

from recipes.comparison.page import Section, write_page
from recipes.comparison.plan import make_plan
from recipes.comparison.plots import save_step_times
from recipes.comparison.predictions import beside_measured
from recipes.comparison.results import Run, compare
from tests.recipes.made_up_runs import made_up_run

NETLAB = ["+exp=quickstart", "hardware=netlab", "strategy=ddp,gqsgd_4bit,dore"]


@pytest.fixture
def measured(tmp_path: Path) -> dict[str, list[Run]]:
    """Three strategies; a quarter of a step is exposed."""
    steps = {"ddp": 0.2, "gqsgd_4bit": 0.05, "dore": 0.07}
    return {name: [made_up_run(tmp_path / name, [0.5, 0.9], step_s=step)] for name, step in steps.items()}


@pytest.mark.slow
def test_steps_on_shaped_links_stand_beside_their_predictions(measured: dict[str, list[Run]], tmp_path: Path) -> None:
    configs = [cell.config for cell in make_plan([*NETLAB, "links=100mbit,1gbit"]).cells]
    slow, fast = (beside_measured(configs, link, measured) for link in ("100mbit", "1gbit"))
    assert list(slow) == list(fast) == ["ddp", "gqsgd_4bit"]  # the model does not know the memory of dore
    for made in (*slow.values(), *fast.values()):
        assert made.compute_s == pytest.approx(0.15)  # that of ddp: its step less what is exposed
        assert made.step_s >= made.compute_s
    assert slow["ddp"].wire_s == pytest.approx(10 * fast["ddp"].wire_s, rel=0.05)
    assert slow["ddp"].step_s > slow["gqsgd_4bit"].step_s

    section = Section("quickstart", tmp_path, measured, compare(measured, 0.9), 0.9, predicted=slow)
    write_page([section], "quickstart", "a command", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "A step as it is predicted" in text
    assert f"ddp {1e3 * slow['ddp'].step_s:.1f} ms" in text
    pictures = [base64.b64decode(code).decode() for code in re.findall(r"base64,([\w+/=]+)", text)]
    assert any("ms from the start of the step" in picture for picture in pictures)

    save_step_times(measured, "title", tmp_path / "without.png")
    save_step_times(measured, "title", tmp_path / "with.png", predicted=slow)
    assert (tmp_path / "without.png").read_bytes() != (tmp_path / "with.png").read_bytes()


@pytest.mark.parametrize(
    "overrides",
    [["hardware.rate=none"], ["hardware.devices=2"], ["hardware=cpu"], ["hardware.rate=1gbit,100mbit"]],
    ids=" ".join,
)
def test_nothing_is_predicted_for_links_that_the_model_does_not_know(
    measured: dict[str, list[Run]], overrides: list[str]
) -> None:
    configs = [cell.config for cell in make_plan([*NETLAB, *overrides]).cells]
    assert beside_measured(configs, None, measured) == {}


def test_nothing_is_predicted_without_plain_ddp(measured: dict[str, list[Run]]) -> None:
    configs = [cell.config for cell in make_plan(NETLAB).cells]
    del measured["ddp"]
    assert beside_measured(configs, None, measured) == {}
