"""The benchmark of GPU kernels, on the CPU and on made-up figures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_kernels, kernels, report, roofline
from benchmarks.gpu_kernels import AUTHORS_BYTES, CODECS, LIMITS, Target
from benchmarks.roofline import Fact
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.predict import timing
from lightning_gqsgd.predict.timing import EventClock, in_turns, stopwatch
from lightning_gqsgd.wire.communicator import NCCL_PIECE_NUMEL
from tests.errors import error_text

CPU = Target(torch.device("cpu"), stopwatch, lambda: None, cache_bytes=40_000)


def _per_coordinate(name: str, dtype: torch.dtype) -> dict[str, float]:
    numel = 1 << 20
    setting = setting_of(CODECS[name], 8, dtype)
    layouts = [layout for _, layout in gpu_kernels.layouts_of(numel, setting)]
    return {stage: count / numel for stage, count in gpu_kernels.stage_bytes(layouts, dtype.itemsize, ranks=8).items()}


@pytest.mark.parametrize(("name", "bits"), [("8 bit", 8), ("4 bit", 4), ("2 bit", 2), ("8 bit exponential", 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_stage(name: str, bits: int, dtype: torch.dtype) -> None:
    block = CODECS[name].block_size
    message, table = bits / 8 + 2 / block, 24 / block
    found = _per_coordinate(name, dtype)
    assert found["encode"] == found["decode"] == pytest.approx(dtype.itemsize + message + table, rel=1e-3)
    # Seven messages and the rank's own coordinates are read, and one message is written.
    assert found["reduce"] == pytest.approx(message + (dtype.itemsize + table) / 8, rel=1e-3)
    assert sum(found.values()) < LIMITS[str(dtype).removeprefix("torch.")]


def test_large_buckets_are_cut_and_no_coordinate_is_lost() -> None:
    numel = 2 * NCCL_PIECE_NUMEL + 512
    layouts = gpu_kernels.layouts_of(numel, setting_of(CODECS["8 bit"], 8, torch.float32))
    assert len(layouts) == 3
    assert [part.start for part, _ in layouts] == [0, *(part.stop for part, _ in layouts[:-1])]
    assert layouts[-1][0].stop == numel
    assert all(int(layout.blocks[:, 0].min()) == 0 for _, layout in layouts)


def test_bytes_of_baselines() -> None:
    assert gpu_kernels.cast_bytes(4) == {"encode": 10, "decode": 6}
    x = torch.ones(256)
    # abs 8, max 4 + 4/256, two products 16 + 4/256, random numbers 4, two sums 12 + 8, floor 8, cast 5
    assert gpu_kernels.traffic(lambda: gpu_kernels.quantise(x)) == 65 * 256 + 8
    codes, scales = gpu_kernels.quantise(torch.linspace(-3, 2, 512))
    back = gpu_kernels.dequantise(codes, scales, torch.float32)
    assert float((back - torch.linspace(-3, 2, 512)).abs().max()) <= 3 / 127


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx_6000_ada"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("", "unknown"),
    ],
)
def test_slugs(name: str, expected: str) -> None:
    assert report.slug(name) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_case_is_measured(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["kernels.py", "--device", "cuda"])
    facts = gpu_kernels.facts_of(CPU, 0.03, dtype, ranks=4, rounds=2, codecs=list(CODECS))
    assert {one.numel for one in facts} == {30_000 // dtype.itemsize // 256 * 256}
    assert all(one.seconds > 0 and one.of_copy > 0 for one in facts)
    assert all((one.host_seconds or 0) > 0 for one in facts if one.family != "Global-QSGD")
    roof = facts[0].nbytes / facts[0].seconds
    shares = [one for one in facts if one.family == "Global-QSGD"]
    assert [one.numel * AUTHORS_BYTES / one.seconds for one in shares] == pytest.approx(
        [roof] * (dtype == torch.float32)
    )
    one = gpu_kernels.report_of(facts, CPU, 4, "NVIDIA H100 80GB HBM3")
    one.show()
    one.save("python -m benchmarks.kernels")
    rows = {row[0]: row for row in one.rows}
    assert list(rows)[: 1 + len(CODECS)] == ["copy_", *CODECS]
    assert rows["8 bit"][3].count(" / ") == 2
    assert rows["torch operations"][3].count(" / – / ") == 1
    assert rows["copy_"][8] == "1.00"
    assert "![Kernels on NVIDIA H100 80GB HBM3" in (tmp_path / "kernels_cpu_h100.md").read_text()
    assert len(json.loads((tmp_path / "kernels_cpu_h100.json").read_text())["facts"]) == len(facts)
    assert (tmp_path / "kernels_cpu_h100.png").read_bytes().startswith(b"\x89PNG")


class _Event:
    """Of a device that comes to a case while the host still issues it, unless it sleeps long enough before."""

    slept = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return _Event.slept < 3 << 20

    def elapsed_time(self, end: _Event) -> float:
        return 5.0


def test_the_clock_of_a_device_runs_a_case_again_that_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: setattr(_Event, "slept", cycles))
    runs: list[int] = []
    case = {"case": lambda: runs.append(_Event.slept)}
    seconds = in_turns(case, 2, warmup=1, clock=EventClock())
    assert runs == [1 << 20, 2 << 20, 4 << 20, 4 << 20, 4 << 20]
    assert seconds["case"].tolist() == [0.005, 0.005]
    # A case with collectives also runs again if another rank was too late, because its collectives would have no
    # partner otherwise.
    monkeypatch.setattr(timing, "slowest", lambda values, _: torch.tensor([max(int(values[0]), len(runs) < 4)]))
    runs.clear()
    in_turns(case, 2, warmup=0, clock=timing.clock_of_ranks(torch.device("cuda", 0)))
    assert runs == [1 << 20, 2 << 20, 4 << 20, 8 << 20, 8 << 20]


def test_a_card_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    text = report.gpu_machine(torch.device("cuda"))
    assert text.startswith("NVIDIA H100 80GB HBM3, 80 GiB, driver unknown, CUDA ")
    assert f"torch {torch.__version__}" in text


def _made_up(dtype: str, megabytes: float, rate: float = 3e12) -> list[Fact]:
    size = (megabytes, dtype, round(megabytes * 1e6))
    stages = [("copy_", "copy_", "copy_", 8.0), ("Global-QSGD", "Global-QSGD", "all", 62.0)]
    for name in CODECS:
        stages += [(name, "gqsgd", "encode", 5.0), (name, "gqsgd", "reduce", 1.2), (name, "gqsgd", "decode", 5.0)]
    stages += [(f"{name} hook", "torch's hooks", "encode", 10.0) for name in ("fp16", "bf16")]
    return [Fact(*names, *size, size[2] * count / rate, size[2] * count, 1.0) for *names, count in stages]


def test_the_picture_can_be_drawn_and_needs_a_common_size(tmp_path: Path) -> None:
    facts = [*_made_up("float32", 1), *_made_up("float32", 100), *_made_up("float32", 1000)]
    facts += [*_made_up("bfloat16", 1), *_made_up("bfloat16", 100)]
    assert roofline.common_sizes(facts) == {1, 100}
    roofline.save_figure(facts, "a card", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="measure the same sizes in each"):
        roofline.save_figure([*_made_up("float32", 1), *_made_up("bfloat16", 2)], "a card", tmp_path / "two.png")


def _main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["kernels.py", *arguments])
    return error_text(SystemExit, kernels.main)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = _main(monkeypatch, "--device", "cuda")
    assert "sees no CUDA device" in text
    assert "leave --device at cpu" in text
    assert "\n" not in text
    assert "--numel is for --device cpu" in _main(monkeypatch, "--device", "cuda", "--numel", "5")
    assert "--ranks is for --device cuda" in _main(monkeypatch, "--ranks", "5")
    options = argparse.Namespace(device="cpu", **dict.fromkeys([*kernels.OF_DEVICE["cpu"], *kernels.OF_DEVICE["cuda"]]))
    monkeypatch.setattr(kernels, "measure_on_cpu", lambda options: options)
    assert kernels.measure(options).numel == [6_553_600]
