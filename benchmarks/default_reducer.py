"""The reducer that "auto" takes, against the best one, over clusters of nodes with several GPUs.

    python -m benchmarks.default_reducer [--save] [--device h100]

For each cluster and model, the predicted step of `reducer="auto"` is compared with the shortest one among reducers at 8
bits, and with that of plain DDP (`gqsgd advise` makes the same predictions). "auto" chooses before it knows how long
the backward pass takes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from unittest.mock import patch

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.costs import ESTIMATES, LATENCY_S, Link, collectives_between, inside_of
from lightning_gqsgd.predict.levels import Fit, fitted
from lightning_gqsgd.predict.model import NATIVE, predict
from lightning_gqsgd.predict.models import build
from lightning_gqsgd.predict.timeline import Timeline, estimated
from lightning_gqsgd.session.nodes import Layout

#: Models, and seconds of their backward passes.
MODELS = {"torchvision:resnet50": 0.06, "torchvision:vgg16": 0.12, "transformers:gpt2": 0.1}
NODES = (2, 4, 8, 16, 32, 64)
PER_NODE = (1, 2, 4, 8)
GBITS = (1.0, 2.5, 10.0, 25.0, 100.0)
BITS = 8
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """Predicted milliseconds of a step, and what "auto" takes."""

    model: str
    nodes: int
    per_node: int
    gbit: float
    taken: str
    is_warned: bool
    ddp_ms: float
    one_level_ms: float
    two_levels_ms: float | None

    @property
    def auto_ms(self) -> float:
        """Milliseconds with what "auto" takes."""
        return self.one_level_ms if self.two_levels_ms is None or self.taken == "one level" else self.two_levels_ms

    @property
    def above_best(self) -> float:
        """By which share the step is longer than that of the best reducer."""
        return self.auto_ms / min(filter(None, (self.one_level_ms, self.two_levels_ms))) - 1

    @property
    def above_ddp(self) -> float:
        """By which share the step is longer than that of plain DDP."""
        return self.auto_ms / self.ddp_ms - 1


def row(timeline: Timeline, name: str, nodes: int, per_node: int, gbit: float, device: str) -> Row:
    """Returns the predictions for a cluster."""
    rate = gbit * 1e9 / 8
    inside = Link(inside_of(device), min(LATENCY_S, 5e-6))
    costs = ESTIMATES[device].costs(collectives_between(nodes, per_node, Link(rate, LATENCY_S), inside))
    layout = Layout(tuple(rank // per_node for rank in range(nodes * per_node)), rate)

    def milliseconds(method: GQSGDConfig | str) -> float:
        return 1e3 * predict(timeline, costs, nodes * per_node, method).step_s

    config = GQSGDConfig(bits=BITS, sample_every=0)
    fit = _fitted(config, layout, timeline, device)
    levels = None
    if per_node > 1:
        levels = milliseconds(GQSGDConfig(bits=BITS, sample_every=0, reducer="hierarchical", node_size=per_node))
    taken = "hierarchical" if fit.config.reducer == "hierarchical" else "one level"
    is_warned = "SLOWER" in fit.note
    return Row(name, nodes, per_node, gbit, taken, is_warned, milliseconds(NATIVE), milliseconds(config), levels)


def _fitted(config: GQSGDConfig, layout: Layout, timeline: Timeline, device: str) -> Fit:
    with patch("torch.cuda.get_device_name", lambda number: device):
        where = torch.device("cpu" if device == "cpu" else "cuda")
        return fitted(config, layout, timeline.numel, timeline.dtype, where)


def table(rows: list[Row], device: str) -> str:
    """Returns the page."""
    compared = [one for one in rows if one.per_node > 1]
    slower = [one for one in rows if one.above_ddp > 0.01]
    silent = [one for one in slower if not one.is_warned]
    wrong = [one for one in rows if one.is_warned and one.above_ddp <= 0]
    lines = [
        f'# What reducer="auto" takes at {BITS} bits, predicted for {device}',
        "",
        f"`python -m benchmarks.default_reducer --device {device} --save`: {len(rows)} clusters and models, "
        f"{len(compared)} of them with several ranks on each node. Predictions, not measurements.",
        "",
        f"- Two levels are taken in {sum(one.taken == 'hierarchical' for one in compared)} of {len(compared)}.",
        f"- At worst, the step is {max(one.above_best for one in rows):.1%} longer than that of the best reducer.",
        f"- The step is more than 1% longer than plain DDP's in {len(slower)}; the start line does not say so in "
        f"{len(silent)} of these, and says so in {len(wrong)} in which the step is not longer.",
        "",
        "| model | nodes | ranks per node | Gbit/s | plain DDP, ms | one level | two levels | taken |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in rows:
        levels = "" if one.two_levels_ms is None else f"{one.two_levels_ms:.1f}"
        said = ", says that plain DDP is faster" if one.is_warned else ""
        lines.append(
            f"| {one.model.partition(':')[2]} | {one.nodes} | {one.per_node} | {one.gbit:g} | {one.ddp_ms:.1f} | "
            f"{one.one_level_ms:.1f} | {levels} | {one.taken}{said} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all clusters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[*ESTIMATES], default="h100")
    parser.add_argument("--save", action="store_true", help=f"write the table into {RESULTS.name}/")
    options = parser.parse_args()
    rows = []
    for name, backward_s in MODELS.items():
        timeline = estimated(build(name, 1, torch.device("meta")).model, backward_s)
        for nodes, per_node, gbit in product(NODES, PER_NODE, GBITS):
            rows.append(row(timeline, name, nodes, per_node, gbit, options.device))
    page = table(rows, options.device)
    print(page)
    if options.save:
        stem = RESULTS / f"default_reducer_{options.device}"
        stem.with_suffix(".md").write_text(page)
        stem.with_suffix(".json").write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
