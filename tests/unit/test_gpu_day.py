"""The command for a day with a GPU: each part ends, one that ended well is not run again, and a page says how."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Part, run
from tests.marks import needs_root
from tests.processes import ended


def _day(monkeypatch: pytest.MonkeyPatch, folder: Path, parts: dict[str, Part], *arguments: str) -> int:
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["gpu_day", "--dry", "--folder", str(folder), *arguments])
    with pytest.raises(SystemExit) as end:
        gpu_day.main()
    return int(end.value.code or 0)


def _part(code: str, folder: Path, seconds: float = 60) -> Part:
    file = folder / f"{len(list(folder.iterdir()))}.py"
    file.write_text(code)
    return Part("-c fail", str(file), seconds)


def test_parts_that_ended_well_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = _part("print('a table')", tmp_path)
    bad = _part("raise SystemExit('no such link')", tmp_path)
    folder = tmp_path / "day"
    assert _day(monkeypatch, folder, {"good": good, "bad": bad}) == 1
    page = (folder / "dry" / "page.md").read_text()
    assert "| good | well |" in page
    assert "| bad | with exit code 1 |" in page
    assert "a table" in page
    assert "no such link" in page
    capsys.readouterr()
    mended = _part("print('a picture')", tmp_path)
    assert _day(monkeypatch, folder, {"good": good, "bad": mended}) == 0
    assert "good: left out" in capsys.readouterr().out
    assert _day(monkeypatch, folder, {"good": bad, "bad": mended}, "--part", "good") == 1, "a named part runs again"


def test_a_part_may_keep_files_beside_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "keeps.py"
    file.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text('kept')")
    folder = tmp_path / "day"
    assert _day(monkeypatch, folder, {"keeps": Part("-c fail", f"{file} {{folder}}/kept", 60)}) == 0
    assert (folder / "dry" / "kept").read_text() == "kept"


@pytest.fixture(
    params=[
        pytest.param(signal.default_int_handler, id="terminal"),
        pytest.param(signal.SIG_IGN, id="background"),
    ]
)
def started_from(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a shell does with SIGINT for commands in a terminal, and for those in the background."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("started_from")
def test_a_part_whose_time_is_over_says_what_it_knows_and_leaves_no_process(tmp_path: Path) -> None:
    file = tmp_path / "waits.py"
    file.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "try:\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n"
        "    print('3 passed')\n"
    )
    outcome = run(str(file), 5, tmp_path / "log")
    assert outcome.code is None
    assert outcome.last[-1] == "3 passed"
    assert _ends(outcome.last[0]), "a process of the part still runs"


def _ends(process: str) -> bool:
    """Whether a process that was killed has ended: it may need a moment."""
    state = Path(f"/proc/{process}/stat")
    for _ in range(100):
        if not state.exists() or state.read_text().split()[2] == "Z":
            return True
        time.sleep(0.1)
    return False


def test_the_parts_are_commands_of_this_repository() -> None:
    for part in gpu_day.PARTS.values():
        for arguments in (part.on_card, part.dry):
            module = arguments.split()[1]
            assert module == "pytest" or Path(*module.split(".")).with_suffix(".py").exists(), module


@needs_root
@pytest.mark.slow
def test_every_part_runs_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    done = ended("-m", "benchmarks.gpu_day", "--dry", "--folder", str(tmp_path), timeout=280)
    page = (tmp_path / "dry" / "page.md").read_text()
    assert done.returncode == 0, page
    assert all(f"| {name} | well |" in page for name in gpu_day.PARTS), page
