"""The pictures of terminals in README and on the first page show what the commands print now."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from lightning_gqsgd.cli.app import app
from pictures.terminal import LONGEST_S, SPEED, WIDTH, draw, shortened

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "advise.svg"
COMMAND = "gqsgd advise --model torchvision:resnet18 --link 1gbit --nodes 2 --backward 200ms --codec cpu"


@pytest.mark.slow
def test_the_picture_shows_what_the_command_prints(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, COMMAND.split()[1:])
    assert result.exit_code == 0, result.output
    drawn = tmp_path / "advise.svg"
    draw([line for _, line in shortened(result.output.splitlines(), ROOT)], COMMAND, drawn)
    assert drawn.read_text() == PICTURE.read_text()
    page = (ROOT / "docs" / "performance.md").read_text()
    _, _, table = result.output.partition("\n\n")  # below the title
    assert table[: table.index("\nTake bits")] in page


@pytest.mark.slow
def test_the_page_shows_what_the_command_for_fsdp_prints() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    (command,) = re.findall(r"^    gqsgd (advise --fsdp .*)$", page, re.MULTILINE)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    block = page.partition(command)[2].split("```")[1].strip()
    table, _, advice = block.partition("\nTake ")
    printed = result.output.splitlines()
    # A terminal of the page's width has fewer columns than a pipe.
    for row in table.splitlines():
        cells = row.strip("─ ").split()
        assert any(line.strip("─ ").split()[: len(cells)] == cells for line in printed), row
    assert "Take " + " ".join(advice.split()) in printed


@pytest.mark.parametrize("name", ["advise.svg", "quickstart.svg"])
def test_pictures_of_terminals_are_small_name_no_folder_and_load_nothing(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    assert len(text) < 60_000
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}


def test_the_recording_is_of_readmes_first_command() -> None:
    (command,) = re.findall(r"uv run (python recipes/compare.py \S+)", (ROOT / "README.md").read_text())
    assert f"Terminal: {command}, and what it prints" in (ROOT / "docs" / "quickstart.svg").read_text()


def test_lines_of_progress_are_left_out_between_the_first_and_the_last_of_a_row() -> None:
    lines = ["begins", "step 1/9 (11 %)", "step 2/9 (22 %)", "step 9/9 (100 %)", "in /some/folder/outputs, 40 %"]
    kept = [(0, "begins"), (1, "step 1/9 (11 %)"), (3, "step 9/9 (100 %)"), (4, "in outputs, 40 %")]
    assert shortened(lines, Path("/some/folder")) == kept


def test_lines_of_a_recording_appear_in_their_order_and_pauses_have_an_end(tmp_path: Path) -> None:
    draw(["first", "x" * (WIDTH + 1), "last"], "a <command>", tmp_path / "recording.svg", [6.0, 12.0, 1e4])
    root = ElementTree.parse(tmp_path / "recording.svg").getroot()  # noqa: S314 - a file of this test
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text or ""
    delays = [float(delay) for delay in re.findall(r"1ms ([\d.]+)s", style)]
    begin = 0.5  # the command stands alone
    assert delays == pytest.approx([begin + 6 / SPEED, begin + 12 / SPEED, begin + 12 / SPEED + LONGEST_S])
    rules = re.findall(r"terminal-line-(\d+)", style)
    assert rules == ["1", "2", "3", "4"]  # the command is there from the start, and the long line has two rows
    assert "prefers-reduced-motion:no-preference" in style
