"""Advice on the compression for a cluster: predictions of all candidates, and a recommendation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.predict.costs import Costs, Link, at_ranks, on_faster_link, on_links
from lightning_gqsgd.predict.device_times import TRELLIS, codec_of_bits, codec_of_config
from lightning_gqsgd.predict.intervals import LONGEST, SHORTEST, Interval, interval
from lightning_gqsgd.predict.model import BF16, NATIVE, Prediction, predict
from lightning_gqsgd.predict.sharded import ShardedMethod, ShardedModel, predict_sharded
from lightning_gqsgd.predict.timeline import Timeline
from lightning_gqsgd.spec.quantities import duration

#: Numbers of bits that are compared, most exact ones first.
BITS = (8, 4, 3, 2)
#: The fewest bits that are recommended. With fewer, the error of one mean is as large as the gradient
#: (docs/choosing_figures.md).
FEWEST_BITS = 4
#: The smallest gain in time that is worth a change.
WORTH = 0.05
#: If predictions differ by less than this share, they count as equal, and the more exact candidate is recommended.
CLOSE = 0.03
#: If a larger share of a step waits, local steps are also recommended.
LONG_WAIT = 0.5
#: If a smaller share of a step waits, the cause is not named.
NO_WAIT = 0.01
#: Bits of weights that FSDP2 gathers, where they are compressed.
WEIGHT_BITS = 8
#: Bytes of a parameter with its gradient and Adam's two states, in fp32.
ADAM_BYTES = 16
#: Steps between two averages, and bits of the changes, of the preset ``gqsgd_diloco``.
LOCAL_STEPS = 32
LOCAL_BITS = 4
#: The largest number of ranks that is predicted. Each rank owns a shard of every piece, which takes time to compute.
MOST_RANKS = 8192
#: The largest number of samples of a rank in a step.
MOST_SAMPLES = 1_000_000
#: The numbers of nodes of a sweep, and the factors by which a sweep changes the rate of links.
SWEEP_NODES = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
RATE_FACTORS = tuple(10 ** (step / 8) for step in range(-16, 17))

#: A way of training: under DDP, see `model.predict`; or under FSDP2.
Method = GQSGDConfig | str | ShardedMethod
#: Returns the costs at a number of nodes, with the rate of links multiplied by a factor.
CostsAt = Callable[[int, float], Costs]


@dataclass(frozen=True)
class Cluster:
    """Machines, their network, and the computation of a rank.

    Attributes:
        timeline: the timeline of each rank.
        costs_at: see `CostsAt`.
        nodes: number of nodes.
        per_node: ranks on each node.
        batch: number of samples of each rank in a step; None if unknown.
        link: rate of the link between nodes in bytes per second; None if it was measured.
        notes: sentences on how reliable the numbers are.
        codec: the codec that the predictions assume, in words; empty if not given.
        sharded: the model under FSDP2; None: it trains under DDP.
    """

    timeline: Timeline
    costs_at: CostsAt
    nodes: int
    per_node: int
    batch: int | None
    link: float | None = None
    notes: tuple[str, ...] = ()
    codec: str = ""
    sharded: ShardedModel | None = None

    def __post_init__(self) -> None:
        check_size(self.nodes, self.per_node)
        check_batch(self.batch)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.per_node

    def predict(self, costs: Costs, nodes: int, method: Method) -> Prediction:
        """Returns the prediction of a step on a number of nodes; for ``costs``, see `costs_at`."""
        if isinstance(method, ShardedMethod):
            assert self.sharded is not None
            return predict_sharded(self.sharded, costs, nodes, self.per_node, method)
        return predict(self.timeline, costs, nodes * self.per_node, method)

    @property
    def knows_other_nodes(self) -> bool:
        """Returns whether costs between several nodes of several ranks are known. A probe on one node does not have
        them."""
        return self.per_node == 1 or any(name.startswith("node ") for name in self.costs_at(2, 1.0).collectives)


def check_size(nodes: int, per_node: int) -> None:
    """Raise ConfigError for too few nodes or ranks, or for more ranks than can be predicted in reasonable time."""
    for name, value in (("nodes", nodes), ("gpus-per-node", per_node)):
        if value < 1:
            raise ConfigError(f"--{name} {value} has to be at least 1; give a number from 1 on")
    if nodes * per_node < 2:
        raise ConfigError("one rank sends nothing; give --nodes or --gpus-per-node above 1")
    if nodes * per_node > MOST_RANKS:
        raise ConfigError(
            f"--nodes {nodes} with {counted(per_node, 'rank')} each are more than {MOST_RANKS:,} ranks, "
            "which is the most that is predicted; give fewer nodes or --gpus-per-node"
        )


def check_batch(batch: int | None) -> None:
    """Raise ConfigError for a number of samples of a rank in a step below 1 or above `MOST_SAMPLES`; None means
    unknown."""
    if batch is not None and batch < 1:
        raise ConfigError(f"--batch {batch} has to be at least 1; give the samples of each rank in a step")
    if batch is not None and batch > MOST_SAMPLES:
        raise ConfigError(
            f"--batch {batch} has to be at most {MOST_SAMPLES:,}; give the samples of each rank in a step"
        )


@dataclass(frozen=True)
class Candidate:
    """A way of averaging gradients, with its prediction.

    Attributes:
        name: name for tables, e.g. ``"4 bit, hierarchical"``.
        method: what travels in which form.
        prediction: the prediction.
        interval: the shortest and the longest expected step in seconds, see `intervals`; None if not predicted.
    """

    name: str
    method: Method
    prediction: Prediction
    interval: Interval | None = None

    @property
    def num_bits(self) -> int | None:
        """Bits of the gradients; None: they are not compressed."""
        if isinstance(self.method, ShardedMethod):
            return self.method.bits
        return None if isinstance(self.method, str) else self.method.num_bits

    @property
    def keywords(self) -> str:
        """The arguments for `GQSGDStrategy` or `register_gqsgd`, or the calls for FSDP2; empty for a candidate that
        needs none."""
        if isinstance(self.method, ShardedMethod):
            return self.method.keywords
        if isinstance(self.method, str):
            return ""
        reducer = ', reducer="hierarchical"' if self.method.reducer == "hierarchical" else ""
        codec = ', codec="trellis"' if self.method.codec == "trellis" else ""
        return f"bits={self.method.bits}{codec}{reducer}"


def over_links(costs: Costs, per_node: int, link: Link, inside: Link) -> CostsAt:
    """Returns the function `Cluster.costs_at` for links with given rates; for ``costs``, see `costs.on_links`."""

    def costs_at(nodes: int, factor: float) -> Costs:
        faster = replace(link, bytes_per_s=link.bytes_per_s * factor)
        return on_links(costs, nodes, per_node, faster, inside)

    return costs_at


def over_probe(costs: Costs, measured_ranks: int, per_node: int) -> CostsAt:
    """Returns the function `Cluster.costs_at` for a measured link."""

    def costs_at(nodes: int, factor: float) -> Costs:
        scaled = at_ranks(costs, measured_ranks, nodes * per_node, per_node) if nodes * per_node > 1 else costs
        faster = {
            key: cost if key.startswith("node ") else on_faster_link(cost, factor, scaled.cores)
            for key, cost in scaled.collectives.items()
        }
        if nodes == 1:
            # Nothing travels between nodes, so the costs that were measured inside a node hold for all ranks.
            inside = {key.removeprefix("node "): cost for key, cost in faster.items() if key.startswith("node ")}
            faster |= {f"all {kind}": cost for kind, cost in inside.items()}
        return replace(scaled, collectives=faster).on(nodes)

    return costs_at


def methods(cluster: Cluster, nodes: int, costs: Costs, widths: Sequence[int]) -> dict[str, Method]:
    """Returns the candidates for a number of nodes, by name, most exact ones first."""
    if cluster.sharded is not None:
        known = [bits for bits in widths if bits >= FEWEST_BITS and codec_of_bits(bits) in costs.gammas]
        return sharded_methods(cluster.timeline.dtype, known, has_levels=min(nodes, cluster.per_node) > 1)
    ways: dict[str, Method] = {"fp32" if cluster.timeline.dtype == torch.float32 else "native": NATIVE}
    if cluster.timeline.dtype == torch.float32:
        ways["bf16"] = BF16
    for bits in widths:
        if bits == TRELLIS.bits and codec_of_config(TRELLIS) in costs.gammas:
            ways[f"{bits} bit, trellis"] = TRELLIS
        if codec_of_bits(bits) not in costs.gammas:
            continue
        ways[f"{bits} bit"] = GQSGDConfig(bits=bits, sample_every=0)
        if nodes > 1 and cluster.per_node > 1:
            levels = GQSGDConfig(bits=bits, sample_every=0, reducer="hierarchical", node_size=cluster.per_node)
            ways[f"{bits} bit, hierarchical"] = levels
    return ways


def sharded_methods(dtype: torch.dtype, widths: Sequence[int], *, has_levels: bool) -> dict[str, Method]:
    """Returns the candidates under FSDP2, by name, most exact ones first.

    Args:
        dtype: dtype of the parameters. If it is fp32, weights and gradients that are not compressed may also be bf16.
        widths: numbers of bits of gradients.
        has_levels: whether there are several nodes of several ranks, so that each node may have a replica.
    """
    plain = "fp32" if dtype == torch.float32 else "native"
    dtypes = {plain: dtype, **({"bf16": torch.bfloat16} if dtype == torch.float32 else {})}
    ways: dict[str, Method] = {}
    for name, sent in dtypes.items():
        ways[name] = ShardedMethod(sent)
        if has_levels:
            ways[f"replicas, {name}"] = ShardedMethod(sent, has_replicas=True)
    short, shorter = list(dtypes.items())[-1]
    for bits in widths:
        ways[f"{short}, gradients {bits} bit"] = ShardedMethod(shorter, bits, has_levels=has_levels)
        if has_levels:
            ways[f"replicas, {short}, means {bits} bit"] = ShardedMethod(shorter, bits, has_replicas=True)
        if WEIGHT_BITS in widths:
            both = ShardedMethod(shorter, bits, WEIGHT_BITS, has_levels=has_levels)
            ways[f"weights {WEIGHT_BITS} bit, gradients {bits} bit"] = both
    return ways


def candidates(
    cluster: Cluster,
    *,
    nodes: int | None = None,
    factor: float = 1.0,
    widths: Sequence[int] = BITS,
    tick: Callable[[str], object] = lambda name: None,
) -> list[Candidate]:
    """Returns the predictions of all candidates, on another number of nodes or on links of another rate, if given.

    Args:
        cluster: the cluster.
        nodes: number of nodes; None means the cluster's.
        factor: factor on the rate of the links.
        widths: numbers of bits that are compared.
        tick: function that is called with the name of each candidate before its prediction.
    """
    nodes = cluster.nodes if nodes is None else nodes
    costs = cluster.costs_at(nodes, factor)
    made = []
    for name, method in methods(cluster, nodes, costs, widths).items():
        tick(name)
        made.append(Candidate(name, method, cluster.predict(costs, nodes, method)))
    return made


def with_local_steps(cluster: Cluster) -> Candidate | None:
    """Predict a step's mean duration if ranks train separately and average their models (preset ``gqsgd_diloco``).

    Steps send no gradients. After every `LOCAL_STEPS` steps, all changes are reduced at once, without computation at
    the same time.

    Returns:
        The candidate, with a prediction of one step that has no events; None if the costs of its codes are missing, or
        if the model is sharded, which local steps do not support.
    """
    costs = cluster.costs_at(cluster.nodes, 1.0)
    line = cluster.timeline
    if cluster.sharded is not None or codec_of_bits(LOCAL_BITS) not in costs.gammas:
        return None
    alone = line.at_once()
    method = GQSGDConfig(bits=LOCAL_BITS, sample_every=0)
    average = predict(alone, costs, cluster.ranks, method)
    shortest_s, longest_s = interval(costs, lambda at: predict(alone, at, cluster.ranks, method).step_s)
    share = 1 / LOCAL_STEPS
    step = Prediction(
        step_s=line.compute_s + share * average.step_s,
        compute_s=line.compute_s,
        codec_s=share * average.codec_s,
        wire_s=share * average.wire_s,
        sent_bytes=round(share * average.sent_bytes),
        events=(),
        node_bytes=round(share * average.node_bytes),
    )
    ends = (SHORTEST * line.compute_s + share * shortest_s, LONGEST * line.compute_s + share * longest_s)
    return Candidate(f"{LOCAL_BITS} bit, every {LOCAL_STEPS} steps", method, step, ends)


def with_intervals(cluster: Cluster, choices: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates of a cluster with the intervals of their steps."""
    costs = cluster.costs_at(cluster.nodes, 1.0)

    def interval_around(method: Method) -> Interval:
        return interval(costs, lambda at: cluster.predict(at, cluster.nodes, method).step_s)

    return [replace(candidate, interval=interval_around(candidate.method)) for candidate in choices]


def recommendable(choices: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that are exact enough for most trainings."""
    return [candidate for candidate in choices if candidate.num_bits is None or candidate.num_bits >= FEWEST_BITS]


def best_of(choices: Sequence[Candidate]) -> Candidate:
    """Returns the most exact candidate among those whose steps are about as short as the shortest.

    Plain DDP is the best candidate unless the shortest step gains at least `WORTH`. If it does, a more exact candidate
    may gain a little less than that. So faster links never lead to fewer bits. Candidates with fewer than `FEWEST_BITS`
    bits are ignored.
    """
    choices = recommendable(choices)
    shortest = min(candidate.prediction.step_s for candidate in choices)
    if shortest > choices[0].prediction.step_s * (1 - WORTH):
        return choices[0]
    return next(candidate for candidate in choices if candidate.prediction.step_s <= shortest * (1 + CLOSE))


def recommendation(choices: Sequence[Candidate]) -> str:
    """Returns the recommendation and its reason in one sentence."""
    plain = choices[0].prediction
    best = best_of(choices)
    made = best.prediction
    wrapper = "FSDP2" if isinstance(choices[0].method, ShardedMethod) else "DDP"
    what = "gradients" if wrapper == "DDP" else "weights and gradients"
    waits = f"a step of plain {wrapper} waits {duration(plain.exposed_s)} of {duration(plain.step_s)} for {what}"
    shortest = min(candidate.prediction.step_s for candidate in recommendable(choices))
    if best is choices[0]:
        # Fewer bits may save more, but are never recommended. Percentages are rounded up, so that the sentence is true.
        percent = math.ceil(100 * (1 - shortest / plain.step_s) - 1e-9)
        most = f" by more than {percent}%" if percent > 0 else ""
        return (
            f"Not worth it: {waits}, and no compression to {FEWEST_BITS} bits or more would shorten it{most}; "
            f"keep plain {wrapper}."
        )
    name = "torch's bf16_compress_hook" if best.method == BF16 else best.keywords
    faster = f"{_times(plain, made)} than {wrapper}{_against_bf16(choices, best)}"
    return f"Take {name}, predicted to take {duration(made.step_s)}, {faster}: {waits}, and {_what_is_left(best)}."


def _against_bf16(choices: Sequence[Candidate], best: Candidate) -> str:
    """Returns how a candidate compares with bf16 by torch itself, which needs no package; empty if the candidate is
    that, or if it is not predicted."""
    torchs = next((candidate for candidate in choices if candidate.name == "bf16"), None)
    if torchs is None or best is torchs:
        return ""
    name = "its bf16 hook" if torchs.method == BF16 else "with bf16"
    return f", {_times(torchs.prediction, best.prediction)} than {name}"


def _times(other: Prediction, made: Prediction) -> str:
    """Returns how many times faster or slower a prediction is than another one."""
    ratio = other.step_s / made.step_s
    return f"{ratio:.2f} times faster" if ratio >= 1 else f"{1 / ratio:.2f} times slower"


def _what_is_left(best: Candidate) -> str:
    """Returns a clause on how long a candidate's step still waits, and for what. An exposed cost is never called
    hidden."""
    made = best.prediction
    waits = f"with {best.name} it waits {duration(made.exposed_s)}, {_share(made)} of the step"
    if made.exposed_s <= NO_WAIT * made.step_s:
        return waits
    busy = f"the link is busy for {duration(made.wire_s)}"
    if made.wire_s <= made.codec_s:
        busy = f"encoding and decoding take {duration(made.codec_s)}"
    if made.exposed_s > 2 * (made.wire_s + made.codec_s):  # the rest: collectives that have not begun to send
        busy = f"most of it is latency, as {busy} only"
    return f"{waits}: {busy}"


def _share(made: Prediction) -> str:
    """Returns the share of a step that waits, as text."""
    return f"{max(0.0, made.exposed_s) / made.step_s:.0%}"


def advice_on_local_steps(choices: Sequence[Candidate], local: Candidate | None) -> str | None:
    """Returns a sentence on local steps; None if steps wait little, or if there is no prediction of local steps."""
    best = best_of(choices)
    made = best.prediction
    if local is None or made.exposed_s <= LONG_WAIT * made.step_s:
        return None
    step_s = local.prediction.step_s
    return (
        f'If {_share(made)} of a step are too long a wait: strategy="gqsgd_diloco" averages models '
        f"every {LOCAL_STEPS} steps instead of gradients, predicted to take {duration(step_s)} a step on average, "
        f"{made.step_s / step_s:.2f} times faster than {best.name}; compare what the loss ends with."
    )


def over_nodes(cluster: Cluster) -> dict[int, list[Candidate]]:
    """Returns the recommendable candidates for several numbers of nodes, with at most `MOST_RANKS` ranks.

    Candidates with fewer bits take equally long to predict, so they are left out.

    Raises:
        ConfigError: if the costs of several nodes are not known.
    """
    counts = [nodes for nodes in SWEEP_NODES if 1 < nodes * cluster.per_node <= MOST_RANKS]
    widths = [bits for bits in BITS if bits >= FEWEST_BITS]
    return {nodes: candidates(cluster, nodes=nodes, widths=widths) for nodes in counts}


def over_rates(cluster: Cluster) -> dict[float, list[Candidate]]:
    """Returns the candidates for several factors on the rate of the links."""
    return {factor: candidates(cluster, factor=factor) for factor in RATE_FACTORS}


def break_even(sweep: dict[float, list[Candidate]]) -> float | None:
    """Returns the smallest factor from which on no candidate is worth a change.

    The result is None if a candidate is worth a change even on the fastest links, or if none is even on the slowest
    ones. On one node, the rate of the links between nodes has no effect, so one of the two holds.
    """
    limit = None
    for factor, choices in sorted(sweep.items(), reverse=True):
        if best_of(choices) is not choices[0]:
            return limit
        limit = factor
    return None
