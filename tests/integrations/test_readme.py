"""The examples of README and of the page about simulation, as they stand there."""

from __future__ import annotations

import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from tests.processes import ended_well

ROOT = Path(__file__).parents[2]


def examples(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_line_of_the_readme_makes_a_trainer() -> None:
    (line,) = examples("README.md")
    made: dict[str, Any] = {"Trainer": partial(Trainer, accelerator="cpu", logger=False)}
    exec(line, made)  # noqa: S102  # a line of our own README
    strategy = made["trainer"].strategy
    assert type(strategy).__name__ == "GQSGDStrategy"
    assert strategy.gqsgd_config.bits == 8


@pytest.mark.slow
def test_the_simulation_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    (example,) = examples("docs/api/simulate.md")
    file = tmp_path / "example.py"
    file.write_text(example)
    assert "ecq_sgd " in ended_well(str(file), timeout=200, cwd=tmp_path).stdout


def test_the_simulation_runs_with_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = examples("docs/api/simulate.md")
    assert "steps=300" in example
    (tmp_path / "example.py").write_text(example.replace("steps=300", "steps=3"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert "ecq_sgd " in capsys.readouterr().out
