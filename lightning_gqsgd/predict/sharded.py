"""One training step under FSDP2 on the virtual clock.

The model follows torch's FSDP2. A unit is what one call of `fully_shard` divides among ranks: a block of the model, or
the root with the parameters that are in no block. Before a block's forward pass, and again before its backward pass,
its weights are gathered. The root's weights are gathered once. After a unit's backward pass, its gradients are
reduce-scattered, and averaged over the replicas if there are any.

On a GPU, the two next gathers, the last reduce-scatters and the computation run at the same time, see `_on_streams`. On
a CPU, nothing runs beside the computation: FSDP2 waits for each collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.kernels.meta import Work
from lightning_gqsgd.predict.bunches import bunched, with_counts
from lightning_gqsgd.predict.clock import Clock, Resource, Then
from lightning_gqsgd.predict.costs import Costs
from lightning_gqsgd.predict.model import Prediction, piece_size_of, prediction_of
from lightning_gqsgd.predict.profile import Message, Profile, Stage, bucket_profiles, plan_profiles
from lightning_gqsgd.predict.runners import Network, StreamsRunner, ThreadRunner, runner_for
from lightning_gqsgd.predict.timeline import MOST, Timeline, bunch_length, weights_of
from lightning_gqsgd.reducers import Setting
from lightning_gqsgd.reducers.base import ALL, Scope, ring_bytes
from lightning_gqsgd.session.parameters import number_parameters
from lightning_gqsgd.wire.plan import GatherPlan, ScatterPlan, ShardPlan

#: Streams of a communicator of the hooks for FSDP2.
_STREAMS = 1
#: Distances from the ends of equal blocks, and from the ends of the pieces of a unit, from which on two are in a bunch
#: if a step has more than `MOST` pieces, see `timeline.bunch_length`.
_FINE_BLOCKS = 8
_FINE_PIECES = 4


class Coordinates(NamedTuple):
    """Numbers of coordinates: in parameters that can be compressed, and in smaller ones, which travel as they are."""

    coded: int
    raw: int

    @property
    def numel(self) -> int:
        """All coordinates."""
        return self.coded + self.raw

    def among(self, ranks: int) -> Coordinates:
        """Returns the coordinates of one of ``ranks`` equal shards, padding included."""
        return Coordinates(-(-self.coded // ranks), -(-self.raw // ranks))


class Unit(NamedTuple):
    """Parameters that one call of `fully_shard` divides among ranks.

    Attributes:
        weights: coordinates of all parameters, which are gathered.
        gradients: coordinates of the parameters that are trained.
        share: share of the model's forward and backward pass, 0 to 1.
        times: number of neighbouring units, each of them with these numbers, that the clock runs as one (see
            `bunches`).
    """

    weights: Coordinates
    gradients: Coordinates
    share: float
    times: int = 1


@dataclass(frozen=True)
class ShardedModel:
    """A model under FSDP2.

    Attributes:
        blocks: the units of the blocks, in the order of the forward pass.
        root: the unit of all other parameters; None if there are none.
        timeline: the computation of a step of the whole model. Its optimizer moves all parameters.
    """

    blocks: tuple[Unit, ...]
    root: Unit | None
    timeline: Timeline

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, the root first."""
        return self.blocks if self.root is None else (self.root, *self.blocks)


@dataclass(frozen=True)
class ShardedMethod:
    """What travels in which form.

    Attributes:
        dtype: dtype of the weights and the gradients that are not compressed.
        bits: bits of the gradients: of their reduce-scatters, or of their means over replicas if each node has a
            replica. None: not compressed.
        all_gather_bits: bits of gathered weights; None: not compressed.
        has_levels: whether compressed reduce-scatters have two levels, see `reducers.shards.HierarchicalReduceScatter`.
        has_replicas: whether each node has a replica, which is divided among its ranks. Otherwise, the model is divided
            among all ranks.
    """

    dtype: torch.dtype
    bits: int | None = None
    all_gather_bits: int | None = None
    has_levels: bool = False
    has_replicas: bool = False

    @property
    def keywords(self) -> str:
        """The calls and arguments that choose this method, as text."""
        parts = []
        if self.dtype == torch.bfloat16:
            parts.append("MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)")
        if self.has_replicas:
            parts.append("a mesh of (nodes, ranks of a node)")
        if self.bits is not None:
            how = 'replicate=mesh["replicate"]' if self.has_replicas else "reduce_scatter=True"
            weights = "" if self.all_gather_bits is None else f", all_gather_bits={self.all_gather_bits}"
            levels = ', reducer="hierarchical"' if self.has_levels else ""
            parts.append(f"register_gqsgd_fsdp(model, {how}{weights}, bits={self.bits}{levels})")
        return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def sharded_model(model: nn.Module, timeline: Timeline, weights: Sequence[float] | None = None) -> ShardedModel:
    """Returns a model as FSDP2 is usually applied to it: to every element of its lists of layers, and to the root.

    Lists of layers are `nn.ModuleList` and `nn.Sequential` with several elements that have parameters. Lists inside
    of their elements stay whole.

    Args:
        model: the model, which may be on the device "meta".
        timeline: the computation of a step, without any communication.
        weights: for each trained parameter, its share of the computation, see `timeline.estimated`.

    Raises:
        ConfigError: if there is not one weight for each trained parameter.
    """
    named = dict(model.named_parameters())
    trained = [p for p in named.values() if p.requires_grad]
    weights = weights_of([p.numel() for p in trained], weights)
    entries = {id(named[entry.name]): entry for entry in number_parameters(named, GQSGDConfig())}
    total = max(sum(weights), 1e-300)
    work = {id(p): weight / total for p, weight in zip(trained, weights, strict=True)}
    taken: set[int] = set()

    def unit_of(parameters: Sequence[Tensor]) -> Unit:
        own = [p for p in parameters if id(p) not in taken]  # tied parameters belong to the first unit
        taken.update(map(id, own))

        def counted(some: Sequence[Tensor]) -> Coordinates:
            raw = sum(p.numel() for p in some if entries[id(p)].raw)
            return Coordinates(sum(p.numel() for p in some) - raw, raw)

        return Unit(counted(own), counted([p for p in own if p.requires_grad]), sum(work.get(id(p), 0.0) for p in own))

    blocks = tuple(unit_of(list(block.parameters())) for block in _blocks(model))
    root = unit_of(list(named.values()))
    return ShardedModel(blocks, root if root.weights.numel else None, timeline)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the elements of the topmost lists of layers in a module."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        elements = [child for child in module if next(child.parameters(), None) is not None]
        if len(elements) > 1:
            return elements
    return [block for child in module.children() for block in _blocks(child)]


def predict_sharded(model: ShardedModel, costs: Costs, nodes: int, per_node: int, method: ShardedMethod) -> Prediction:
    """Predict one step under FSDP2.

    Args:
        model: the units, and the computation of each rank.
        costs: all costs, for this number of nodes and ranks.
        nodes: number of nodes.
        per_node: number of ranks on each node.
        method: what travels in which form.

    Raises:
        ConfigError: if costs are missing.
    """
    collectives = _Collectives(costs, method, nodes, per_node)
    is_bunched = collectives.pieces(model) > MOST
    step = _Step(_in_bunches(model) if is_bunched else model, costs, collectives, is_bunched=is_bunched)
    (_on_streams if costs.on_streams else _one_after_another)(step)
    step.run()
    reduced_s = step.clock.now_s
    # Each rank's optimizer moves its own shards.
    update_s = model.timeline.update_s / collectives.shards
    compute_s = model.timeline.forward_s + model.timeline.backward_s + update_s
    return prediction_of(step.clock.events, reduced_s + update_s, compute_s, step.profiles)


def _in_bunches(model: ShardedModel) -> ShardedModel:
    """Returns a model in which equal blocks that follow each other are in bunches."""
    blocks: list[Unit] = []
    for unit, equal in groupby(model.blocks):
        total = len(list(equal))
        before = 0
        while before < total:
            blocks.append(unit._replace(times=bunch_length(before, total, _FINE_BLOCKS)))
            before += blocks[-1].times
    return replace(model, blocks=tuple(blocks))


def scatter_seconds(costs: Costs, nodes: int, per_node: int, method: ShardedMethod, numel: int) -> float:
    """Returns the seconds of one reduce-scatter of ``numel`` gradients among all ranks, without any computation at the
    same time; see `predict_sharded` for the other arguments."""
    clock = Clock(costs.cores)
    runner = runner_for(clock, costs, Network(clock, costs, has_backward=False), _STREAMS)
    gradients = Coordinates(numel, 0)
    runner.submit(_Collectives(costs, method, nodes, per_node).scatter(Unit(gradients, gradients, 1.0)), 0)
    clock.run()
    return clock.now_s


class _Collectives:
    """The profiles of a unit's collectives; each is a list of profiles of pieces.

    Attributes:
        shards: number of ranks among which a model is divided.
        itemsize: bytes of a coordinate that is not compressed.

    Args:
        costs: all costs.
        method: what travels in which form.
        nodes: number of nodes.
        per_node: number of ranks on each node.
    """

    def __init__(self, costs: Costs, method: ShardedMethod, nodes: int, per_node: int) -> None:
        self._method = method
        self.shards = per_node if method.has_replicas else nodes * per_node
        self.itemsize = method.dtype.itemsize
        self._costs = costs
        self._replicas = nodes if method.has_replicas else 1
        self._per_node = per_node
        self._scope = Scope("node", per_node) if method.has_replicas else ALL
        self._name = str(method.dtype).removeprefix("torch.")

    def pieces(self, model: ShardedModel) -> int:
        """Returns the number of pieces of a step."""
        total = 0
        for unit, count in Counter(model.units).items():
            gathers = 1 if unit is model.root else 2  # see `_on_streams`
            total += count * (gathers * len(self.gather(unit)) + len(self.scatter(unit)) + len(self.mean(unit)))
        return total

    def gather(self, unit: Unit) -> Sequence[Profile]:
        """Returns the gathering of a unit's weights."""
        share = unit.weights.among(self.shards)
        if self._method.all_gather_bits is not None:
            return _of_scope(self._coded(GatherPlan, self._method.all_gather_bits, share), self._scope)
        nbytes = (self.shards - 1) * share.numel * self.itemsize
        return _native(Message("all_gather", nbytes, self._scope, self.shards))

    def scatter(self, unit: Unit) -> Sequence[Profile]:
        """Returns the reduce-scatter of a unit's gradients."""
        share = unit.gradients.among(self.shards)
        if self._method.bits is not None and not self._method.has_replicas:
            return self._coded(ScatterPlan, self._method.bits, share)
        whole = self.shards * share.numel * self.itemsize
        if self._costs.on_streams:
            nbytes = whole * (self.shards - 1) // self.shards
            return _native(Message(f"reduce_scatter/{self._name}", nbytes, self._scope, self.shards))
        # torch's reduce-scatter over Gloo is an all-reduce of a copy.
        message = Message(f"sum/{self._name}", ring_bytes(whole, self.shards), self._scope, self.shards)
        return _native(message, Work("torch", nbytes=2 * whole))

    def mean(self, unit: Unit) -> Sequence[Profile]:
        """Returns the mean of a rank's reduced gradients over the replicas; empty if there are none."""
        if not self._method.has_replicas:
            return ()
        share = unit.gradients.among(self.shards)
        peers = Scope("peers", self.shards)
        if self._method.bits is None:
            nbytes = ring_bytes(share.numel * self.itemsize, self._replicas)
            return _native(Message(f"sum/{self._name}", nbytes, peers, self._replicas))
        config = GQSGDConfig(bits=self._method.bits, reducer="two_shot", sample_every=0)
        setting = self._setting(config, self._replicas)
        return _of_scope(bucket_profiles(setting, tuple(_segments(share, 1))), peers)

    def _coded(self, plan: Callable[..., ShardPlan], bits: int, share: Coordinates) -> tuple[Profile, ...]:
        config = GQSGDConfig(bits=bits, reducer="two_shot", sample_every=0)
        if self._method.has_levels and plan is ScatterPlan:
            config = replace(config, reducer="hierarchical", node_size=self._per_node)
        return _shard_profiles(plan, self._setting(config, self.shards), share)

    def _setting(self, config: GQSGDConfig, ranks: int) -> Setting:
        return setting_of(
            resolve(config, ranks), ranks, self._method.dtype, piece_size_of(self._costs, config.num_bits)
        )


def _native(message: Message, *works: Work) -> tuple[Profile, ...]:
    """Returns a collective of torch's own, which is one piece; ``works`` come before it."""
    return (Profile((Stage(works, (message,)),), ()),)


def _of_scope(profiles: Sequence[Profile], scope: Scope) -> tuple[Profile, ...]:
    """Returns the profiles of pieces with their messages between the ranks of another scope."""

    def moved(stage: Stage) -> Stage:
        return stage._replace(messages=tuple(message._replace(scope=scope) for message in stage.messages))

    return tuple(replace(profile, stages=tuple(map(moved, profile.stages))) for profile in profiles)


def _segments(share: Coordinates, ranks: int) -> list[Segment]:
    """Returns the segments of a flat tensor with a shard of each of ``ranks``."""
    row = [Segment(0, share.coded, raw=False), Segment(1, share.raw, raw=True)]
    return [segment for segment in row if segment.numel] * ranks


@lru_cache(maxsize=1 << 12)
def _shard_profiles(plan: Callable[..., ShardPlan], setting: Setting, share: Coordinates) -> tuple[Profile, ...]:
    """Returns the profiles of the pieces of a flat tensor with a shard of each rank.

    All pieces but the last are equal. So one of them is planned, and the rest of the tensor.
    """
    ranks = setting.ranks
    numel = max(1, setting.piece_size.within(ranks * share.numel) // ranks)
    full = max(0, share.coded - 1) // numel
    rest = Coordinates(share.coded - full * numel, share.raw)
    alike = replace(setting, piece_size=PieceSize(ranks * share.numel, ranks * share.numel))
    last = plan_profiles(plan(_segments(rest, ranks), alike))
    if not full:
        return last
    return (*plan_profiles(plan(_segments(Coordinates(numel, 0), ranks), alike)) * full, *last)


@dataclass(eq=False)
class _Task:
    """A task that starts when the tasks before it have ended."""

    start: Callable[[Then], None]
    waiting_for: int
    followers: list[_Task] = field(default_factory=list)

    def begin(self) -> None:
        """Start the task."""
        self.start(self._ended)

    def _ended(self) -> None:
        for follower in self.followers:
            follower.waiting_for -= 1
            if not follower.waiting_for:
                follower.begin()


class _Step:
    """The tasks of a step, and what they run on.

    Each method that adds a task returns it, and takes the tasks after which it starts.
    """

    def __init__(self, model: ShardedModel, costs: Costs, collectives: _Collectives, *, is_bunched: bool) -> None:
        self.model = model
        self._is_bunched = is_bunched
        self.clock = Clock(costs.cores)
        self.profiles: list[Profile] = []
        self._costs = costs
        self._collectives = collectives
        self._compute = Resource(self.clock, "backward")
        network = Network(self.clock, costs, has_backward=True)
        # Shards and replicas have a communicator each.
        self._shards = runner_for(self.clock, costs, network, _STREAMS)
        self._replicas = runner_for(self.clock, costs, network, _STREAMS)
        self._number = {id(unit): number for number, unit in enumerate(model.units)}
        self._first: list[_Task] = []

    def forward(self, unit: Unit, after: Sequence[_Task]) -> _Task:
        """Add a unit's forward pass, which copies its weights first."""
        return self._computing("forward", unit, self.model.timeline.forward_s, unit.weights.numel, after)

    def backward(self, unit: Unit, after: Sequence[_Task]) -> _Task:
        """Add a unit's backward pass, with the copies of its weights before it and of its gradients after it."""
        # The root's weights are still there from its forward pass.
        weights = 0 if unit is self.model.root else unit.weights.numel
        return self._computing("backward", unit, self.model.timeline.backward_s, weights + unit.gradients.numel, after)

    def gather(self, unit: Unit, after: Sequence[_Task]) -> _Task:
        """Add the gathering of a unit's weights."""
        return self._sending(self._shards, unit, self._collectives.gather(unit), after)

    def reduce(self, unit: Unit, after: Sequence[_Task]) -> _Task:
        """Add the reduce-scatter of a unit's gradients and their mean over replicas, which is returned."""
        scattered = self._sending(self._shards, unit, self._collectives.scatter(unit), after)
        return self._sending(self._replicas, unit, self._collectives.mean(unit), [scattered])

    def run(self) -> None:
        """Run all tasks."""
        for task in self._first:
            task.begin()
        self.clock.run()

    def _computing(self, label: str, unit: Unit, pass_s: float, copied: int, after: Sequence[_Task]) -> _Task:
        nbytes = 2 * self._collectives.itemsize * copied  # read and written
        copy_s = self._costs.seconds(Work("torch", nbytes=nbytes)) / self._costs.speed
        seconds = unit.times * (unit.share * pass_s + copy_s)
        arguments = (seconds, self._costs.speed, label, self._number[id(unit)], -1)
        return self._add(partial(self._compute.add, *arguments), after)

    def _sending(
        self,
        runner: StreamsRunner | ThreadRunner,
        unit: Unit,
        profiles: Sequence[Profile],
        after: Sequence[_Task],
    ) -> _Task:
        if self._is_bunched:
            pieces = with_counts(profiles, unit.times)
            profiles = bunched(pieces, 0, sum(count for _, count in pieces), _FINE_PIECES)
        self.profiles += profiles
        if not any(profile.sent_bytes for profile in profiles):
            return self._add(lambda then: then(), after)
        return self._add(partial(runner.submit, profiles, self._number[id(unit)]), after)

    def _add(self, start: Callable[[Then], None], after: Sequence[_Task]) -> _Task:
        task = _Task(start, len(after))
        for before in after:
            before.followers.append(task)
        if not after:
            self._first.append(task)
        return task


def _one_after_another(step: _Step) -> None:
    """Add the tasks of a step on a CPU, where each one waits for the one before it."""
    last: list[_Task] = []
    for unit in step.model.units:
        last = [step.gather(unit, last)]
        if unit is not step.model.root:
            last = [step.forward(unit, last)]
    root = step.model.root
    if root is not None:
        last = [step.backward(root, [step.forward(root, last)])]
    for unit in reversed(step.model.blocks):
        last = [step.reduce(unit, [step.backward(unit, [step.gather(unit, last)])])]
    if root is not None:
        step.reduce(root, last)


def _on_streams(step: _Step) -> None:
    """Add the tasks of a step on a GPU.

    Weights are gathered ahead: in the forward pass, until those of the block before the previous one are copied out; in
    the backward pass, those of the next block while a block computes. A block's backward pass waits for the gradients
    of the block before the previous one to be reduced, whose memory is used again.
    """
    model = step.model
    of_root = [] if model.root is None else [step.gather(model.root, [])]
    computed: list[_Task] = []
    gathered = of_root
    for unit in model.blocks:
        gathered = [step.gather(unit, [*gathered, *computed[-3:-2]])]
        computed.append(step.forward(unit, [*gathered, *computed[-1:]]))
    if model.root is not None:
        computed.append(step.forward(model.root, [*of_root, *computed[-1:]]))
        computed.append(step.backward(model.root, computed[-1:]))
    reduced: list[_Task] = []
    for unit in reversed(model.blocks):
        gathered = [step.gather(unit, computed[-2:-1])]
        computed.append(step.backward(unit, [*gathered, *computed[-1:], *reduced[-2:-1]]))
        reduced.append(step.reduce(unit, computed[-1:]))
    if model.root is not None:
        step.reduce(model.root, computed[-1:])
