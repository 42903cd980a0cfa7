"""The interface of reducers. A reducer describes how one piece is encoded, exchanged and decoded.

A reducer issues no collective itself. Its `steps` are a generator: it yields the exchanges that it needs, and is
resumed when they are done. The same reducer therefore runs over process groups (`pipeline`) and over virtual ranks in
one process (`run_virtual`). The k-th time that a piece yields is its stage k. The pieces take each stage in the same
order on every rank. On a GPU, `steps` issue work and never wait for it: they read no number from the GPU.
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
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, in_finite_range, scale_format
from lightning_gqsgd.reducers.memory import UP, Direction, MemoryStore

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
        """Returns the ranks out of ``ranks`` that ``rank`` exchanges with, including itself."""
        first = rank - rank % self.node_size
        return {
            "all": range(ranks),
            "node": range(first, first + self.node_size),
            "peers": range(rank % self.node_size, ranks, self.node_size),
        }[self.kind]


ALL = Scope("all")


class Exchange(NamedTuple):
    """A collective to run: ``all_to_all``, ``all_gather`` (output is [ranks, ...]), or ``sum`` and ``max`` (in place).

    ``splits``: of an ``all_to_all`` with unequal parts, how many elements of output and of input belong to each rank.
    ``scope``: between whom.
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


#: One piece's way: yields the exchanges of each stage, and returns the number of blocks that are not finite.
Steps = Generator[Sequence[Exchange], None, Count]


@dataclass(frozen=True)
class Setting:
    """The setting that a reducer is built for. `config.setting_of` makes it of a configuration.

    Attributes:
        reducer: the reducer itself.
        codec: the codec of its messages.
        ranks: number of ranks.
        dtype: dtype of the gradients.
        block_size: the most coordinates of a block.
        scale_rule: the rule that gives each block its scale.
        shares_scales: whether all ranks have the same scales in their messages.
        rotates: whether each block is turned by a random rotation first.
        coder: how codes are written, ``"fixed"`` or ``"elias"``.
        up: the memory of what a rank sends; None: nothing is remembered.
        down: the memory of what the owner of a shard sends back; None: nothing is remembered.
        seed: of the dither.
        sample_every: the error is measured every so many steps; 0: never.
        piece_size: how many coordinates a piece has; results do not depend on it.
        between: the setting of the ranks that have the same place on each node, if the reducer has two levels.
    """

    reducer: type[Reducer]
    codec: Codec
    ranks: int
    dtype: torch.dtype
    block_size: int
    scale_rule: ScaleRule = ScaleRule()
    shares_scales: bool = False
    rotates: bool = False
    coder: str = "fixed"
    up: Memory | None = None
    down: Memory | None = None
    seed: int = 0
    sample_every: int = 0
    piece_size: PieceSize = USUAL_SIZE
    between: Setting | None = None

    def memory_of(self, direction: Direction) -> Memory | None:
        """Returns the memory of a direction; None: nothing is remembered there."""
        return self.up if direction is UP else self.down

    @property
    def remembers(self) -> bool:
        """Returns whether there is a memory, in either direction."""
        return self.up is not None or self.down is not None

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale in a message."""
        return scale_format(self.dtype).nbytes if self.codec.has_scale else 0

    @property
    def raw_bytes(self) -> int:
        """Bytes of an uncompressed coordinate."""
        return scale_format(self.dtype).raw_bytes

    @property
    def record_sizes(self) -> dict[str, int]:
        """``scale_bytes`` and ``raw_bytes``, as arguments of `kernels.layout.place`."""
        return {"scale_bytes": self.scale_bytes, "raw_bytes": self.raw_bytes}


def step_key(seed: int, step: int, stream: int) -> Key:
    """Returns two 32-bit keys of the dither of one step and one stream (see `StepKeys`).

    blake2b over (seed, step, stream): streams of neighbouring steps and ranks share no structure.
    """
    text = b"".join(value.to_bytes(8, "little") for value in (seed, step, stream))
    digest = hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


@dataclass(frozen=True)
class StepKeys:
    """Keys of one step's random numbers, the same on every rank.

    Attributes:
        seed: that of the configuration.
        step: number of the step.
        up: of each rank's codes on the way up.
        down: of the mean's on its way down.
        rotation: of the signs of rotations.
    """

    seed: int
    step: int
    up: tuple[Key, ...]
    down: Key
    rotation: Key

    @classmethod
    @lru_cache(maxsize=8)  # all buckets of a step have the same
    def of(cls, seed: int, step: int, ranks: int) -> StepKeys:
        """Returns the keys of a step: stream 0 is the mean's, 1 to n are the ranks', the last is the rotation's."""
        # Each rank draws from a stream of its own, so that the roundings of ranks are independent and average out.
        # Every rank knows all keys: a receiver needs the sender's dither to decode.
        up = tuple(step_key(seed, step, rank + 1) for rank in range(ranks))
        return cls(seed, step, up, step_key(seed, step, 0), step_key(seed, step, 2**64 - 1))

    def node(self, hop: int, rank: int) -> Key:
        """Returns the key of the sums that a rank makes of codes at a hop: a stream of its own beyond the ranks'."""
        ranks = len(self.up)
        return step_key(self.seed, self.step, ranks * (hop + 1) + rank + 1)


class Reducer(ABC):
    """One piece of a flat tensor, made ready for a schedule of collectives.

    Attributes:
        scales: which scales the reducer can work with, ``"local"`` or ``"global"``; the first is what it usually has. A
            sum of codes needs one scale for all ranks.
        memories: the fields of a configuration that give it a memory that the reducer can keep.
        coders: how codes can be written.
        adds_codes: whether the codes of several ranks are added before they are decoded.
        owns_shards: whether a rank averages the messages of its own shard only, and remembers what belongs to that.
        divides_parameters: whether the coordinates of one parameter are encoded by several ranks.
        compresses: whether it quantises at all.
        float_bits: the numbers of bits, 16 or 32, of floating-point numbers that it averages; none: it averages codes.
        lengths_vary: whether the lengths of its messages depend on the gradients, so that they cannot be predicted.
        stays_when_uncompressed: whether what travels uncompressed takes this reducer's way, too; if not, it takes that
            of `two_shot`.
        needs_copy: whether `steps` changes its input in the compute dtype, so that it needs a copy of it.
        sent_bytes: bytes that each rank sends (in a ring, where the collective is one).
        message_bytes: bytes that one rank's coordinates take on the wire once; over the number of coordinates, this is
            the bits per coordinate, whatever the number of ranks. Of the latest step, if lengths vary.
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
        """Make ready for the blocks of a table, [blocks, COLUMNS]."""

    @staticmethod  # noqa: B027  # most reducers go with every codec
    def check(codec: Codec) -> None:
        """Raise ConfigError for a codec whose codes the reducer cannot work with."""

    @staticmethod  # noqa: B027  # most reducers go with every device
    def check_device(setting: Setting, device: torch.device) -> None:
        """Raise ConfigError for a setting that is not for tensors on a device."""

    @staticmethod
    @abstractmethod
    def stages(setting: Setting) -> int:
        """Returns the number of stages: the most times that `steps` yields."""

    @classmethod
    def scopes(cls, setting: Setting) -> list[tuple[Scope, ...]]:
        """Returns the scopes of the exchanges, stage by stage: at least two stages, for what travels uncompressed."""
        return [(ALL,)] * max(2, cls.stages(setting))

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns all that rank 0's work and messages depend on, besides the setting, in a piece of these blocks.

        Most pieces of a large model are alike, and a prediction (`predict.profile`) looks at one of them. A reducer
        without a memory whose work follows from a few sizes returns these.
        """
        return tuple(block_runs)

    @staticmethod
    @abstractmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns the predicted mean square error of the mean over ``ranks``, per coordinate, in units of the squared
        scale.

        All ranks are taken to have the same scale, which is also that of the mean (aligned gradients, the worst case).

        Raises:
            ConfigError: the codes of so many ranks cannot be added.
        """

    @abstractmethod
    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace the coordinates of ``x``, which the table counts from, by the mean over ranks; return the number of
        blocks that are not finite.

        Args:
            x: flat tensor; in the compute dtype and free to be changed, if the reducer needs a copy.
            rank: this rank.
            keys: keys of the step's random numbers.
            store: what this rank remembers; it is empty without a memory.
        """


class HasSteps(Protocol):
    """A `Reducer`, or another object with the same `steps`."""

    needs_copy: bool
    sent_bytes: int
    message_bytes: int

    def steps(self, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        """Replace ``x`` by the mean over ranks; see `Reducer.steps`."""
        ...


def reduced(reducer: HasSteps, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
    """Returns the steps of a reducer on ``x``, by way of a copy in the compute dtype if the reducer needs one."""
    if reducer.needs_copy:
        return _reduced_by_copy(reducer, x, rank, keys, store)
    return reducer.steps(x, rank, keys, store)


def _reduced_by_copy(reducer: HasSteps, x: Tensor, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
    # A memory or a rotation changes the input, in fp32 or fp64. In a 16-bit dtype each of these steps would round once
    # more.
    work = x.to(COMPUTE_DTYPES[x.dtype], copy=True)
    bad = yield from reducer.steps(work, rank, keys, store)
    # The mean of finite gradients has to stay finite: a cast to fp16 alone would make infinity of what is just too
    # large.
    x.copy_(in_finite_range(work, x.dtype))
    return bad


class WholeNumbers(Reducer):
    """A reducer that averages gradients of 32 bits as they are: nothing is quantised."""

    scales: ClassVar[tuple[str, ...]] = ()
    compresses: ClassVar[bool] = False
    float_bits: ClassVar[tuple[int, ...]] = (32,)
    stays_when_uncompressed: ClassVar[bool] = True
    needs_copy = False

    @classmethod
    def alike(cls, block_runs: Sequence[BlockRun], setting: Setting) -> Hashable:
        """Returns the number of coordinates; see `Reducer.alike`."""
        return sum(run.numel for run in block_runs)

    @staticmethod
    def mean_error(codec: Codec, ranks: int) -> float:
        """Returns 0: nothing is quantised. See `Reducer.mean_error`."""
        return 0.0


def side_by_side(*several: Steps) -> Steps:
    """Run the steps of several parts of a piece together, stage by stage; return the sum of their results."""
    result: Count = 0
    going = list(several)
    while going:
        exchanges: list[Exchange] = []
        # The parts share a stage, so their exchanges start together, in the order of the parts on every rank. A part
        # that has fewer stages than the others leaves early.
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
    """Returns the bytes of the scales that `link.Outgoing.share_scales` exchanges: of one rank's, and those that a rank
    sends.

    Args:
        blocks: number of blocks that have a scale in the exchange.
        setting: which scales there are, and of how many ranks.
    """
    rule = setting.scale_rule
    # Scales travel in the compute dtype: 8 bytes for fp64 gradients, 4 for all others.
    own = min(blocks, 1 if rule.per == "bucket" else blocks) * (8 if setting.dtype == torch.float64 else 4)
    return own, ring_bytes(own, setting.ranks) if rule.over_ranks == "max" else (setting.ranks - 1) * own


def gathered(message: Tensor, ranks: int) -> Generator[Sequence[Exchange], None, list[Tensor]]:
    """Send all ranks a message of any length; returns those of all ranks, by rank.

    On the wire, each is as long as the longest rank's.

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
    """Returns the bytes that each rank sends in a reduce-scatter and an all-gather of a message."""
    return 2 * (ranks - 1) * message_bytes // ranks


def run_virtual(steps: Sequence[Steps], *, only_first: bool = False) -> list[Count]:
    """Run one piece on virtual ranks in this process, in lock-step; return what each rank's steps returned.

    ``only_first``: once rank 0 has its result, which is that of all ranks, the other ranks' steps are not finished.
    """
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
            # An exchange is carried out once, at the first of its members; the others are served with it.
            for scope in dict.fromkeys(exchange.scope for exchange in exchanges):
                members = scope.members(first, len(pending))
                if members[0] == first:
                    theirs = [[exchange for exchange in pending[rank] if exchange.scope == scope] for rank in members]
                    for same in zip(*theirs, strict=True):
                        _exchange_virtually(same)
        pending = []
    return results


def _exchange_virtually(exchanges: Sequence[Exchange]) -> None:
    first, *others = exchanges
    if first.kind == "all_to_all":
        (_exchange_parts if first.splits else _exchange_equal_parts)(exchanges)
    elif first.kind == "all_gather":
        first.output.copy_(torch.stack([exchange.input for exchange in exchanges]).view_as(first.output))
        for other in others:  # one copy for all: n of them would take n² memory
            other.output.set_(first.output)  # type: ignore[call-overload]
    else:
        stacked = torch.stack([exchange.input for exchange in exchanges])
        result = stacked.amax(0) if first.kind == "max" else stacked.sum(0, dtype=stacked.dtype)
        for exchange in exchanges:
            exchange.output.copy_(result)


def _exchange_equal_parts(exchanges: Sequence[Exchange]) -> None:
    ranks = len(exchanges)
    sent = torch.stack([exchange.input.view(ranks, -1) for exchange in exchanges])
    for rank, exchange in enumerate(exchanges):
        exchange.output.view(ranks, -1).copy_(sent[:, rank])


def _exchange_parts(exchanges: Sequence[Exchange]) -> None:
    """Exchange parts of unequal sizes. Most of the n² parts are empty, and only the others are touched."""
    sent = {}
    for source, exchange in enumerate(exchanges):
        assert exchange.splits is not None
        for rank, start, length in _filled(exchange.splits[1]):
            sent[source, rank] = exchange.input.flatten()[start : start + length].clone()
    for rank, exchange in enumerate(exchanges):
        assert exchange.splits is not None
        for source, start, length in _filled(exchange.splits[0]):
            exchange.output.view(-1)[start : start + length] = sent[source, rank]


def _filled(split: list[int]) -> list[tuple[int, int, int]]:
    """Returns the number, start and length of the parts that are not empty."""
    starts = accumulate(split, initial=0)
    return [
        (number, start, length) for number, (start, length) in enumerate(zip(starts, split, strict=False)) if length
    ]
