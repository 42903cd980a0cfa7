"""The command ``gqsgd advise``: builds a cluster from the options, and a table from the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from lightning_gqsgd.cli.tables import plain_table
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.predict import models
from lightning_gqsgd.predict.advice import (
    ADAM_BYTES,
    BITS,
    FEWEST_BITS,
    Candidate,
    Cluster,
    CostsAt,
    advice_on_local_steps,
    break_even,
    check_batch,
    check_size,
    over_links,
    over_probe,
    recommendation,
)
from lightning_gqsgd.predict.costs import (
    ESTIMATES,
    LATENCY_S,
    Costs,
    Link,
    inside_of,
    inside_rate,
    of_bandwidth,
)
from lightning_gqsgd.predict.device_times import codec_of_bits
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.sharded import ShardedModel, sharded_model
from lightning_gqsgd.predict.timeline import Timeline, estimated
from lightning_gqsgd.sparse.options import tables_of
from lightning_gqsgd.spec.quantities import bandwidth, bytes_per_second, rate_in_words, seconds

#: The codec whose speed a probe has measured.
MEASURED = "measured"
#: The codec that is assumed where neither an option nor a probe says one.
ASSUMED = "h100"


@dataclass(frozen=True)
class Question:
    """The options of ``gqsgd advise``, as they were typed; None: not given."""

    model: str | None
    batch: int | None
    probe: Path | None
    link: str | None
    latency: str | None
    intra: str | None
    nodes: int | None
    gpus_per_node: int | None
    backward: str | None
    forward: str | None
    codec: str | None
    fsdp: bool | None

    def given(self) -> list[str]:
        """Returns the names of the options that were given."""
        names = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return ["--" + name.replace("_", "-") for name in names]

    def cluster(self) -> Cluster:
        """Returns the cluster that the options describe. The model comes last, because it may take long to build.

        ``probe`` or ``link`` is given, which `asking.check_network` has checked.

        Raises:
            ConfigError: options that make no cluster, or that have no effect.
        """
        check_batch(self.batch)
        if self.codec not in (None, MEASURED):
            _estimate(self.codec)  # refuses it before anything else is read
        self._check_effects()
        probe = None if self.probe is None else Probe.load(self.probe)
        per_node = (probe.per_node if probe else 1) if self.gpus_per_node is None else self.gpus_per_node
        nodes = (probe.ranks // probe.per_node if probe else 2) if self.nodes is None else self.nodes
        check_size(nodes, per_node)
        if self.intra is not None and per_node == 1:
            raise ConfigError(
                f"--intra {self.intra} has no effect on nodes with one rank; leave it out, or give --gpus-per-node"
            )
        codec = self.codec or (MEASURED if probe else ASSUMED)
        if codec == MEASURED:
            if probe is None:
                raise ConfigError("--codec measured needs a measurement; give --probe FILE, or --codec h100 or cpu")
            self._check_codes(probe)
            costs = probe.costs
            device = probe.device.lower()
            source = f"measured on {probe.device}"
        else:
            costs = _estimate(codec)
            if probe is not None:
                costs = replace(costs, collectives=probe.costs.collectives)
            device = codec
            source = costs.source + ("; it is assumed, and --codec names another one" if self.codec is None else "")
        costs_at, link_rate = self._network(costs, device, probe, per_node)
        timeline, sharded, notes = self._computation(probe, nodes, per_node)
        if self.backward is None:
            batch = self._batch_of(timeline)
        else:
            batch = models.USUAL_BATCH if self.batch is None else self.batch
        notes.append(f"codec: {source}")
        if self.link is not None and self.intra is None and per_node > 1:
            rate = rate_in_words(inside_rate(device))
            notes.append(f"between the ranks of a node: {rate} in each direction; --intra changes it")
        if min(nodes, per_node) > 1:
            notes.append(f"sent (MB): of one rank; wire (ms): of a node's link, which its {per_node} ranks share")
        if batch is None:
            notes.append("samples/s: not known, because the probe does not say its batch; give --batch")
        words = f"codec {codec}" + (" (assumed)" if self.codec is None and probe is None else "")
        return Cluster(
            timeline, costs_at, nodes, per_node, batch, link_rate, tuple(filter(None, notes)), words, sharded
        )

    def _check_codes(self, probe: Probe) -> None:
        """Raise ConfigError if a probe has timed no codec that can be recommended."""
        if any(codec_of_bits(bits) in probe.costs.gammas for bits in BITS if bits >= FEWEST_BITS):
            return
        timed = ", ".join(probe.costs.gammas) or "no codec"
        raise ConfigError(
            f"{self.probe} has times of {timed}, and {FEWEST_BITS} bits are the fewest that are recommended; run "
            f"`gqsgd probe --bits 8 --bits 4 --output {self.probe}` again, or give --codec {', '.join(ESTIMATES)}"
        )

    def _check_effects(self) -> None:
        """Raise ConfigError for an option that would have no effect."""
        for name, value in (("--latency", self.latency), ("--intra", self.intra)):
            if value is not None and self.link is None:
                raise ConfigError(
                    f"{name} {value} has no effect on the network that --probe measured; leave it out, or give --link"
                )
        if self.forward is not None and self.backward is None:
            raise ConfigError(
                f"--forward {self.forward} has no effect without --backward; give both, or neither to take the probe's"
            )

    def _network(self, costs: Costs, device: str, probe: Probe | None, per_node: int) -> tuple[CostsAt, float | None]:
        """Returns `Cluster.costs_at` and `Cluster.link`.

        Args:
            costs: the costs of the codec, with the collectives that the probe has measured, if there is one.
            device: name of the device whose codec is meant, in lower case.
            probe: the probe, if there is one.
            per_node: ranks on each node.

        Raises:
            ConfigError: a rate or a latency is none, or the probe has other nodes.
        """
        if self.link is not None:
            latency_s = seconds(self.latency, "--latency") if self.latency else LATENCY_S
            link = Link(bytes_per_second(self.link, "--link"), latency_s)
            inside = inside_of(device, link)
            if self.intra:
                inside = replace(inside, bytes_per_s=bytes_per_second(self.intra, "--intra"))
            # One that is only assumed counts as in the start of a training, which compares ways to reduce by it
            # (docs/performance.md).
            if self.latency and not costs.on_streams:
                costs = replace(costs, latency_s=latency_s)
            return over_links(costs, per_node, link, inside), link.bytes_per_s
        assert probe is not None
        if per_node != probe.per_node:
            raise ConfigError(
                f"{self.probe} was measured with {counted(probe.per_node, 'rank')} per node, not {per_node}; leave out "
                "--gpus-per-node, or give --link"
            )
        return over_probe(costs, probe.ranks, per_node), None

    def _measured(self, probe: Probe | None) -> Timeline:
        """Returns the timeline of the model that the probe has measured."""
        measured = {line.name: line for line in probe.timelines} if probe else {}
        name = self.model or next(iter(measured), None)
        if name in measured:
            return measured[name]
        others = f" (the probe has {', '.join(measured)})" if measured else ""
        raise ConfigError(
            f"the length of the backward pass is not known{others}; give --backward, e.g. 120ms, or measure it "
            "with `gqsgd probe --model MODEL --batch N`"
        )

    def _batch_of(self, timeline: Timeline) -> int | None:
        """Returns the samples of each rank in a measured step; None: neither the probe nor an option says them."""
        measured = timeline.batch
        if measured is None or self.batch is None:
            return self.batch if measured is None else measured
        if self.batch != measured:
            raise ConfigError(
                f"--batch {self.batch}: {self.probe} has the step of {timeline.name} at batch {measured}; leave out "
                f"--batch, run `gqsgd probe --model {timeline.name} --batch {self.batch}`, or give --backward"
            )
        return measured

    def _computation(
        self, probe: Probe | None, nodes: int, per_node: int
    ) -> tuple[Timeline, ShardedModel | None, list[str]]:
        """Returns the timeline of the model, the model under FSDP2 if that was asked for, and notes on how sure both
        are.

        Raises:
            ConfigError: no model, one that cannot be built or called, or a time that is none.
        """
        notes: list[str] = []
        if self.backward is None:
            timeline = self._measured(probe)
            if not self.fsdp:
                return timeline, None, notes
            built = models.build(timeline.name, 1, torch.device("meta"))
            weights = models.operations(built)
        else:
            # A model takes longer to build than times to read.
            backward_s = seconds(self.backward, "--backward")
            forward_s = None if self.forward is None else seconds(self.forward, "--forward")
            if self.model is None:
                raise ConfigError(f"no model; give --model {models.FORMS}")
            built = models.build(self.model, 1, torch.device("meta"))
            weights = models.operations(built)
            line = estimated(built.model, backward_s, forward_s=forward_s, weights=weights)
            timeline = replace(line, name=self.model)
        by = "their multiplications" if weights else "their size"
        if self.fsdp:
            sharded = sharded_model(built.model, timeline, weights)
            return timeline, sharded, _notes_on_shards(sharded, by, nodes, per_node)
        notes.append(f"when gradients are ready: an estimate, layers take their share of --backward by {by}")
        notes.append(_note_on_tables(tables_of(built.model), timeline.numel))
        return timeline, None, notes


def _notes_on_shards(sharded: ShardedModel, by: str, nodes: int, per_node: int) -> list[str]:
    """Returns notes on how a model is sharded, on the memory that this needs, and on what divides its computation."""
    numel = sum(unit.weights.numel for unit in sharded.units)
    root = [] if sharded.root is None else ["the root"]
    calls = " and ".join([*([counted(len(sharded.blocks), "block")] if sharded.blocks else []), *root])
    notes = [f"fully_shard: on {calls}, which take their share of the computation by {by}"]
    if min(nodes, per_node) > 1:
        each, alone = (_gigabytes(ADAM_BYTES * numel / ranks) for ranks in (per_node, nodes * per_node))
        notes.append(
            f"replicas: each node has the whole model, so a rank needs {each} for weights, gradients and Adam in fp32, "
            f"instead of {alone}"
        )
    return notes


def _gigabytes(nbytes: float) -> str:
    """Returns a number of bytes as text, with two digits, or with those before the point if these are more."""
    return f"{nbytes / 1e9:,.0f} GB" if nbytes >= 10e9 else f"{nbytes / 1e9:.2g} GB"


def _estimate(codec: str) -> Costs:
    """Returns the estimated costs of a device, by its name or by the bandwidth of its memory.

    Raises:
        ConfigError: if it is neither.
    """
    if codec in ESTIMATES:
        return ESTIMATES[codec]
    if codec[:1].isdigit():
        return of_bandwidth(codec, bandwidth(codec, "--codec"))
    # No name is suggested: a10 is not nearly an a100.
    names = ", ".join(map(repr, (*ESTIMATES, MEASURED)))
    raise ConfigError(
        f"--codec={codec!r} is not one of {names}; for another GPU, give the rated bandwidth of its memory, e.g. "
        "600GB/s"
    )


def _note_on_tables(tables: Mapping[str, Tensor], numel: int) -> str:
    """Returns a note that predictions count tables with sparse gradients as dense; empty if there are none."""
    if not tables:
        return ""
    first, *others = tables
    names = f"{first} and {len(others)} more" if others else first
    of_tables = sum(table.numel() for table in tables.values())
    return (
        f"sparse gradients: {names} ({of_tables / 1e6:.3g} of {numel / 1e6:.3g} M parameters) are "
        "predicted as if they were dense; what a step sends of them depends on the rows that it touches"
    )


def table(cluster: Cluster, choices: Sequence[Candidate], local: Candidate | None) -> Table:
    """Returns a table with a row for each prediction; ``local``: that of local steps, if there is one."""
    wrapper = " under FSDP2" if cluster.sharded is not None else ""
    title = (
        f"{cluster.timeline.name}{wrapper}, {cluster.timeline.numel / 1e6:.1f} M parameters, "
        f"{cluster.nodes} × {cluster.per_node} ranks{', ' * bool(cluster.codec)}{cluster.codec}: predicted"
    )
    levels = min(cluster.nodes, cluster.per_node) > 1
    headings = (
        "gradients" if cluster.sharded is None else "weights and gradients",
        "step (ms)",
        "range (ms)",
        "of it waiting",
        "samples/s",
        "sent (MB)",
        *(["in node (MB)"] if levels else []),
        "wire (ms)",
        "codec (ms)",
    )
    made = plain_table(title, headings)
    for candidate in (*choices, *([] if local is None else [local])):
        step = candidate.prediction
        rate = _samples_per_s(cluster, candidate)
        made.add_row(
            candidate.name,
            f"{1e3 * step.step_s:.1f}",
            _interval(candidate),
            f"{step.exposed_s / step.step_s:.0%}",
            "–" if rate is None else f"{rate:,.0f}",
            f"{step.network_bytes / 1e6:.1f}",
            *([f"{step.node_bytes / 1e6:.1f}"] if levels else []),
            f"{1e3 * step.wire_s:.1f}",
            f"{1e3 * step.codec_s:.1f}",
        )
    return made


def _interval(candidate: Candidate) -> str:
    """Returns the interval of a step in milliseconds, as text; without decimals from a tenth of a second on."""
    if candidate.interval is None:
        return "–"
    return " to ".join(f"{1e3 * end:.{0 if end >= 0.1 else 1}f}" for end in candidate.interval)


def _samples_per_s(cluster: Cluster, candidate: Candidate) -> float | None:
    """Returns the samples per second of all ranks; None: the batch is not known."""
    return None if cluster.batch is None else candidate.prediction.throughput(cluster.batch, cluster.ranks)


def lines(cluster: Cluster, choices: Sequence[Candidate], local: Candidate | None) -> list[str]:
    """Returns the recommendation, advice on local steps where they help more, and notes on how sure that is."""
    advice = [recommendation(choices), advice_on_local_steps(choices, local)]
    return [*filter(None, advice), *(f"Note: {note}." for note in cluster.notes)]


def to_dict(
    cluster: Cluster,
    choices: Sequence[Candidate],
    local: Candidate | None,
    by_nodes: dict[int, list[Candidate]],
    by_rates: dict[float, list[Candidate]],
) -> dict[str, Any]:
    """Returns all of it as plain values."""
    limit = break_even(by_rates)
    return {
        "model": cluster.timeline.name,
        "parameters": cluster.timeline.numel,
        "fsdp": cluster.sharded is not None,
        "nodes": cluster.nodes,
        "gpus_per_node": cluster.per_node,
        "batch": cluster.batch,
        "candidates": [
            {"name": candidate.name, "keywords": candidate.keywords, **_figures(cluster, candidate)}
            for candidate in choices
        ],
        "local_steps": None if local is None else {"name": local.name, **_figures(cluster, local)},
        "recommendation": recommendation(choices),
        "recommendation_of_local_steps": advice_on_local_steps(choices, local),
        "codec": cluster.codec,
        "notes": list(cluster.notes),
        # From this rate of the links on, nothing is worth a change; None: no rate of the sweep separates the two.
        "break_even": None if limit is None else _rate(cluster, limit),
        "over_nodes": [{"nodes": nodes, "candidates": _rows(made)} for nodes, made in by_nodes.items()],
        "over_rates": [{**_rate(cluster, at), "candidates": _rows(made)} for at, made in by_rates.items()],
    }


def _rate(cluster: Cluster, factor: float) -> dict[str, float | None]:
    """Returns a rate of the links as a factor, and in bits per second; None where the rate was measured."""
    return {"factor": factor, "link_bit_per_s": None if cluster.link is None else 8 * cluster.link * factor}


def _rows(choices: Sequence[Candidate]) -> list[dict[str, Any]]:
    return [
        {"name": made.name, "step_s": made.prediction.step_s, "efficiency": made.prediction.efficiency}
        for made in choices
    ]


def _figures(cluster: Cluster, candidate: Candidate) -> dict[str, float | None]:
    step = candidate.prediction
    return {
        "step_s": step.step_s,
        "shortest_s": None if candidate.interval is None else candidate.interval[0],
        "longest_s": None if candidate.interval is None else candidate.interval[1],
        "compute_s": step.compute_s,
        "exposed_s": step.exposed_s,
        "codec_s": step.codec_s,
        "wire_s": step.wire_s,
        "sent_bytes": step.sent_bytes,
        "network_bytes": 0 if cluster.nodes == 1 else step.network_bytes,
        "node_bytes": step.sent_bytes if cluster.nodes == 1 else step.node_bytes,
        "samples_per_s": _samples_per_s(cluster, candidate),
        "efficiency": step.efficiency,
    }
