"""Records a reducer's computation and messages, stage by stage, by running its `steps` on tensors without data.

Reducers are not described a second time here. `profile_of` runs a reducer's `steps` on torch's device "meta", where a
tensor has a size but no memory. Between two yields, it records the kernels that were called (`kernels.meta`), the bytes
that PyTorch's own operations would touch, and the requested exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import BlockRun, Segment, table_of
from lightning_gqsgd.kernels.meta import Work, note, noting
from lightning_gqsgd.predict.costs import BF16_HOOK
from lightning_gqsgd.predict.timeline import NUMBERS
from lightning_gqsgd.reducers import REDUCERS, Setting, StepKeys, new_store, reduced
from lightning_gqsgd.reducers.base import Exchange, Scope, Steps, ring_bytes
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.wire.agreement import Stamp, StampCheck
from lightning_gqsgd.wire.plan import Plan, pieces_of
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry

META = torch.device("meta")


class Message(NamedTuple):
    """A collective, described by the data that one rank sends in it.

    Attributes:
        kind: ``"all_to_all"``, ``"all_gather"``, ``"max"``, or ``"sum"`` with the dtype, e.g. ``"sum/float32"``.
        sent_bytes: bytes that a rank sends to other ranks; in a ring, if the collective is one.
        scope: the ranks that take part, see `reducers.base.Scope`.
        members: number of ranks that take part.
    """

    kind: str
    sent_bytes: int
    scope: Scope
    members: int


class Stage(NamedTuple):
    """Work, and the collectives that start when the work is done."""

    works: tuple[Work, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Profile:
    """The work and the messages of one piece, or of a bunch of pieces together (see `bunches`).

    Attributes:
        stages: from the first stage to the last one.
        last: the work after the last exchange.
        is_agreement: whether the piece compares stamps and no piece waits for it.
        count: number of pieces.
    """

    stages: tuple[Stage, ...]
    last: tuple[Work, ...]
    is_agreement: bool = False
    count: int = 1

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends."""
        return sum(message.sent_bytes for stage in self.stages for message in stage.messages)

    @property
    def node_bytes(self) -> int:
        """Bytes that a rank sends in collectives between the ranks of its node."""
        messages = (message for stage in self.stages for message in stage.messages)
        return sum(message.sent_bytes for message in messages if message.scope.kind == "node")


def profile_of(start: Callable[[], Steps], ranks: int, *, is_agreement: bool = False) -> Profile:
    """Returns the profile of the steps of rank 0 that a function starts."""
    stages = []
    with noting() as works, _Traffic(), closing(start()) as steps:
        while True:
            try:
                exchanges = next(steps)
            except StopIteration:
                break
            needed = [exchange for exchange in exchanges if exchange.input.numel() or exchange.splits]
            stages.append(Stage(tuple(works), tuple(message_of(exchange, 0, ranks) for exchange in needed)))
            works.clear()
            if is_agreement:
                break  # the next step reads numbers, which do not exist on "meta"
        return Profile(tuple(stages), tuple(works), is_agreement)


@lru_cache(maxsize=1 << 14)
def bucket_profiles(setting: Setting, segments: tuple[Segment, ...], *, by_shape: bool = False) -> tuple[Profile, ...]:
    """Returns the profiles of a bucket's pieces.

    Args:
        setting: reducer, codec, dtype and number of ranks. All ranks are assumed to be like rank 0.
        segments: the parameters in the bucket.
        by_shape: whether pieces count as equal whatever their places in their parameters are, see `timeline.NUMBERS`.
            Rank 0's shard may then have a block more or fewer. A piece takes a millisecond to look at if there are
            thousands of ranks.

    Raises:
        ConfigError: if the length of messages depends on the gradients (Elias codes, and the reducer ``"lossless"``).
    """
    if setting.coder == "elias":
        raise ConfigError("coder='elias' has messages whose length depends on the gradients; predict coder='fixed'")
    if setting.reducer.lengths_vary:
        name = next(name for name, kind in REDUCERS.items() if kind is setting.reducer)
        raise ConfigError(
            f"reducer={name!r} has messages whose length depends on the gradients; predict reducer='native'"
        )
    setting = replace(setting, sample_every=0)
    if not setting.reducer.compresses:
        # A bucket is one piece, of which only the size counts. A table of its blocks would have millions of rows.
        setting = replace(setting, block_size=max(1, sum(segment.numel for segment in segments)))
    if setting.remembers or setting.scale_rule.per != "block":
        return _profiles_of_plan(segments, setting)
    alike = _alike_by_shape if by_shape else setting.reducer.alike
    pieces = (_Piece(setting, alike(blocks, setting), tuple(blocks)) for blocks in pieces_of(segments, setting))
    return tuple(map(_of_piece, pieces))


@dataclass(frozen=True)
class _Piece:
    """A piece. It compares equal to every piece whose reducer does the same computation and sends the same messages.

    Attributes:
        setting: the setting of its reducer.
        alike: see `reducers.base.Reducer.alike`.
        blocks: its blocks.
    """

    setting: Setting
    alike: Hashable
    blocks: tuple[BlockRun, ...] = field(compare=False)


def _alike_by_shape(blocks: Sequence[BlockRun], setting: Setting) -> Hashable:
    """Returns the result of `reducers.base.Reducer.alike` for a piece at the start of parameters with small numbers."""
    return _alike_at_start(setting, tuple(run._replace(first=0, parameter=run.parameter % NUMBERS) for run in blocks))


@lru_cache(maxsize=1 << 14)
def _alike_at_start(setting: Setting, blocks: tuple[BlockRun, ...]) -> Hashable:
    return setting.reducer.alike(blocks, setting)


@lru_cache(maxsize=1 << 14)
def _of_piece(piece: _Piece) -> Profile:
    """Returns the profile of a piece and of all equal pieces."""
    setting = piece.setting
    reducer = setting.reducer(table_of(piece.blocks, setting.block_size), setting)
    x = torch.empty(sum(run.numel for run in piece.blocks), dtype=setting.dtype, device=META)
    store = new_store(setting, {}, META)
    start = partial(reduced, reducer, x, 0, StepKeys.of(setting.seed, 0, setting.ranks), store)
    return profile_of(start, setting.ranks)


def _profiles_of_plan(segments: Sequence[Segment], setting: Setting) -> tuple[Profile, ...]:
    """Returns the result of `bucket_profiles`, computed from the bucket's whole plan.

    The memories of pieces, and scales of whole parameters, depend on the parameters, so no two pieces are equal.
    """
    store = new_store(setting, {segment.parameter: segment.numel for segment in segments}, META)
    return plan_profiles(Plan(segments, setting), store)


def plan_profiles(plan: Plan, store: MemoryStore | None = None) -> tuple[Profile, ...]:
    """Returns the profiles of the pieces of a plan; ``store`` is the memory of its rank, None if it has none."""
    setting = plan.setting
    x = torch.empty(plan.numel, dtype=setting.dtype, device=META)
    memory = new_store(setting, {}, META) if store is None else store
    starts = plan.starts(x, 0, 1, memory, BucketCounters(), Telemetry())
    return tuple(profile_of(start, setting.ranks) for start in starts)


def stamp_profile(ranks: int) -> Profile:
    """Returns the profile of the comparison of stamps that every step has."""
    steps = partial(StampCheck(range(ranks), torch.device("cpu")).steps, Stamp(0, 0, 0))
    return profile_of(steps, ranks, is_agreement=True)


@lru_cache(maxsize=1 << 14)
def bf16_hook_profile(numel: int, ranks: int) -> Profile:
    """Returns the profile of torch's ``bf16_compress_hook`` on a bucket of fp32 gradients."""

    def steps() -> Steps:
        note(Work("encode", BF16_HOOK, numel))
        yield (Exchange.in_place("sum", torch.empty(numel, dtype=torch.bfloat16, device=META)),)
        note(Work("decode", BF16_HOOK, numel))
        return 0

    return profile_of(steps, ranks)


def message_of(exchange: Exchange, rank: int, ranks: int) -> Message:
    """Returns the message of an exchange of ``rank``, one of ``ranks``."""
    members = exchange.scope.members(rank, ranks)
    count = len(members)
    nbytes = exchange.input.nbytes
    kind = exchange.kind
    if kind == "all_to_all" and exchange.splits is not None:
        others = sum(exchange.splits[1]) - exchange.splits[1][members.index(rank)]
        sent = others * exchange.input.itemsize
    elif kind == "all_to_all":
        sent = nbytes * (count - 1) // count
    elif kind == "all_gather":
        sent = nbytes * (count - 1)
    else:
        sent = ring_bytes(nbytes, count)
        if kind == "sum":
            kind += "/" + str(exchange.input.dtype).removeprefix("torch.")
    return Message(kind, sent, exchange.scope, count)


class _Traffic(TorchDispatchMode):
    """Records the bytes that PyTorch's operations on tensors without data would read and write."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Prevent PyTorch from loading its compiler for this class, which takes a second. Nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if read and written and all(tensor.device == META for tensor in read) and not _is_free(func):
            note(Work("torch", nbytes=sum(tensor.nbytes for tensor in [*read, *written])))
        return result


def _is_free(func: Any) -> bool:
    """Returns whether an operation touches no memory: if it returns a view of its input, or an uninitialised tensor."""
    if "empty" in func._schema.name:
        return True
    infos = [value.alias_info for value in func._schema.returns]
    return any(info is not None and not info.is_write for info in infos)
