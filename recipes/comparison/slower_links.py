"""What runs on one machine would take on slower links, by the model of `gqsgd advise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.comparison.results import Run

#: Links that are predicted: as `gqsgd advise --link` takes them, and as people write them.
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}
LATENCY_S = 50e-6
#: Candidates of the model by the strategies that they are: plain DDP, torch's bf16 hook, and the package's own codec.
CANDIDATES = {
    "ddp": "fp32",
    "ddp_bf16": "bf16",
    "gqsgd": "8 bit",
    "gqsgd_4bit": "4 bit",
    "gqsgd_3bit": "3 bit",
    "gqsgd_2bit": "2 bit",
}


@dataclass(frozen=True)
class Elsewhere:
    """Lengths of a step on several links.

    Attributes:
        compute_s: seconds of a step that waits for nothing.
        measured: seconds of a step on this machine, by variant.
        predicted: seconds of a step by link and variant.
        processes: number of processes.
    """

    compute_s: float
    measured: Mapping[str, float]
    predicted: Mapping[str, Mapping[str, float]]
    processes: int

    @property
    def words(self) -> str:
        """What the links of this comparison are, and what slower links change."""
        return (
            f"These {self.processes} processes exchange gradients through the memory of one machine, which is faster "
            "than most networks: compression has little to gain here. It pays where steps wait for a slower link. "
            f"Predicted for hosts with such links, each of which computes {1e3 * self.compute_s:.0f} ms per step:"
        )

    @property
    def rows(self) -> list[list[str]]:
        """A table: a heading, and a row for each link; milliseconds per step, and times faster than ddp."""
        variants = list(self.measured)
        places = {"this machine, measured": self.measured, **{LINKS[link]: row for link, row in self.predicted.items()}}
        table = [["step (ms)", *variants]]
        for place, row in places.items():
            table.append([place, *(_cell(row, variant) for variant in variants)])
        return table

    @property
    def lines(self) -> list[str]:
        """The words and the table as plain text."""
        widths = [max(len(row[column]) for row in self.rows) for column in range(len(self.rows[0]))]
        texts = [
            "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in self.rows)
        ]
        return [self.words, *(f"  {text}".rstrip() for text in texts)]


def elsewhere(configs: Sequence[Mapping[str, Any]], variants: Mapping[str, Sequence[Run]]) -> Elsewhere | None:
    """Predictions for slower links; None where nothing can be said.

    Something can be said of a comparison on the processors of one machine that has plain DDP, the package's own codec,
    and several processes.

    Args:
        configs: configurations of all runs.
        variants: the finished runs of each variant.
    """
    on_cpu = all(config["hardware"]["name"] == "cpu" for config in configs)
    known = {variant: runs for variant, runs in variants.items() if variant in CANDIDATES}
    facts = known["ddp"][0].facts if "ddp" in known else {}
    if not on_cpu or not {*known} - {"ddp", "ddp_bf16"} or facts.get("processes", 1) < 2:
        return None
    compute_s = max(facts["step_s"]["median"] - facts["exposed_s"].get("median", 0.0), 1e-6)
    config = next(config for config in configs if config["strategy"]["name"] == "ddp")
    return Elsewhere(
        compute_s,
        {variant: runs[0].facts["step_s"]["median"] for variant, runs in known.items()},
        _predictions(config, compute_s, facts["processes"], list(known)),
        facts["processes"],
    )


def _predictions(
    config: Mapping[str, Any], compute_s: float, ranks: int, variants: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Seconds of a step by link and variant."""
    # Here, not above: torch takes seconds to import, and a comparison that predicts nothing needs none.
    import torch
    from omegaconf import OmegaConf

    from lightning_gqsgd.performance.advice import Cluster, candidates, over_links
    from lightning_gqsgd.performance.costs import ESTIMATES, Link
    from lightning_gqsgd.performance.timeline import estimated
    from lightning_gqsgd.performance.units import bytes_per_second
    from recipes.training.building import build

    with torch.device("meta"):
        network = build(OmegaConf.create(dict(config["model"])), leave_out=("name",))
    # A backward pass has twice the operations of a forward pass.
    timeline = estimated(network, compute_s * 2 / 3)
    predicted: dict[str, dict[str, float]] = {}
    for link in LINKS:
        between = Link(bytes_per_second(link, "link"), LATENCY_S)
        costs_at = over_links(ESTIMATES["cpu"].costs, 1, between, between)
        choices = candidates(Cluster(timeline, costs_at, ranks, 1, config["data"]["batch_size"], between.bytes_per_s))
        steps = {candidate.name: candidate.prediction.step_s for candidate in choices}
        predicted[link] = {variant: steps[CANDIDATES[variant]] for variant in variants}
    return predicted


def _cell(row: Mapping[str, float], variant: str) -> str:
    if variant == "ddp":
        return f"{1e3 * row[variant]:.1f}"
    return f"{1e3 * row[variant]:.1f} ({row['ddp'] / row[variant]:.1f}×)"
