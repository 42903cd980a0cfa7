"""The benchmark of threads, on a small bucket."""

from __future__ import annotations

import sys

import pytest

from benchmarks import codec_threads
from lightning_gqsgd.kernels.layout import PIECE_NUMEL


def test_every_number_of_threads_gives_the_same_bits() -> None:
    bench = codec_threads.Bench(3 * PIECE_NUMEL)
    before = bench.buffer.clone()
    for reducer in ("two_shot", "gather"):
        plan = bench.plan(reducer, 4)
        results = []
        for threads in (1, 3):
            bench.buffer.copy_(before)
            bench._telemetry.buckets.clear()  # the step that numbers the dither
            results.append(bench.run(plan, threads).clone())
        assert (results[0] == results[1]).all()
    bench.close()


def test_the_table_has_a_row_for_each_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(codec_threads, "NUMEL", 2000)
    monkeypatch.setattr(sys, "argv", ["codec_threads", "--rounds", "2", "--threads", "1", "2"])
    codec_threads.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "8 bit" in line]
    assert [row.split("bit")[1].split()[0] for row in rows] == ["1", "2"] * 3
    assert [row.split(",")[0].strip() for row in rows] == ["kernels alone"] * 2 + ["two_shot"] * 2 + ["gather"] * 2
