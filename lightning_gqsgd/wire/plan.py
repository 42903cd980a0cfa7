"""Plans: the pieces of one flat tensor, each with its reducer, built once and used in every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import FloatCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import COLUMNS, START, BlockRun, Segment, pieces, table_of, whole
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Origin
from lightning_gqsgd.reducers import Setting, StepKeys, Steps, reduced, run_virtual
from lightning_gqsgd.reducers.base import HasSteps
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.reducers.native import Native
from lightning_gqsgd.reducers.shards import AllGather, HierarchicalReduceScatter, ReduceScatter
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry, sampled

#: Fields of a `BlockRun`, by their places.
_PARAMETER = BlockRun._fields.index("parameter")
_FIRST = BlockRun._fields.index("first")
_BLOCKS = BlockRun._fields.index("blocks")
_NUMEL = BlockRun._fields.index("numel")

#: Creates the reducer of a piece from its block table and its setting.
_Make = Callable[[np.ndarray, Setting], HasSteps]

#: Steps after which an unused plan is dropped, if configurations take turns.
PLANS_KEPT = 100
#: Bytes that the plans of one engine take at most, if tensors have arbitrary sizes.
MAX_PLAN_BYTES = 64 << 20


def check_gradient(tensor: Tensor, what: str) -> None:
    """Raise ConfigError for a tensor that cannot be reduced."""
    if tensor.layout != torch.strided:
        raise ConfigError(
            f"{what} is sparse ({tensor.layout}); quantised all-reduce needs dense gradients: "
            "build the embedding with sparse=False, or keep this model on plain DDP"
        )
    check_dtype(tensor.dtype, what)


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise ConfigError for a dtype whose numbers cannot be averaged."""
    if dtype not in COMPUTE_DTYPES:
        names = ", ".join(map(str, COMPUTE_DTYPES))
        remedy = (
            "train torch.view_as_real of it, and apply torch.view_as_complex to that in the forward pass"
            if dtype.is_complex
            else "convert it first, e.g. by .float()"
        )
        raise ConfigError(f"{what} has dtype {dtype}; only floating-point tensors can be averaged: {names}; {remedy}")


def check_parameters(trained: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for parameters, by their names, that cannot be averaged together."""
    for name, parameter in trained.items():
        check_dtype(parameter.dtype, f"parameter {name!r}")
    devices = {parameter.device for parameter in trained.values()}
    if len(devices) > 1:
        raise ConfigError(f"the model's parameters are on several devices ({', '.join(map(str, devices))}); use one")


@dataclass
class _Piece:
    """A run of coordinates, and their reducer."""

    part: slice
    reducer: HasSteps


class _Shared:
    """The reducers of a piece of a `ShardPlan`. Pieces with equal arguments share them: a model of equal layers has few
    different ones. If each piece had its own block tables, these would take more memory than the gradients.

    Args:
        collective: see `ShardPlan.collective`.
        setting: the setting of the piece.
        rows: the runs of the piece in every part, see `_rows_from_origin`.
        distance: number of coordinates from the start of one part to the start of the next one.

    Attributes:
        reducer: works on the tensor from the piece's first coordinate on.
    """

    _all: ClassVar[weakref.WeakValueDictionary[Hashable, _Shared]] = weakref.WeakValueDictionary()

    def __init__(self, collective: _Make, setting: Setting, rows: np.ndarray, distance: int) -> None:
        self._collective = collective
        self._setting = setting
        self._rows = rows
        self.reducer = self._made(distance)

    @classmethod
    def of(cls, collective: _Make, setting: Setting, rows: np.ndarray, distance: int) -> _Shared:
        """Returns the object for these arguments, which is created if there is none."""
        key = (collective, setting, rows.shape, rows.tobytes(), distance)
        shared = cls._all.get(key)
        if shared is None:
            shared = cls._all[key] = cls(collective, setting, rows, distance)
        return shared

    @cached_property
    def alone(self) -> HasSteps:
        """The reducer that works on a tensor of the piece's coordinates alone."""
        return self._made(int(self._rows[0, :, _NUMEL].sum()))

    def _made(self, distance: int) -> HasSteps:
        return self._collective(_in_parts(self._rows, distance, self._setting.block_size), self._setting)


@dataclass
class _Columns(_Piece):
    """The same run of coordinates of every rank's part of a tensor.

    Attributes:
        origin: the origin of the block tables.
        shared: the reducers.
    """

    origin: Origin
    shared: _Shared


@dataclass
class _Run:
    """Consecutive segments that are reduced with one setting.

    Attributes:
        choice: number of the setting.
        first: number of the first segment.
        end: number of the first segment after the run.
        start: first coordinate.
        only_raw: whether no segment so far is quantised, so that any setting with codes fits.
    """

    choice: int
    first: int
    end: int
    start: int
    only_raw: bool


class Plan:
    """The pieces of a flat tensor.

    Args:
        segments: the parameters in the flat tensor, in order.
        setting: reducer, codec, number of ranks and dtype.
        *others: the settings of segments whose choice is 1, 2 and so on. All settings have the same seed and the same
            ``sample_every``. All coordinates of a piece have the same setting.

    Attributes:
        setting: see above.
        numel: number of coordinates.
        nbytes: approximate number of bytes that the tables of all pieces take. Tables that other plans share count.
    """

    def __init__(self, segments: Sequence[Segment], setting: Setting, *others: Setting) -> None:
        self.setting = setting
        self._settings = (setting, *others)
        self.numel = sum(segment.numel for segment in segments)
        self.nbytes = 0
        self._pieces = self._cut(segments)

    def starts(
        self,
        x: Tensor,
        rank: int,
        step: int,
        store: MemoryStore,
        counters: BucketCounters,
        telemetry: Telemetry,
    ) -> list[Callable[[], Steps]]:
        """Returns one function for each piece. The function starts the steps of the piece on ``x``. The steps count the
        bytes that they send.

        Args:
            x: flat tensor, [numel].
            rank: this rank.
            step: number of the step, and of its dither.
            store: the memory of this rank.
            counters: counters of the bucket.
            telemetry: counters of the process.
        """
        setting = self.setting
        ranks = setting.ranks
        # A native all-reduce draws no random numbers, and computing the keys of a new step takes time.
        keys = StepKeys.of(setting.seed, 0 if self.is_native else step, ranks)
        counters.calls += 1
        counters.numel += self.numel
        samples = setting.sample_every and step % setting.sample_every == 0

        def start(piece: _Piece) -> Steps:
            steps = self._steps(x, piece, rank, keys, store)
            if samples and piece.reducer.compresses:
                part = x.view(self.parts(ranks), -1)[:, piece.part]
                steps = sampled(steps, part, self._result(rank), ranks, telemetry)
            return _counted(steps, piece.reducer, counters)

        # Functions, not steps: a started piece allocates scratch memory, and the runner decides when it does.
        return [partial(start, piece) for piece in self._pieces]

    def average(
        self,
        gradients: Sequence[Tensor],
        step: int,
        stores: Sequence[MemoryStore],
        *,
        only_first: bool = False,
    ) -> int:
        """Replace the gradients of virtual ranks in this process by their mean; return the bytes that a rank sends.

        Args:
            gradients: a flat tensor for each rank, or for each of the first ranks; all other ranks send zeros.
            step: number of the step, and of its dither.
            stores: the memory of each of them.
            only_first: replace rank 0's gradient only, and leave the others in any state.
        """
        keys = StepKeys.of(self.setting.seed, step, self.setting.ranks)
        for piece in self._pieces:
            ranks = enumerate(zip(gradients, stores, strict=True))
            steps = [self._steps(x, piece, rank, keys, store) for rank, (x, store) in ranks]
            run_virtual(steps, self.setting.ranks, only_first=only_first)
        return self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends; see `reducers.base.Reducer`."""
        return sum(piece.reducer.sent_bytes for piece in self._pieces)

    @property
    def message_bytes(self) -> int:
        """Bytes that one rank's coordinates take on the wire once; see `reducers.base.Reducer`."""
        return sum(piece.reducer.message_bytes for piece in self._pieces)

    @cached_property
    def is_native(self) -> bool:
        """Whether the tensor is one piece that is reduced by the backend's own all-reduce."""
        is_native = all(setting.reducer is Native for setting in self._settings)
        return is_native and len(self._pieces) == 1

    @staticmethod
    def parts(ranks: int) -> int:
        """Returns into how many parts of equal segments a tensor is divided. After a step, part r holds the mean on
        rank r. An all-reduce has one part, whose mean all ranks hold."""
        return 1

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        made = []
        for run in _runs(segments, self._settings):
            setting = self._settings[run.choice]
            reducer = setting.reducer
            start = run.start
            for piece in pieces_of(segments[run.first : run.end], setting):
                # A reducer sees only its own piece, so the table counts coordinates from the start of the piece.
                table = table_of(piece, setting.block_size)
                self.nbytes += 3 * table.nbytes
                part = slice(start, start + sum(blocks.numel for blocks in piece))
                start = part.stop
                made.append(_Piece(part, reducer(table, setting)))
        return made

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        part = x if len(self._pieces) == 1 else x[piece.part]
        return reduced(piece.reducer, part, rank, keys, store)

    def _result(self, rank: int) -> slice:
        """Returns the parts of a piece that hold the mean on a rank."""
        return slice(None)


class ShardPlan(Plan):
    """The pieces of a flat tensor that has one part per rank, all of equal length.

    Each piece has the same coordinates of every part, so each rank sends equal shares of it to the others.

    Args:
        segments: the parameters' shards in the tensor, in order. All parts have the same number of segments, of the
            same sizes.
        setting, *others: as for `Plan`; the reducers of their configurations are ignored.
    """

    @staticmethod
    def collective(table: np.ndarray, setting: Setting) -> HasSteps:
        """Returns the reducer of a piece; ``table`` has the blocks of all parts, in rank order."""
        raise NotImplementedError

    @staticmethod
    def parts(ranks: int) -> int:
        return ranks

    def _cut(self, segments: Sequence[Segment]) -> list[_Piece]:
        each = len(segments) // self.setting.ranks
        numbers = np.array([segment.parameter for segment in segments], dtype=np.int64).reshape(-1, each)
        return [
            piece for run in _runs(segments[:each], self._settings) for piece in self._cut_run(segments, numbers, run)
        ]

    def _cut_run(self, segments: Sequence[Segment], numbers: np.ndarray, run: _Run) -> list[_Piece]:
        """Returns the pieces of a run of segments of each part; ``numbers`` has the numbers of the parameters in each
        part, [ranks, segments of a part]."""
        setting = self._settings[run.choice]
        ranks = setting.ranks
        share = self.numel // ranks
        # Parts differ in the numbers of their parameters only, so one is cut, with places instead of these numbers.
        cut = [segments[place]._replace(parameter=place) for place in range(run.first, run.end)]
        numel = max(1, setting.piece_size.within(ranks * sum(segment.numel for segment in cut)) // ranks)
        made: list[_Piece] = []
        start = run.start
        for blocks in _pieces_up_to(numel, cut, setting):
            columns = slice(start, start + sum(one.numel for one in blocks))
            start = columns.stop
            rows, origin = _rows_from_origin(blocks, numbers)
            shared = _Shared.of(self.collective, setting, rows, share)
            self.nbytes += 3 * 8 * COLUMNS * int(rows[:, :, _BLOCKS].sum())
            made.append(_Columns(columns, shared.reducer, origin, shared))
        return made

    def _steps(self, x: Tensor, piece: _Piece, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        assert isinstance(piece, _Columns)
        keys = replace(keys, origin=piece.origin)
        # Kernels for CPUs convert 16-bit coordinates from the first to the last block, with all that lies between.
        if piece.reducer.needs_copy or (x.device.type == "cpu" and COMPUTE_DTYPES[x.dtype] != x.dtype):
            return self._steps_on_copy(x, piece, rank, keys, store)
        return reduced(piece.reducer, x[piece.part.start :], rank, keys, store)

    def _steps_on_copy(self, x: Tensor, piece: _Columns, rank: int, keys: StepKeys, store: MemoryStore) -> Steps:
        parts = x.view(self.setting.ranks, -1)[:, piece.part]
        together = parts.reshape(-1)  # a copy, unless this is the only piece
        bad = yield from reduced(piece.shared.alone, together, rank, keys, store)
        if len(self._pieces) > 1:
            known = self._result(rank)
            parts[known] = together.view(parts.shape)[known]
        return bad

    @cached_property
    def is_native(self) -> bool:
        """Always False: an all-reduce is more than a rank needs."""
        return False


class ScatterPlan(ShardPlan):
    """The pieces of a flat tensor for a reduce-scatter: after a step, part r holds the mean on rank r. The contents of
    the other parts are undefined. It has two levels if the setting has."""

    @staticmethod
    def collective(table: np.ndarray, setting: Setting) -> HasSteps:
        return (ReduceScatter if setting.between is None else HierarchicalReduceScatter)(table, setting)

    def _result(self, rank: int) -> slice:
        return slice(rank, rank + 1)


class GatherPlan(ShardPlan):
    """The pieces of a flat tensor for an all-gather: before a step, rank r knows part r, and after the step, all ranks
    hold the same decoded values of all parts."""

    @staticmethod
    def collective(table: np.ndarray, setting: Setting) -> HasSteps:
        return AllGather(table, setting)


class Segments(tuple[Segment, ...]):
    """The segments of a flat tensor, whose hash is computed once.

    Every reduction looks for its plan by its segments, and the flat tensors of FSDP2 have some for each parameter and
    rank.
    """

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class PlanKey(NamedTuple):
    """The values that a plan depends on, apart from the engine."""

    configs: tuple[GQSGDConfig, ...]
    segments: tuple[Segment, ...]
    dtype: torch.dtype
    compressed: bool
    plan: type[Plan] = Plan


@dataclass
class _Cached:
    """A plan in the cache.

    Attributes:
        plan: the plan.
        step: the latest step that used it.
        use: the number of its latest use, counted over the uses of all plans.
    """

    plan: Plan
    step: int = 0
    use: int = 0


class PlanCache:
    """A cache of plans, by `PlanKey`.

    The tables of a plan are stored three times. Each copy takes half a byte per coordinate, with blocks of 128.
    """

    def __init__(self) -> None:
        self._plans: dict[PlanKey, _Cached] = {}
        self._uses = 0
        self._ends = (0, 0)  # numbers of the latest uses at the ends of the last two steps

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, key: PlanKey, step: int, make: Callable[[], Plan]) -> Plan:
        """Returns the plan of a key, which ``make`` creates if it is not in the cache; ``step`` is the step that uses
        the plan."""
        cached = self._plans.get(key)  # the only place where a bucket's key is hashed
        if cached is None:
            cached = self._plans[key] = _Cached(make())
        self._uses += 1
        cached.use = self._uses
        cached.step = step
        return cached.plan

    def drop_unused(self, since_step: int) -> None:
        """Forget the plans that were not used in step ``since_step`` or later."""
        for key in [key for key, cached in self._plans.items() if cached.step < since_step]:
            del self._plans[key]

    def trim(self) -> None:
        """Forget the least recently used plans, until the others take at most `MAX_PLAN_BYTES` bytes, or one is
        left."""
        self._trim(self._uses)

    def end_step(self) -> None:
        """Forget plans as `trim` does, but none that was used in this step or in the one before: the next step needs
        them again, and to make those of a large model takes seconds."""
        self._trim(self._ends[0] + 1)
        self._ends = (self._ends[1], self._uses)

    def _trim(self, kept_from: int) -> None:
        """Forget plans whose latest use has a smaller number than ``kept_from``, see `trim`."""
        total = sum(cached.plan.nbytes for cached in self._plans.values())
        for key, cached in sorted(self._plans.items(), key=lambda entry: entry[1].use):
            if total <= MAX_PLAN_BYTES or cached.use >= kept_from:
                return
            total -= cached.plan.nbytes
            del self._plans[key]

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()


def _runs(segments: Sequence[Segment], settings: Sequence[Setting]) -> list[_Run]:
    """Returns the longest runs of segments with one setting each.

    An uncompressed parameter is sent in the same way beside the codes of any setting, so it joins a neighbouring run.
    """
    runs: list[_Run] = []
    start = 0
    for number, segment in enumerate(segments):
        only_raw = segment.raw and _has_codes(settings[segment.choice])
        last = runs[-1] if runs else None
        if last is not None and (last.choice == segment.choice or _join(last, segment.choice, only_raw, settings)):
            last.choice = segment.choice if last.only_raw else last.choice
            last.end = number + 1
            last.only_raw = last.only_raw and only_raw
        else:
            runs.append(_Run(segment.choice, number, number + 1, start, only_raw))
        start += segment.numel
    return runs


def _join(run: _Run, choice: int, only_raw: bool, settings: Sequence[Setting]) -> bool:
    """Returns whether a segment of another choice can be reduced with a run, because one of the two is not
    quantised."""
    both = _has_codes(settings[run.choice]) and _has_codes(settings[choice])
    return both and (run.only_raw or only_raw)


def _has_codes(setting: Setting) -> bool:
    """Returns whether the setting quantises, so that uncompressed parameters are sent beside codes."""
    return not isinstance(setting.codec, FloatCodec)


def pieces_of(segments: Sequence[Segment], setting: Setting) -> list[list[BlockRun]]:
    """Returns the blocks of all pieces of consecutive segments that are reduced with one setting."""
    numel = sum(segment.numel for segment in segments)
    # The backend's own all-reduce gets the whole tensor, so that the result is bit-identical to DDP's.
    at_once = setting.piece_size.within(numel) if setting.reducer.compresses else max(1, numel)
    return _pieces_up_to(at_once, segments, setting)


def _pieces_up_to(numel: int, segments: Sequence[Segment], setting: Setting) -> list[list[BlockRun]]:
    """Returns the result of `pieces_of` for pieces of at most ``numel`` coordinates; see `layout.pieces`."""
    blocks = whole(segments, setting.block_size)
    if setting.scale_rule.per == "bucket":  # one scale, so one piece
        return [blocks] if blocks else []
    whole_parameters = setting.scale_rule.per == "parameter"
    return pieces(blocks, numel, setting.block_size, whole_parameters=whole_parameters)


def _counted(steps: Steps, reducer: HasSteps, counters: BucketCounters) -> Steps:
    result = yield from steps
    counters.add_sent(reducer.sent_bytes, reducer.message_bytes)
    return result


def _rows_from_origin(blocks: Sequence[BlockRun], numbers: np.ndarray) -> tuple[np.ndarray, Origin]:
    """Returns the runs of a piece in every part, counted from an origin, and the origin.

    Pieces of equal layers have equal runs then, and so have pieces within a large parameter.

    Args:
        blocks: the runs of one part, with places of parameters instead of their numbers.
        numbers: numbers of the parameters at all places, [ranks, places].

    Returns:
        rows: `BlockRun` as integers, int64 [ranks, runs, fields].
    """
    of_part = np.array(blocks, dtype=np.int64)
    rows = np.repeat(of_part[None], len(numbers), axis=0)
    rows[:, :, _PARAMETER] = numbers[:, of_part[:, _PARAMETER]]
    origin = Origin(int(rows[0, 0, _PARAMETER]), int(rows[0, 0, _FIRST]))
    rows[:, :, _PARAMETER] -= origin.parameter
    rows[:, :, _FIRST] -= origin.block
    return rows, origin


def _in_parts(rows: np.ndarray, distance: int, block_size: int) -> np.ndarray:
    """Returns the block table of runs in every part. Parts begin at distances of ``distance`` coordinates; see
    `_rows_from_origin`."""
    table = table_of([BlockRun(*row) for row in rows.reshape(-1, rows.shape[2]).tolist()], block_size)
    gap = distance - int(rows[0, :, _NUMEL].sum())
    table[:, START] += gap * np.repeat(np.arange(len(rows)), len(table) // len(rows))
    return table
