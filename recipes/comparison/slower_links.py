"""What runs on one machine would take on slower links, by the model of `gqsgd advise`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.comparison.predictions import computation, known, predicted_steps
from recipes.comparison.results import Run

#: Links that are predicted: as `gqsgd advise --link` takes them, and as people write them.
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s", "10mbit": "10 Mbit/s"}


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
    def note(self) -> str:
        """Why a predicted step is shorter than the measured one, where there is such a step; "" elsewhere."""
        below = any(row[variant] < self.measured[variant] for row in self.predicted.values() for variant in row)
        if not below:
            return ""
        return (
            "A predicted step may be shorter than the measured one, although its link is slower: on this machine, the "
            "exchange and the codec share the cores with the computation of all processes. The prediction has a host "
            "for each process, and the codec's usual costs, which are not measured here."
        )

    @property
    def lines(self) -> list[str]:
        """The words, the table and the note as plain text."""
        widths = [max(len(row[column]) for row in self.rows) for column in range(len(self.rows[0]))]
        texts = [
            "  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in enumerate(pairs))
            for pairs in (list(zip(row, widths, strict=True)) for row in self.rows)
        ]
        return [self.words, *(f"  {text}".rstrip() for text in texts), *([self.note] if self.note else [])]


def elsewhere(configs: Sequence[Mapping[str, Any]], variants: Mapping[str, Sequence[Run]]) -> Elsewhere | None:
    """Predictions for slower links; None where nothing can be said.

    Something can be said of a comparison on the processors of one machine that has plain DDP, the package's own codec,
    and several processes, and whose network `predicted_steps` knows.
    """
    on_cpu = all(config["hardware"]["name"] == "cpu" for config in configs)
    names = known(configs, list(variants))
    facts = variants["ddp"][0].facts if "ddp" in names else {}
    if not on_cpu or not {*names} - {"ddp", "ddp_bf16"} or facts.get("processes", 1) < 2:
        return None
    compute_s = computation(variants["ddp"])
    ranks = facts["processes"]
    config = next(config for config in configs if config["strategy"]["name"] == "ddp")
    steps = {link: predicted_steps(config, compute_s, ranks, link, names) for link in LINKS}
    if not all(steps.values()):
        return None
    return Elsewhere(
        compute_s,
        {name: statistics.fmean(run.facts["step_s"]["median"] for run in variants[name]) for name in names},
        {link: {variant: made.step_s for variant, made in row.items()} for link, row in steps.items()},
        ranks,
    )


def _cell(row: Mapping[str, float], variant: str) -> str:
    if variant == "ddp":
        return f"{1e3 * row[variant]:.1f}"
    return f"{1e3 * row[variant]:.1f} ({row['ddp'] / row[variant]:.1f}×)"
