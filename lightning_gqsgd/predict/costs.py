"""Costs of collectives, kernels and launches: the constants of the model's clock.

`Costs` have three sources: a probe on the machines themselves (`probe`), a link's rate and latency
(`collectives_between`), and a device's memory bandwidth (`ESTIMATES`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.meta import Work
from lightning_gqsgd.predict.tcp import Factors, Terms, terms_of

#: Kinds of collectives that have a cost. Sums have one cost for each dtype, because ranks add the numbers.
KINDS = ("all_to_all", "all_gather", "max", "sum/float32", "sum/bfloat16", "sum/uint8")
#: If a dtype was not measured, the kind whose cost is used for its sums. A byte that a rank sends in a reduce-scatter
#: costs as much as in an all-reduce, whose ring sends twice as many.
_STANDS_FOR = {
    "sum/float16": "sum/bfloat16",
    "sum/float64": "sum/float32",
    "sum/int64": "sum/float32",
    "reduce_scatter/float32": "sum/float32",
    "reduce_scatter/bfloat16": "sum/bfloat16",
    "reduce_scatter/float16": "sum/bfloat16",
    "reduce_scatter/float64": "sum/float32",
}
#: The name of the costs of torch's ``bf16_compress_hook``. It is no codec, but is timed like one.
BF16_HOOK = "bf16_compress_hook"


@dataclass(frozen=True)
class Collective:
    """Costs of one kind of collective between certain ranks.

    Attributes:
        alpha_s: seconds before the first byte, for messages of any length.
        beta_s: seconds of the link per byte that a rank sends, if other collectives fill the pauses.
        alone_s: additional seconds per byte until the result is complete, if no other collective is under way. They are
            not 0 if a collective sends and receives in turns.
        cpu_s: processor-seconds of a rank per call.
        cpu_beta_s: processor-seconds of a rank per byte that it sends.
    """

    alpha_s: float
    beta_s: float
    alone_s: float = 0.0
    cpu_s: float = 0.0
    cpu_beta_s: float = 0.0


@dataclass(frozen=True)
class Gamma:
    """Processor-seconds per coordinate of a codec on one thread.

    Attributes:
        encode_s: to encode a coordinate.
        decode_s: to decode a coordinate of one message into the gradient.
        reduce_s: to decode a coordinate of another message and add it, or to add a coordinate of the rank itself.
    """

    encode_s: float
    decode_s: float
    reduce_s: float

    def times(self, factor: float) -> Gamma:
        """Returns the times multiplied by a factor."""
        return Gamma(factor * self.encode_s, factor * self.decode_s, factor * self.reduce_s)


@dataclass(frozen=True)
class Link:
    """A network between machines, or the wires inside one.

    Attributes:
        bytes_per_s: bytes per second that an end can send while it receives equally many.
        latency_s: seconds from the start of a message to its first byte at the other end.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """All constants of the clock.

    Attributes:
        collectives: by scope and kind, e.g. ``"all sum/float32"`` or ``"peers all_to_all"``.
        gammas: by codec, e.g. ``"companded/4"``.
        touch_s: processor-seconds per byte that an operation of PyTorch reads or writes.
        launch_s: processor-seconds to start a kernel or an operation of PyTorch.
        stage_s: processor-seconds of the sequencing thread (Gloo) between two collectives of a piece, in addition to
            kernels and operations.
        cores: number of processors of each rank, which backward pass, codec and collectives share. A GPU counts as 1:
            while a kernel of the codec runs, the kernels of the backward pass wait.
        thread: processors that a rank gets with one thread, at most 1. It is less than 1 if ranks or other programs
            share processors; several threads of a rank may then get more together.
        on_streams: whether collectives run on streams of a GPU (NCCL), and not on a thread (Gloo).
        source: the source of the numbers, in words.
        terms: additional times of collectives between nodes, beyond their bytes at the rate of a link; None if times
            were measured and already include them.
        latency_s: one-way latency between nodes in seconds, in addition to the start of collectives (Gloo, see
            `tcp.ways`).
        shares_memory: whether all ranks exchange through shared memory of one machine (Gloo), so that pieces are
            larger.
    """

    collectives: Mapping[str, Collective]
    gammas: Mapping[str, Gamma]
    touch_s: float = 0.0
    launch_s: float = 0.0
    cores: float = 2.0
    thread: float = 1.0
    on_streams: bool = False
    stage_s: float = 0.0
    source: str = field(default="given", compare=False)
    terms: Terms | None = None
    latency_s: float = 0.0
    shares_memory: bool = False

    def on(self, nodes: int) -> Costs:
        """Returns the costs on ``nodes`` nodes. On a single node, all ranks share memory."""
        return replace(self, shares_memory=nodes == 1 and not self.on_streams)

    def at(self, factors: Factors) -> Costs:
        """Returns the costs with given factors of collectives between nodes."""
        return replace(self, terms=Terms(factors, factors, factors))

    def wire_seconds(self, scope: str, kind: str, nbytes: int, *, is_beside_backward: bool) -> float:
        """Returns the seconds for which a collective occupies its link.

        Args:
            scope: the ranks that take part, see `Message.scope`.
            kind: see `Message.kind`.
            nbytes: bytes that a rank sends; in a ring, if the collective is one.
            is_beside_backward: whether the step has a backward pass during which the collective runs.
        """
        seconds = self.collective(scope, kind).beta_s * nbytes
        if self.terms is None or scope == "node":
            return seconds
        usual = self.terms.usual
        return seconds * usual.every * (usual.trees if is_beside_backward and kind.startswith("sum") else 1.0)

    @property
    def speed(self) -> float:
        """Processor-seconds per second of one thread."""
        return min(1.0, self.thread, self.cores)

    def collective(self, scope: str, kind: str) -> Collective:
        """Returns the cost of a collective between the ranks of a scope.

        Raises:
            ConfigError: if there is no such cost.
        """
        for name in (kind, _STANDS_FOR.get(kind, kind)):
            cost = self.collectives.get(f"{scope} {name}")
            if cost is not None:
                return cost
        raise ConfigError(
            f"the costs ({self.source}) have no time of {kind!r} between ranks of the scope {scope!r}: run `gqsgd "
            "probe` again with as many processes per node, or give --link"
        )

    def seconds(self, work: Work) -> float:
        """Returns the processor-seconds of a work.

        Raises:
            ConfigError: if the codec's cost is unknown.
        """
        launch_s = self.launch_s * work.calls
        if work.kind == "torch":
            return launch_s + self.touch_s * work.nbytes
        if work.kind in ("maxima", "rotate"):  # read, or read and write, 4 bytes per coordinate
            return launch_s + self.touch_s * work.numel * (4 if work.kind == "maxima" else 8)
        if work.kind == "narrow":  # reads 4 bytes, writes 2, and hashes, which takes about as long again
            return launch_s + self.touch_s * work.numel * 12
        gamma = self.gammas.get(work.codec)
        if gamma is None and work.codec == BF16_HOOK:  # an estimate
            # It reads 4 bytes and writes 2, divides these 2 in place, and after the all-reduce reads 2 and writes 4.
            gamma = Gamma(10 * self.touch_s, 6 * self.touch_s, 0.0)
        if gamma is None:
            raise ConfigError(
                f"the costs ({self.source}) have no time of the codec {work.codec!r}, only of "
                f"{', '.join(self.gammas)}: run `gqsgd probe --bits` with its bits, or for codecs that it does not "
                "measure, add the time that predict.device_times.gamma_of returns to gammas"
            )
        each = {
            "encode": gamma.encode_s,
            "reduce": work.sources * gamma.reduce_s + gamma.encode_s,
            "decode": gamma.decode_s + (work.sources - 1) * gamma.reduce_s,
            "decode_sum": gamma.decode_s,
            "combine": gamma.reduce_s + gamma.encode_s,
        }[work.kind]
        return launch_s + each * work.numel


def collectives_between(nodes: int, per_node: int, link: Link, inside: Link) -> dict[str, Collective]:
    """Returns the costs of collectives over links with given rates, by scope and kind.

    The ranks of a node share its link to other nodes. A ring uses each node's link once in each direction, so the link
    carries the bytes of one rank (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69, 2009). In an all-to-all over all
    ranks, each of g ranks sends (n-g)/(n-1) of its bytes through the link; between ranks with the same place on each
    node, g collectives share the link. Latencies count once per level of a tree over nodes and one over the ranks of a
    node, and twice for a sum or a maximum, as NCCL sends short messages.

    Args:
        nodes: number of nodes.
        per_node: number of ranks on each node, g.
        link: link of a node to the other nodes.
        inside: link of a rank to the ranks of its node.
    """
    ranks = nodes * per_node
    outer_depth, inner_depth = (math.ceil(math.log2(count)) for count in (nodes, per_node))
    costs = {}
    for kind in KINDS:
        passes = 2 if kind == "max" or kind.startswith("sum") else 1
        direct = kind == "all_to_all"  # all pairs at once
        outer_s = link.latency_s * (min(1, outer_depth) if direct else passes * outer_depth)
        inner_s = inside.latency_s * (min(1, inner_depth) if direct else passes * inner_depth)
        through = per_node * (ranks - per_node) / max(1, ranks - 1) if direct else 1.0
        shares = {"all": through, "peers": float(per_node)} if nodes > 1 else {"all": 0.0}
        for scope, share in shares.items():
            beta = max(share / link.bytes_per_s, 1 / inside.bytes_per_s if scope == "all" and per_node > 1 else 0.0)
            alpha = outer_s + (inner_s if scope == "all" else 0.0)
            costs[f"{scope} {kind}"] = Collective(alpha, beta)
        costs[f"node {kind}"] = Collective(inner_s, 1 / inside.bytes_per_s)
    return costs


def at_ranks(costs: Costs, measured: int, ranks: int, per_node: int = 1) -> Costs:
    """Convert costs that were measured at one number of ranks to another number of ranks on links of the same kind.

    The cost per byte that a rank sends stays the same. The start of a collective takes a number of consecutive
    messages: n-1 over Gloo, whose collectives are rings and pairs; log2 n over NCCL, where it is a tree. n is the
    number of its members: all ranks, or one rank of each node.

    Args:
        costs: the costs.
        measured: number of ranks in the measurement.
        ranks: number of ranks.
        per_node: number of ranks on each node, in both cases.
    """

    def hops(members: int) -> float:
        return math.log2(members) if costs.on_streams else members - 1

    scales = {"all": hops(ranks) / hops(measured)}
    if measured > per_node:  # otherwise, nothing was measured between nodes
        scales["peers"] = hops(ranks // per_node) / hops(measured // per_node)
    scaled = {}
    for key, cost in costs.collectives.items():
        scale = scales.get(key.partition(" ")[0], 1.0)
        scaled[key] = replace(cost, alpha_s=cost.alpha_s * scale, cpu_s=cost.cpu_s * scale)
    return replace(costs, collectives=scaled)


def on_faster_link(cost: Collective, factor: float, cores: float) -> Collective:
    """Returns the cost of a collective on a link whose rate is ``factor`` times the rate in the measurement.

    Processors feed the link, and they stay as they are. So a byte takes at least the time that ``cores`` processors
    need for it, or the measured time if that is shorter, because ranks then shared processors in the measurement.
    """
    fed_s = min(cost.beta_s, cost.cpu_beta_s / cores)
    return replace(cost, beta_s=max(cost.beta_s / factor, fed_s), alone_s=cost.alone_s / factor)


#: The latency of a link between nodes, in seconds, if it is unknown.
LATENCY_S = 50e-6
#: Bits per second between the ranks of a node, in each direction: NVLink's rated speed for these devices. Processes on
#: a CPU copy from each other's memory, or send over Gloo through the loopback device.
_INSIDE = {"h100": 3.6e12, "a100": 2.4e12, "cpu": 16e9}
#: The same for other devices.
_OTHER_INSIDE = 200e9
#: The largest latency between the ranks of a node, in seconds.
_INSIDE_LATENCY_S = 5e-6


def inside_rate(device: str) -> float:
    """Returns the bytes per second that a rank sends to the ranks of its node; ``device`` is a name such as "h100"."""
    return next((rate for name, rate in _INSIDE.items() if name in device), _OTHER_INSIDE) / 8


def inside_of(device: str, link: Link) -> Link:
    """Returns the link between the ranks of a node. Its latency is at most the latency of the link to other nodes.

    Args:
        device: see `inside_rate`.
        link: link of a node to the other nodes.
    """
    return Link(inside_rate(device), min(link.latency_s, _INSIDE_LATENCY_S))


#: Codecs for which there are estimates, with their bits.
_CODECS = {f"{family}/{bits}": bits for family in ("linear", "companded") for bits in range(1, 9)} | {"eden/2": 2}


def of_bandwidth(name: str, rated: float) -> Costs:
    """Returns an estimate for a GPU, without collectives, from its memory's rated bandwidth in bytes per second.

    Kernels are assumed to reach 60 % of it. A codec reads or writes each coordinate, 4 bytes, and its code once.
    """
    bytes_per_s = 0.6 * rated
    source = f"{name}: an estimate from memory bandwidth, not a measurement"
    gammas = {}
    for codec, bits in _CODECS.items():
        code = bits / 8
        moved_s = (4 + code) / bytes_per_s
        gammas[codec] = Gamma(encode_s=moved_s, decode_s=moved_s, reduce_s=code / bytes_per_s)
    return Costs({}, gammas, 1 / bytes_per_s, launch_s=10e-6, cores=1.0, on_streams=True, source=source)


def _of_xeon() -> Costs:
    """Returns the costs on a CPU, measured once by `gqsgd probe`.

    The kernels of the default configuration's codec take equally long at 8 and at 3 bits, and EDEN's kernels at 2 bits
    take about as long.
    """
    own = Gamma(encode_s=0.85e-9, decode_s=0.75e-9, reduce_s=0.43e-9)
    gammas = {**dict.fromkeys(_CODECS, own), BF16_HOOK: Gamma(2.1e-9, 0.5e-9, 0.0)}
    # By bits, the factors by which trellis codes take longer to encode and to decode than EDEN at 2 bits:
    # `python -m benchmarks.kernels --codec eden trellis --block-size 256 1024 --bits 2 3 4`.
    for bits, encode, decode in ((2, 2.5, 1.6), (3, 2.9, 1.7), (4, 3.4, 1.7)):
        gammas[f"trellis/{bits}"] = Gamma(encode * own.encode_s, decode * own.decode_s, decode * own.reduce_s)
    source = "cpu: measured on one core of an Intel Xeon, an estimate for others"
    return Costs({}, gammas, touch_s=0.071e-9, launch_s=20e-6, stage_s=105e-6, cores=2.0, source=source)


#: Costs without collectives, by the name of their device.
ESTIMATES = {
    "h100": of_bandwidth("h100", 3.35e12),
    "a100": of_bandwidth("a100", 1.56e12),
    "cpu": _of_xeon(),
}


def estimated_costs(device: str, nodes: int, per_node: int, link: Link) -> Costs:
    """Returns all constants for nodes of a device, a name of `ESTIMATES`. The other arguments are those of
    `collectives_between`."""
    return on_links(ESTIMATES[device], nodes, per_node, link, inside_of(device, link))


def on_links(costs: Costs, nodes: int, per_node: int, link: Link, inside: Link) -> Costs:
    """Returns the costs of a device with collectives over links with given rates.

    Over NCCL, a link that uses TCP has additional terms. ``costs`` are those of the codec and of a rank's other work.
    If they have a latency, the clock uses it for the collectives of Gloo (`tcp.ways`), and the latency of ``link`` is
    ignored. The other arguments are those of `collectives_between`.
    """
    counted = replace(link, latency_s=0.0) if costs.latency_s else link
    made = collectives_between(nodes, per_node, counted, inside)
    terms = terms_of(nodes, nodes * per_node, link.bytes_per_s) if costs.on_streams else None
    latency_s = costs.latency_s if nodes > 1 else 0.0  # of messages between nodes, of which one node has none
    return replace(costs.on(nodes), collectives=made, terms=terms, latency_s=latency_s)
