"""Every benchmark runs; its figures are nobody's business here."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import accuracy, kernels, noise_bits, noise_layers, report
from lightning_gqsgd.predict.timing import in_turns
from tests.marks import needs_root
from tests.processes import ended_well

LAB = ["--hosts", "2", "--rate", "none", "--rounds", "1"]


def _run_here(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> str:
    """What a benchmark prints that needs no other process."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *words])
    threads = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(threads)
    return " ".join(capsys.readouterr().out.split())  # a table may break its cells in two


def _run(module: str, *arguments: str) -> str:
    return " ".join(ended_well("-m", f"benchmarks.{module}", *arguments, timeout=240).stdout.split())


def test_cases_run_in_turns() -> None:
    order: list[str] = []
    cases = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    seconds = in_turns(cases, 3, warmup=1, before=lambda: order.append("|"))
    assert "".join(order) == "|a|b" * 4
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_reports_are_tables_with_their_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--rounds", "2"])
    one = report.Report("speed", "Speed", {"case": "", "ms": ".1f"}, notes=["A note."], rows=[["a", 1.25], ["b", None]])
    one.save("python -m benchmarks.kernels")
    text = (tmp_path / "speed.md").read_text()
    assert "    python -m benchmarks.kernels --rounds 2\n" in text
    assert "| a | 1.2 |\n| b | – |\n\nA note.\n" in text
    assert json.loads((tmp_path / "speed.json").read_text())["rows"] == [["a", 1.25], ["b", None]]


def test_every_benchmark_that_users_start_reads_its_command_line() -> None:
    reads = re.compile(r"command_line\(|ArgumentParser\(|sys\.argv\[")
    for file in Path(report.__file__).parent.glob("*.py"):
        text = file.read_text()
        if f"\n    python -m benchmarks.{file.stem}" in text.split('"""')[1]:  # without, it is a rank of another one
            assert reads.search(text), f"{file.name} ignores --help"


def test_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("--numel", "10000", "--rounds", "2", "--bits", "4")
    assert "4 bit, blocks of 256" in _run_here(kernels, monkeypatch, capsys, *small)


@pytest.mark.slow
def test_accuracy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(accuracy, "NUMEL", 1 << 14)
    few = ("--bits", "8", "--block-size", "256", "--ranks", "2")
    assert "network, n = 2" in _run_here(accuracy, monkeypatch, capsys, *few)


@pytest.mark.slow
def test_noise_layers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(noise_layers, "CASES", ((2, 2),))
    monkeypatch.delenv("GQSGD_DATA", raising=False)
    assert "transformer" in _run_here(noise_layers, monkeypatch, capsys, "--steps", "41")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "arguments", "shown"),
    [
        ("kernels", ("--numel", "10000", "--rounds", "2", "--bits", "4"), "4 bit, blocks of 256"),
        ("accuracy", ("--bits", "8", "--block-size", "256", "--ranks", "2"), "network, n = 2"),
    ],
)
def test_benchmarks_are_commands(module: str, arguments: tuple[str, ...], shown: str) -> None:
    assert shown in _run(module, *arguments)


@needs_root
@pytest.mark.slow
def test_reducers() -> None:
    shown = _run("reducers", *LAB, "--numel", "70000")
    assert "two_shot, 8 bit without codec" in shown
    assert "sum, 4 bit" in shown


@needs_root
@pytest.mark.slow
def test_reducers_of_two_levels() -> None:
    levels = ("--ranks-per-host", "2", "--reducer", "two_shot", "hierarchical")
    shown = _run("reducers", *LAB, *levels, "--numel", "70000")
    assert "hierarchical, 4 bit without codec" in shown


@needs_root
@pytest.mark.slow
def test_connections() -> None:
    small = ("--member-rate", "1gbit", "--connections", "1", "3", "--numel", "1100000", "--rounds", "1", "--labs", "1")
    shown = _run("connections", *small)
    assert "two_shot, 4 bit, 3 connections" in shown
    assert "bf16" in shown


@needs_root
@pytest.mark.slow
def test_training() -> None:
    assert "gqsgd_4bit" in _run("training", *LAB, "--model", "resnet18", "--batch-size", "2")


@needs_root
@pytest.mark.slow
def test_prediction() -> None:
    shown = _run("prediction", "--hosts", "2", "--rate", "none", "--model", "mlp", "--seconds", "1")
    assert "mlp gqsgd_4bit, 2 hosts, none:" in shown
    assert "Predicted against measured step time" in shown


@needs_root
@pytest.mark.slow
def test_local_steps() -> None:
    few = ("--steps", "4", "--validate-every", "2", "--case", "ddp", "diloco, H=16, 4 bits")
    assert "diloco, H=16, 4 bits" in _run("local_steps", "--hosts", "2", "--rate", "none", *few)


def test_a_row_of_the_benchmark_of_noise_has_paired_differences_and_says_when_bits_fell(tmp_path: Path) -> None:
    def run(accuracy: float, curve: list[tuple[int, float, float]]) -> dict[str, Any]:
        return {"metrics": {"test/acc": accuracy}, "curve": curve, "bits_per_coordinate": 6.0, "mb_sent": 2.0}

    fell = [(1, 32.0, float("nan")), (50, 32.0, 7.0), (60, 4.0, 9.0)]
    stayed = [(1, 32.0, float("nan")), (60, 8.0, 3.0)]
    ways = {"ddp": [run(0.5, []), run(0.6, [])], 'bits="auto"': [run(0.51, fell), run(0.61, stayed)]}
    row = noise_bits.row_of("name", noise_bits.tasks(None)["digits, batch 32"], ways)
    assert row[:5] == ["name", "%", "55.00 ± 7.07", "56.00 ± 7.07", "+1.00 ± 0.00"]
    assert row[5:] == [6.0, "32 (1), 4 (60); 32 (1), 8 (60)", 5.0, 6.0, 2.0, 2.0]
    noise_bits._draw({"name": ways}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.slow
def test_bits_that_noise_allows(tmp_path: Path) -> None:
    words = ["--seeds", "1", "--task", "digits, batch 32", "--folder", str(tmp_path)]
    assert "digits, batch 32" in _run("noise_bits", *words)
    results = sorted(path.parent.name for path in tmp_path.glob("*/result.json"))
    assert results == ["digits,_batch_32-bits=auto-0", "digits,_batch_32-ddp-0"]
