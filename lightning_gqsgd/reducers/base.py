"""`Reducer`: the interface of reducers. A reducer describes how one piece is encoded, exchanged and decoded.

A reducer issues no collective itself. Its method `steps` is a generator: it yields the exchanges that it needs, and is
resumed when they are done. The same reducer can therefore run over process groups (`pipeline`) and over virtual ranks
in one process (`run_virtual`). The k-th yield of a piece is its stage k. All ranks run the stages of all pieces in the
same order. On a GPU, `steps` issues work and never waits for it, so it reads no number from the GPU.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.scales import ScaleRule
from lightning_gqsgd.kernels.layout import USUAL_SIZE, BlockRun, PieceSize
from lightning_gqsgd.kernels.protocol import Count
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, NO_ORIGIN, Key, Origin, in_finite_range, scale_format
from lightning_gqsgd.reducers.memory import MemoryStore

if TYPE_CHECKING:
    from lightning_gqsgd.spec.memories import Memory


class Scope(NamedTuple):
    """The ranks that take part in an exchange.

    The kind is ``"all"`` for all ranks, ``"node"`` for the ranks of one node, or ``"peers"`` for the ranks that have
    the same place on each node. A node has ``node_size`` consecutive ranks.
    """

    kind: str
    node_size: int = 1

    def members(self, rank: int, ranks: int) -> range:
        """Returns the ranks with which ``rank`` exchanges, including itself. ``ranks`` is the number of all ranks."""
        first = rank - rank % self.node_size
        return {
            "all": range(ranks),
            "node": range(first, first + self.node_size),
            "peers": range(rank % self.node_size, ranks, self.node_size),
        }[self.kind]


ALL = Scope("all")


class Exchange(NamedTuple):
    """A collective to run: ``all_to_all``, ``all_gather`` (output is [ranks, ...]), or ``sum`` and ``max`` (in place).

    ``splits`` has the numbers of elements of output and of input that belong to each rank, for an ``all_to_all`` with
    unequal parts. ``scope`` gives the ranks that take part.
    """

    kind: str
    output: Tensor
    input: Tensor
    splits: tuple[list[int], list[int]] | None = None
    scope: Scope = ALL

    @classmethod
    def in_place(cls, kind: str, tensor: Tensor) -> Exchange:
        """Returns a ``sum`` or ``max`` over all ranks."""
        return cls(kind, tensor, tensor)


#: The reduction of one piece: yields the exchanges of each stage, and returns the number of blocks that are not finite.
Steps = Generator[Sequence[Exchange], None, Count]


@dataclass(frozen=True)
class Setting:
    """The setting from which a reducer is built. `config.setting_of` creates it from a configuration.

    Attributes:
        reducer: the class of the reducer.
        codec: the codec of its messages.
        ranks: number of ranks.
        dtype: dtype of the gradients.
        block_size: the largest number of coordinates in a block.
        scale_rule: the rule for the scale of each block.
        global_scales: whether all ranks have the same scales, although their messages contain scales. Ranks whose codes
            are added always have the same ones.
        rotates: whether each block is rotated at random first.
        coder: how codes are written, ``"fixed"`` or ``"elias"``.
        up: the memory for the messages that a rank sends. None: there is no memory.
        down: the memory for the messages that the owner of a shard sends back. None: there is no memory.
        seed: seed of the dither.
        sample_every: number of steps from one measurement of the error to the next; 0: no measurements.
        piece_size: the number of coordinates of a piece. Results do not depend on it.
        between: the setting for the ranks that have the same place on each node, if the reducer has two levels.
    """

    reducer: type[Reducer]
    codec: Codec
    ranks: int
    dtype: torch.dtype
    block_size: int
    scale_rule: ScaleRule = ScaleRule()
    global_scales: bool = False
    rotates: bool = False
    coder: str = "fixed"
    up: Memory | None = None
    down: Memory | None = None
    seed: int = 0
    sample_every: int = 0
    piece_size: PieceSize = USUAL_SIZE
    between: Setting | None = None

    @property
    def remembers(self) -> bool:
        """True if there is a memory in at least one direction."""
        return self.up is not None or self.down is not None

    @property
    def scale_bytes(self) -> int:
        """Number of bytes of a block's scale in a message."""
        return scale_format(self.dtype).nbytes if self.codec.has_scale else 0

    @property
    def raw_bytes(self) -> int:
        """Number of bytes of an uncompressed coordinate."""
        return scale_format(self.dtype).raw_bytes

    @property
    def record_sizes(self) -> dict[str, int]:
        """``scale_bytes`` and ``raw_bytes``, as arguments of `kernels.layout.place`."""
        return {"scale_bytes": self.scale_bytes, "raw_bytes": self.raw_bytes}


def step_key(seed: int, step: int, stream: int) -> Key:
    """Returns the two 32-bit dither keys of one step and one stream (see `StepKeys`).

    The keys are a blake2b hash of (seed, step, stream), so that streams of neighbouring steps and ranks share no
    structure.
    """
    text = b"".join(value.to_bytes(8, "little") for value in (seed, step, stream))
    digest = hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class StepKeys:
    """Keys of one step's random numbers, the same on every rank.

    Attributes:
        seed: the seed of the configuration.
        step: number of the step.
        up: keys for each rank's codes on the way up.
        down: key for the codes of the mean on the way down.
        rotation: key for the signs of rotations.
        origin: the origin of the piece's block table.
    """

    seed: int
    step: int
    up: tuple[Key, ...]
    down: Key
    rotation: Key
    origin: Origin = NO_ORIGIN

    @classmethod
    @lru_cache(maxsize=8)  # all buckets of a step have the same keys
    def of(cls, seed: int, step: int, ranks: int) -> StepKeys:
        """Returns the keys of a step. Stream 0 is for the mean, 1 to n are for the ranks, and the last one is for
        rotations."""
        # Each rank has its own stream, so that the roundings of ranks are independent and average out. Every rank knows
        # all keys, because a receiver needs the sender's dither to decode.
        up = tuple(step_key(seed, step, rank + 1) for rank in range(ranks))
        return cls(seed, step, up, step_key(seed, step, 0), step_key(seed, step, 2**64 - 1))

    def node(self, hop: int, rank: int) -> Key:
        """Returns the key for the sums of codes that a rank computes at a hop. No rank's own codes use its stream."""
        ranks = len(self.up)
        return step_key(self.seed, self.step, ranks * (hop + 1) + rank + 1)


class Reducer(ABC):
    """A reducer for one piece of a flat tensor.

    Attributes:
        scales: the values of ``scale`` that the reducer supports, ``"local"`` or ``"global"``; the first is the
            default. A sum of codes needs the same scales on all ranks.
        memories: the memory fields of a configuration that the reducer supports.
        coders: the values of ``coder`` that the reducer supports.
        adds_codes: whether the codes of several ranks are added before they are decoded.
        owns_shards: whether a rank averages only the messages of its own shard, and keeps the memories for this.
        divides_parameters: whether several ranks encode parts of one parameter.
        compresses: whether the reducer quantises.
        float_bits: the numbers of bits, 16 or 32, of the floating-point numbers that the reducer averages; empty if it
            averages codes.
        lengths_vary: whether the lengths of its messages depend on the gradients, so that they cannot be predicted.
        stays_when_uncompressed: whether this reducer also averages tensors whose parameters are all uncompressed. If
            not, `two_shot.uncompressed` gives the reducer for them.
        needs_copy: whether `steps` changes its input in the compute dtype, so that it needs a copy of the input.
        sent_bytes: number of bytes that each rank sends. All-reduces count as rings.
        message_bytes: number of bytes of one rank's coordinates on the wire. Divided by the number of coordinates, this
            gives the bits per coordinate for any number of ranks. If lengths vary, it is the number of the latest step.
    """

    scales: ClassVar[tuple[str, ...]] = ("local",)
    memories: ClassVar[tuple[str, ...]] = ()
    coders: ClassVar[tuple[str, ...]] = ("fixed",)
    adds_codes: ClassVar[bool] = False
    owns_shards: ClassVar[bool] = False
    divides_parameters: ClassVar[bool] = False
    compresses: ClassVar[bool] = True
    float_bits: ClassVar[tuple[int, ...]] = ()
    lengths_vary: ClassVar[bool] = False
    stays_when_uncompressed: ClassVar[bool] = False
    needs_copy: bool
    sent_bytes: int
    message_bytes: int

    @abstractmethod
    def __init__(self, table: np.ndarray, setting: Setting) -> None:
        """Prepare the reducer for the blocks of a table, [blocks, COLUMNS]."""

    @staticmethod  # noqa: B027  # most reducers work with every codec
    def check(codec: Codec) -> None:
        """Raise ConfigError if the reducer does not work with the codec."""

    @staticmethod  # noqa: B027  # most reducers work with every device
    def check_device(setting: Setting, device: torch.device) -> None:
        """Raise ConfigError if the setting does not work for tensors on the device."""

    @staticmethod
    def stages(setting: Setting) -> int:
        """Returns the number of stages, two unless a reducer says otherwise. `steps` does not yield more often."""
        return 2

    @classmethod
    def scopes(cls, setting: Setting) -> list[tuple[Scope, ...]]:
        """Returns the scopes of the exchanges, stage by stage. There are at least two stages, because uncompressed
        parameters need two."""
        return [(ALL,)] * max(2, cls.stages(setting))

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns a value that, with the setting, determines rank 0's work and messages in a piece of these blocks.

        Most pieces of a large model have the same value, and a prediction (`predict.profile`) examines only one of
        them. If a few sizes determine the work of a reducer without a memory, the value consists of these sizes.
        """
        return tuple(block_runs)

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns the predicted mean square error of the mean over ``ranks``, per coordinate, in units of the squared
        scale. Unless a reducer says otherwise, each rank rounds once, and the roundings average out.

        The prediction assumes that all ranks and the mean have the same scale (aligned gradients, the worst case).

        Raises:
            ConfigError: if the codes of ``ranks`` ranks cannot be added.
        """
        return codec.error_variance() / ranks

    @abstractmethod
    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace the coordinates of ``x`` by the mean over ranks. Returns the number of blocks that are not finite.

        Args:
            x: flat tensor; the table counts from its start. If the reducer needs a copy, ``x`` is this copy, in the
                compute dtype.
            rank: this rank.
            keys: keys of the step's random numbers.
            store: the memories of this rank; empty if there is no memory.
        """


class HasSteps(Protocol):
    """A `Reducer`, or another object with the same `steps`."""

    compresses: ClassVar[bool]
    needs_copy: bool
    sent_bytes: int
    message_bytes: int

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps: ...


def reduced(reducer: HasSteps, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
    """Returns the steps of a reducer on ``x``. If the reducer needs a copy, they run on a copy in the compute dtype."""
    if reducer.needs_copy:
        return _reduced_by_copy(reducer, x, rank, keys, store)
    return reducer.steps(x, rank, keys, store)


def _reduced_by_copy(reducer: HasSteps, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
    # A memory or a rotation changes its input, so the copy is in fp32 or fp64. In a 16-bit dtype, each of these changes
    # would round once more.
    work = x.to(COMPUTE_DTYPES[x.dtype], copy=True)
    bad = yield from reducer.steps(work, rank, keys, store)
    # The mean of finite gradients has to stay finite, but a cast to fp16 turns numbers that are slightly too large into
    # infinity.
    x.copy_(in_finite_range(work, x.dtype))
    return bad


class WholeNumbers(Reducer):
    """Base class of reducers that average gradients without quantisation (``bits=32``)."""

    scales: ClassVar[tuple[str, ...]] = ()
    compresses: ClassVar[bool] = False
    float_bits: ClassVar[tuple[int, ...]] = (32,)
    stays_when_uncompressed: ClassVar[bool] = True
    needs_copy = False

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        return sum(run.numel for run in block_runs)


def in_scope(steps: Steps, scope: Scope) -> Steps:
    """Run steps with all exchanges between the ranks of a scope. Returns their result."""
    while True:
        try:
            exchanges = next(steps)
        except StopIteration as end:
            return end.value
        yield [exchange._replace(scope=scope) for exchange in exchanges]


def side_by_side(*several: Steps) -> Steps:
    """Run the steps of several parts of a piece together, stage by stage. Returns the sum of their results."""
    result: Count = 0
    going = list(several)
    while going:
        exchanges: list[Exchange] = []
        # The parts share a stage, so their exchanges start together. Their order is the same on every rank. A part with
        # fewer stages than the others ends early.
        for steps in list(going):
            try:
                exchanges += next(steps)
            except StopIteration as end:
                result += end.value
                going.remove(steps)
        if going:
            yield exchanges
    return result


def shared_scale_bytes(blocks: int, setting: Setting) -> tuple[int, int]:
    """Returns two numbers of bytes for the exchange of `link.Outgoing.share_scales`: the bytes of one rank's scales,
    and the bytes that each rank sends.

    Args:
        blocks: number of blocks that have a scale in the exchange.
        setting: the setting, with the rule for scales and the number of ranks.
    """
    rule = setting.scale_rule
    # Scales are sent in the compute dtype, in 8 bytes for fp64 gradients and in 4 bytes for all others.
    own = min(blocks, 1 if rule.per == "bucket" else blocks) * (8 if setting.dtype == torch.float64 else 4)
    return own, ring_bytes(own, setting.ranks) if rule.over_ranks == "max" else (setting.ranks - 1) * own


def gathered(message: Tensor, ranks: int) -> Generator[Sequence[Exchange], None, list[Tensor]]:
    """Send a message of any length to all ranks. Returns the messages of all ranks, by rank.

    On the wire, all messages are padded to the longest one.

    Args:
        message: uint8 [bytes], on the CPU.
        ranks: number of ranks.
    """
    lengths = torch.empty(ranks, 1, dtype=torch.int64, device="cpu")
    yield (Exchange("all_gather", lengths, torch.tensor([len(message)], device="cpu")),)
    # An all-gather needs messages of equal length. The lengths were gathered first, so that each rank can cut off the
    # padding of the others.
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[: len(message)] = message
    everyone = torch.empty(ranks, len(padded), dtype=torch.uint8, device="cpu")
    yield (Exchange("all_gather", everyone, padded),)
    return [row[:length] for row, length in zip(everyone, lengths[:, 0].tolist(), strict=True)]


def ring_bytes(message_bytes: int, ranks: int) -> int:
    """Returns the number of bytes that each rank sends in a reduce-scatter and an all-gather of a message."""
    return 2 * (ranks - 1) * message_bytes // ranks


def run_virtual(steps: Sequence[Steps], ranks: int | None = None, *, only_first: bool = False) -> list[Count]:
    """Run one piece on virtual ranks in this process, in lock-step. Returns the result of each rank's steps.

    Args:
        steps: the steps of each rank, or of the first ranks.
        ranks: number of ranks. Those without steps send zeros. None: all ranks have steps.
        only_first: whether the steps of the other ranks are closed once rank 0 has its result, which is the same on all
            ranks.
    """
    everyone = len(steps) if ranks is None else ranks
    results: list[Count] = []
    pending: list[Sequence[Exchange]] = []
    while not results:
        for of_rank in steps:
            if results and only_first:
                of_rank.close()
                continue
            try:
                pending.append(next(of_rank))
            except StopIteration as end:
                results.append(end.value)
        for first, exchanges in enumerate(pending):
            # An exchange runs once for all its members, at the first of them.
            for scope in dict.fromkeys(exchange.scope for exchange in exchanges):
                members = scope.members(first, everyone)
                if members[0] == first:
                    present = [pending[rank] for rank in members if rank < len(pending)]
                    theirs = [[exchange for exchange in some if exchange.scope == scope] for some in present]
                    for same in zip(*theirs, strict=True):
                        _exchange_virtually(same, len(members))
        pending = []
    return results


def _exchange_virtually(exchanges: Sequence[Exchange], ranks: int) -> None:
    """Run an exchange of ``ranks`` ranks, of which the first ones are given."""
    first, *others = exchanges
    if first.kind == "all_to_all":
        if first.splits:
            _exchange_parts(exchanges)
        else:
            _exchange_equal_parts(exchanges, ranks)
    elif first.kind == "all_gather":
        sent = torch.stack([exchange.input for exchange in exchanges])
        absent = sent.new_zeros(ranks - len(exchanges), *sent.shape[1:])
        first.output.copy_(torch.cat([sent, absent]).view_as(first.output))
        for other in others:  # all share one copy, because n copies would take n² memory
            other.output.set_(first.output)  # type: ignore[call-overload]
    else:
        stacked = torch.stack([exchange.input for exchange in exchanges])
        result = stacked.amax(0) if first.kind == "max" else stacked.sum(0, dtype=stacked.dtype)
        for exchange in exchanges:
            exchange.output.copy_(result)


def _exchange_equal_parts(exchanges: Sequence[Exchange], ranks: int) -> None:
    present = len(exchanges)
    sent = torch.stack([exchange.input.view(ranks, -1)[:present] for exchange in exchanges])
    for rank, exchange in enumerate(exchanges):
        received = exchange.output.view(ranks, -1)
        received[:present] = sent[:, rank]
        received[present:] = 0


def _exchange_parts(exchanges: Sequence[Exchange]) -> None:
    """Exchange parts of unequal sizes. Most of the n² parts are empty, and are skipped."""
    sent = {}
    for source, exchange in enumerate(exchanges):
        assert exchange.splits is not None
        for rank, start, length in _filled(exchange.splits[1]):
            sent[source, rank] = exchange.input.flatten()[start : start + length].clone()
    for rank, exchange in enumerate(exchanges):
        assert exchange.splits is not None
        for source, start, length in _filled(exchange.splits[0]):
            is_present = source < len(exchanges)
            exchange.output.view(-1)[start : start + length] = sent[source, rank] if is_present else 0


def _filled(split: list[int]) -> list[tuple[int, int, int]]:
    """Returns the number, start and length of the parts that are not empty."""
    starts = accumulate(split, initial=0)
    return [
        (number, start, length) for number, (start, length) in enumerate(zip(starts, split, strict=False)) if length
    ]
