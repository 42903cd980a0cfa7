"""The picture of a terminal in README shows what the command prints now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_gqsgd.cli.app import app
from pictures.terminal import draw, shortened

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "advise.svg"
COMMAND = "gqsgd advise --model torchvision:resnet18 --link 1gbit --nodes 2 --backward 200ms --codec cpu"


@pytest.mark.slow
def test_the_picture_shows_what_the_command_prints(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, COMMAND.split()[1:])
    assert result.exit_code == 0, result.output
    drawn = tmp_path / "advise.svg"
    draw(shortened(result.output, ROOT), COMMAND, drawn)
    assert drawn.read_text() == PICTURE.read_text()


def test_pictures_of_terminals_are_small_name_no_folder_and_load_nothing() -> None:
    text = PICTURE.read_text()
    assert len(text) < 60_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}


def test_lines_of_progress_are_left_out_between_the_first_and_the_last_of_a_row() -> None:
    text = "begins\nstep 1/9 (11 %)\nstep 2/9 (22 %)\nstep 9/9 (100 %)\nin /some/folder/outputs, 40 %\n"
    kept = ["begins", "step 1/9 (11 %)", "step 9/9 (100 %)", "in outputs, 40 %"]
    assert shortened(text, Path("/some/folder")) == kept
