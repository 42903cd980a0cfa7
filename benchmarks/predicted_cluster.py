"""Predicted training steps on two nodes of eight GPUs: plain DDP, torch's bf16 hook, and this package.

    python -m benchmarks.predicted_cluster --save

The figures are those of `gqsgd advise --model transformers:gpt2 --backward 120ms --nodes 2 --gpus-per-node 8` at each
link. No cluster of GPUs has been measured.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.default_reducer import Cluster
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.predict.model import BF16, NATIVE
from lightning_gqsgd.predict.models import USUAL_BATCH, build, operations
from lightning_gqsgd.predict.timeline import estimated
from lightning_gqsgd.presets import make_config
from pictures.style import COLOURS, drawn

MODEL = "transformers:gpt2"
BACKWARD_S = 0.12
NODES = 2
GPUS = 8
GBITS = (10.0, 25.0)
CASES = ("ddp", "ddp_bf16", "gqsgd", "gqsgd_4bit")
_DDP = {"ddp": NATIVE, "ddp_bf16": BF16}


def measure(options: argparse.Namespace) -> Report:
    """Predict the steps."""
    report = Report(
        "predicted_cluster",
        f"Predicted training step of GPT-2, {NODES} nodes of {GPUS} GPUs",
        {"case": "", "link (Gbit/s)": "g", "step (ms)": ".0f", "ddp / step": ".2f", "ddp_bf16 / step": ".2f"},
        notes=[
            "Predictions, not measurements: GPT-2 of 124 M parameters in fp32, a backward pass of 120 ms on each GPU, "
            "H100 with NVLink inside of a node. No cluster of GPUs has been measured yet.",
            f"The same by hand: `gqsgd advise --model {MODEL} --backward 120ms --nodes {NODES} --gpus-per-node {GPUS} "
            "--link 10gbit`.",
        ],
        machine="A model of the step, no machine",
    )
    built = build(MODEL, USUAL_BATCH, torch.device("meta"))
    timeline = estimated(built.model, BACKWARD_S, weights=operations(built))
    for gbit in GBITS:
        cluster = Cluster(NODES, GPUS, gbit, "h100")
        ways = {name: _DDP.get(name) or cluster.fitted(make_config(name), timeline).config for name in CASES}
        steps = {name: cluster.milliseconds(timeline, way) for name, way in ways.items()}
        for name, step in steps.items():
            report.rows.append([name, gbit, step, steps["ddp"] / step, steps["ddp_bf16"] / step])
    report.draw = lambda file: _draw(report, file)
    return report


def _draw(report: Report, file: Path) -> None:
    with drawn(file, figsize=(7.2, 2.9), layout="constrained") as figure:
        several = figure.subplots(1, len(GBITS), sharex=True, sharey=True)
        for axes, gbit in zip(several, GBITS, strict=True):
            rows = [row for row in report.rows if row[1] == gbit]
            names = [str(row[0]) for row in rows]
            steps = [float(row[2] or 0) for row in rows]
            bars = axes.barh(names, steps, color=[COLOURS[name] for name in names], height=0.62)
            axes.bar_label(bars, [f"{step:.0f} ms" for step in steps], padding=3, fontsize=9, color="#333333")
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
            axes.set_title(f"{gbit:g} Gbit/s between nodes")
            axes.set_xlim(0, 1.2 * max(float(row[2] or 0) for row in report.rows))
        several[0].invert_yaxis()  # the axes are shared, so that both panels have turned them
        figure.supxlabel("training step of GPT-2 on 2 nodes of 8 GPUs (ms): predicted, not measured", fontsize=9)


if __name__ == "__main__":
    present(command_line(__doc__), measure)
