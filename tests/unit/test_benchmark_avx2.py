"""Restricting Numba and torch to AVX2, and benchmarks that run under it by their own commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import avx2


def test_nothing_newer_than_avx2_is_left() -> None:
    found = avx2.without_avx512("+avx,+avx2,+avx512f,-avx512fp16,+avxvnni,+amx-tile,+gfni,+fma,-sha")
    assert found["NUMBA_CPU_FEATURES"] == "+avx,+avx2,-avx512f,-avx512fp16,-avxvnni,-amx-tile,-gfni,+fma,-sha"
    assert (found["NUMBA_CPU_NAME"], found["ATEN_CPU_CAPABILITY"]) == ("haswell", "avx2")


def test_figures_are_those_that_a_benchmark_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command gets the variables, and writes to a folder that is not benchmarks/results."""
    commands: list[list[str]] = []

    def run(command: list[str], env: dict[str, str], **_: Any) -> None:
        commands.append(command)
        folder = Path(command[3])
        rows = [["fp32", 1.0, 5.0], ["two_shot, 4 bit", 4.0, 2.0], ["bare", None, 1.0]]
        (folder / "x.json").write_text(json.dumps({"columns": ["case", "fp32 / time", "time"], "rows": rows}))
        assert env["NUMBA_CPU_NAME"] == "haswell"

    monkeypatch.setattr(subprocess, "run", run)
    part = avx2.Part("a bucket", "benchmarks.reducers", "--rounds 1", "fp32 / time")
    assert avx2.measured(part, avx2.without_avx512("+avx2")) == {"fp32": 1.0, "two_shot, 4 bit": 4.0}
    assert commands[0][4:] == ["benchmarks.reducers", "--rounds", "1", "--save"]


@pytest.mark.slow
def test_workers_of_a_benchmark_start_by_its_name(tmp_path: Path) -> None:
    command = [sys.executable, "-c", avx2._RUN, str(tmp_path), "benchmarks.reducers", "--help"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.startswith("usage: python -m benchmarks.reducers ")


def test_kernels_with_registers_of_avx512_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avx2, "wide_registers", lambda variables: 7)
    with pytest.raises(SystemExit, match="7 lines of the kernels' code have a zmm register under AVX2"):
        avx2.measure(None)  # type: ignore[arg-type]
