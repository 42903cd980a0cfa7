"""The examples of README and of the page about simulation, as they stand there."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/api/simulate.md")
EXAMPLES = [
    example for page in PAGES for example in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "output"),
    [
        ("Trainer(strategy=", "gqsgd: 9,472 gradient values in 2 tensors at 8 bits"),
        ("simulate(preset", "ecq_sgd "),
    ],
)
def test_example_in_processes(content: str, output: str, tmp_path: Path) -> None:
    (example,) = (one for one in EXAMPLES if content in one)
    file = tmp_path / "example.py"
    file.write_text(example)
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert output in done.stdout + done.stderr


def test_the_simulation_runs_with_fewer_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (example,) = (text for text in EXAMPLES if "simulate(preset" in text)
    assert "steps=300" in example
    (tmp_path / "example.py").write_text(example.replace("steps=300", "steps=3"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert "ecq_sgd " in capsys.readouterr().out


def test_there_are_no_other_examples() -> None:
    assert len(EXAMPLES) == 2
