"""What ``gqsgd advise`` does: from the words of its options to a cluster, and from predictions to a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from lightning_gqsgd.errors import ConfigError, check_one_of
from lightning_gqsgd.performance import models
from lightning_gqsgd.performance.advice import Candidate, Cluster, over_links, over_probe, recommendation
from lightning_gqsgd.performance.costs import ESTIMATES, Costs, Link
from lightning_gqsgd.performance.probe import Probe
from lightning_gqsgd.performance.timeline import Timeline, estimated
from lightning_gqsgd.performance.units import bytes_per_second, seconds

#: The codec whose speed a probe has measured.
MEASURED = "measured"


@dataclass(frozen=True)
class Question:
    """The options of ``gqsgd advise``, as they were typed; None: not given."""

    model: str | None
    batch: int
    probe: Path | None
    link: str | None
    latency: str
    intra: str
    nodes: int | None
    gpus_per_node: int | None
    backward: str | None
    forward: str | None
    codec: str | None

    def cluster(self) -> Cluster:
        """What the options say.

        Raises:
            ConfigError: options that make no cluster.
        """
        if self.probe is None and self.link is None:
            raise ConfigError(
                "nothing is known of the network; give --probe FILE of `gqsgd probe`, or --link, e.g. 10gbit"
            )
        probe = None if self.probe is None else Probe.load(self.probe)
        per_node = (probe.per_node if probe else 1) if self.gpus_per_node is None else self.gpus_per_node
        nodes = (probe.ranks // probe.per_node if probe else 2) if self.nodes is None else self.nodes
        timeline, note = self._timeline(probe)
        codec = self.codec or (MEASURED if probe else "h100")
        check_one_of("--codec", codec, [*ESTIMATES, MEASURED])
        if codec == MEASURED and probe is None:
            raise ConfigError("--codec measured needs a measurement; give --probe FILE, or --codec h100 or cpu")
        if self.link is not None:
            link = Link(bytes_per_second(self.link, "--link"), seconds(self.latency, "--latency"))
            inside = Link(bytes_per_second(self.intra, "--intra"), min(link.latency_s, 5e-6))
            costs_at = over_links(lambda collectives: _costs(codec, probe, collectives), per_node, link, inside)
            rate: float | None = link.bytes_per_s
        else:
            assert probe is not None
            measured = probe.costs if codec == MEASURED else _costs(codec, probe, dict(probe.costs.collectives))
            costs_at, rate = over_probe(measured, probe.ranks, per_node), None
            if per_node != probe.per_node:
                raise ConfigError(
                    f"{self.probe} was measured with {probe.per_node} ranks per node, not {per_node}; leave out "
                    "--gpus-per-node, or give --link"
                )
        notes = [note, _note(codec, probe)]
        return Cluster(timeline, costs_at, nodes, per_node, self.batch, rate, tuple(filter(None, notes)))

    def _timeline(self, probe: Probe | None) -> tuple[Timeline, str]:
        """When buckets are ready, and how sure that is."""
        measured = {line.name: line for line in probe.timelines} if probe else {}
        if self.backward is None:
            name = self.model or next(iter(measured), None)
            if name in measured:
                return measured[name], ""
            others = f" (the probe has {', '.join(measured)})" if measured else ""
            raise ConfigError(
                f"the length of the backward pass is not known{others}; give --backward, e.g. 120ms, or measure it "
                "with `gqsgd probe --model MODEL --batch N`"
            )
        if self.model is None:
            raise ConfigError(f"no model; give --model {models.FORMS}")
        backward_s = seconds(self.backward, "--backward")
        forward_s = None if self.forward is None else seconds(self.forward, "--forward")
        built = models.build(self.model, 1, torch.device("meta"))
        weights = models.operations(built)
        line = estimated(built.model, backward_s, forward_s=forward_s, weights=weights)
        share = "their multiplications" if weights else "their size"
        note = f"when gradients are ready: an estimate, layers take their share of --backward by {share}"
        return replace(line, name=self.model), note


def _costs(codec: str, probe: Probe | None, collectives: dict[str, Any]) -> Costs:
    """The costs of a codec, with given costs of collectives."""
    if codec == MEASURED:
        assert probe is not None
        return replace(probe.costs, collectives=collectives)
    return ESTIMATES[codec].costs(collectives)


def _note(codec: str, probe: Probe | None) -> str:
    if codec == MEASURED:
        assert probe is not None
        return f"codec: measured on {probe.device}"
    return f"codec: {ESTIMATES[codec].note}"


def table(cluster: Cluster, choices: Sequence[Candidate]) -> Table:
    """The predictions, one in a row."""
    made = Table(
        title=f"{cluster.timeline.name}, {cluster.timeline.numel / 1e6:.1f} M parameters, "
        f"{cluster.nodes} × {cluster.per_node} ranks: predicted",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    headings = (
        "gradients",
        "step (ms)",
        "of it waiting",
        "samples/s",
        "efficiency",
        "sent (MB)",
        "wire (ms)",
        "codec (ms)",
    )
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for candidate in choices:
        step = candidate.prediction
        made.add_row(
            candidate.name,
            f"{1e3 * step.step_s:.1f}",
            f"{step.exposed_s / step.step_s:.0%}",
            f"{step.throughput(cluster.batch, cluster.ranks):,.0f}",
            f"{step.efficiency:.0%}",
            f"{step.sent_bytes / 1e6:.1f}",
            f"{1e3 * step.wire_s:.1f}",
            f"{1e3 * step.codec_s:.1f}",
        )
    return made


def lines(cluster: Cluster, choices: Sequence[Candidate]) -> list[str]:
    """The recommendation, and how sure the numbers are."""
    return [recommendation(choices), *(f"Note: {note}." for note in cluster.notes)]


def to_dict(cluster: Cluster, choices: Sequence[Candidate]) -> dict[str, Any]:
    """Plain values only."""
    return {
        "model": cluster.timeline.name,
        "parameters": cluster.timeline.numel,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "batch": cluster.batch,
        "candidates": [
            {
                "name": candidate.name,
                "keywords": candidate.keywords,
                "step_s": candidate.prediction.step_s,
                "compute_s": candidate.prediction.compute_s,
                "exposed_s": candidate.prediction.exposed_s,
                "codec_s": candidate.prediction.codec_s,
                "wire_s": candidate.prediction.wire_s,
                "sent_bytes": candidate.prediction.sent_bytes,
                "samples_per_s": candidate.prediction.throughput(cluster.batch, cluster.ranks),
                "efficiency": candidate.prediction.efficiency,
            }
            for candidate in choices
        ],
        "recommendation": recommendation(choices),
        "notes": list(cluster.notes),
    }
