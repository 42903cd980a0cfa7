"""Speed of encoding, reducing and decoding on a GPU, against a copy, casts to 16 bits and ordinary torch operations.

The command line is `benchmarks.kernels`. The stages are those of the reducer `two_shot` on one bucket: *encode* encodes
the whole bucket, *reduce* adds up one shard (a message of each rank), and *decode* decodes the mean of the bucket.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.report import Report, gpu_machine, slug
from benchmarks.roofline import Fact, save_figure
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import (
    LENGTH,
    Layout,
    Segment,
    pieces,
    place_by_owner,
    table_of,
    whole,
)
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.predict.timing import Case, Clock, EventClock, Spread, in_turns
from lightning_gqsgd.reducers import Setting, StepKeys
from lightning_gqsgd.wire.communicator import NCCL_PIECE_NUMEL

MEGABYTES = (1, 25, 100, 1000)
DTYPES = ("float32", "bfloat16")
#: Coordinates of a block of the ordinary torch operations, and what sizes of tensors are multiples of.
BLOCK = 256
STAGES = ("encode", "reduce", "decode")

CODECS = {
    "8 bit": GQSGDConfig(reducer="two_shot"),
    "4 bit": GQSGDConfig(bits=4, reducer="two_shot"),
    "2 bit": GQSGDConfig(bits=2, reducer="two_shot"),
    "8 bit exponential": GQSGDConfig(codec="exponential", mantissa=3, reducer="two_shot"),
    "8 bit rotated": GQSGDConfig(rotation=True, reducer="two_shot"),
}

#: Most bytes per coordinate that encoding, reducing and decoding may move together at 8 bits; reading the gradient and
#: writing the mean are included.
LIMITS = {"float32": 15.0, "bfloat16": 9.0}

#: Bytes per coordinate that the Global-QSGD authors' int8 pipeline moves in fp32, counted in their code (`ddphook.py`,
#: the standard hook, without the tree's clones, adds and receives): abs 8, max 4, division by the norm 8, random
#: numbers 4, stochastic rounding 12, cast to int8 5; cast back 5, product 8, copy into the bucket 8.
AUTHORS_BYTES = 62

#: All copies of a small bucket's buffers together are at least this many times the size of the L2 cache.
CACHES = 3
#: Bytes that a kernel reads of the table of tiles for a block of full length, see `kernels.cuda.tiles`.
ROW_BYTES = 24
#: Most copies that one timed run takes one after the other.
BURST = 16


@dataclass(frozen=True)
class Target:
    """The device that is measured, and how its work is timed.

    Attributes:
        device: the device of all tensors.
        clock: takes times of work on the device.
        synchronise: waits until the device has no work left.
        cache_bytes: size of the device's L2 cache in bytes.
    """

    device: torch.device
    clock: Clock
    synchronise: Callable[[], object]
    cache_bytes: int

    @classmethod
    def cuda(cls) -> Target:
        """The current CUDA device."""
        device = torch.device("cuda", torch.cuda.current_device())
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        return cls(device, EventClock(), partial(torch.cuda.synchronize, device), cache)


class Stage(NamedTuple):
    """Runs a stage on each copy of its buffers; knows how many bytes the stage moves on one copy."""

    runs: Sequence[Case]
    nbytes: float


class _Piece(NamedTuple):
    part: slice
    whole: Coding
    message: Tensor  # uint8 [message bytes]
    owned: Coding  # of a shard
    received: Tensor  # uint8 [ranks, shard bytes]
    shard: Tensor  # uint8 [shard bytes]


class Bucket:
    """The stages on one tensor, with their buffers.

    Args:
        x: the gradient, a flat tensor.
        out: the mean, a flat tensor like ``x``.
        layouts: the pieces, from `layouts_of`.
        setting: configuration, number of ranks and dtype.
    """

    def __init__(self, x: Tensor, out: Tensor, layouts: Sequence[tuple[slice, Layout]], setting: Setting) -> None:
        self._x, self._out = x, out
        self._kernels, self._keys = kernels_for(x.device), StepKeys.of(setting.seed, 0, setting.ranks)
        self._pieces = [self._piece(part, layout, setting) for part, layout in layouts]

    def encode(self) -> None:
        """Encode the whole tensor."""
        for piece in self._pieces:
            self._encode(piece, self._keys.up[0])

    def reduce(self) -> None:
        """Reduce one shard of each piece."""
        for piece in self._pieces:
            x, keys = self._x[piece.part], self._keys
            self._kernels.reduce(piece.received, piece.owned, x, keys.up, 0, piece.shard, keys.down)

    def decode(self) -> None:
        """Decode the whole tensor."""
        for piece in self._pieces:
            out, keys = self._out[piece.part], (self._keys.down,)
            self._kernels.decode(piece.message.view(1, -1), piece.whole, out, keys)

    def _encode(self, piece: _Piece, key: tuple[int, int]) -> None:
        self._kernels.encode(self._x[piece.part], piece.whole, piece.message, key)

    def _piece(self, part: slice, layout: Layout, setting: Setting) -> _Piece:
        empty = partial(torch.zeros, dtype=torch.uint8, device=self._x.device)
        q = setting.codec.quantiser(setting.block_size)
        whole = Coding(layout.blocks, q, self._keys.rotation if setting.rotates else None)
        made = _Piece(
            part,
            whole,
            empty(layout.message_bytes),
            whole._replace(blocks=layout.shard(0).blocks),
            empty(setting.ranks, layout.shard_bytes),
            empty(layout.shard_bytes),
        )
        for rank, key in enumerate(self._keys.up):
            self._encode(made, key)
            made.received[rank] = made.message[: layout.shard_bytes]
        return made


def layouts_of(numel: int, setting: Setting) -> list[tuple[slice, Layout]]:
    """The pieces of a bucket of one parameter, each with its part of the tensor."""
    size, start, placed = setting.block_size, 0, []
    q = setting.codec.quantiser(size)
    for piece in pieces(whole([Segment(0, numel, raw=False)], size), NCCL_PIECE_NUMEL, size):
        part = slice(start, start + sum(run.numel for run in piece))
        start = part.stop
        table = table_of(piece, size)
        placed.append((part, place_by_owner(table, q, shards=setting.ranks, **setting.record_sizes, striped=False)))
    return placed


def stage_bytes(layouts: Sequence[Layout], itemsize: int, ranks: int) -> dict[str, int]:
    """Bytes that each stage has to move, by stage: gradients, messages and block tables, read or written once.

    A reduction reads the coordinates of its own shard, and the messages of the other ranks.
    """
    gradient = sum(int(layout.blocks[:, LENGTH].sum()) for layout in layouts) * itemsize
    message = sum(layout.message_bytes for layout in layouts)
    row = ROW_BYTES
    whole = gradient + message + row * sum(len(layout.blocks) for layout in layouts)
    shards = [(layout.shard_bytes, layout.shard(0).blocks) for layout in layouts]
    reduced = sum(ranks * nbytes + itemsize * int(t[:, LENGTH].sum()) + row * len(t) for nbytes, t in shards)
    return {"encode": whole, "reduce": reduced, "decode": whole}


def cast_bytes(itemsize: int) -> dict[str, int]:
    """Bytes per coordinate of torch's fp16 and bf16 hooks: cast and division by the number of ranks; cast back."""
    return {"encode": itemsize + 2 + 4, "decode": 2 + itemsize}


class _Traffic(TorchDispatchMode):
    """Counts the bytes that each torch operation reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.nbytes += sum(leaf.nbytes for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor))
        return result


def traffic(work: Case) -> int:
    """Bytes that torch's operations in ``work`` read and write one after the other; views move none."""
    with _Traffic() as counted:
        work()
    return counted.nbytes


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Stochastic 8-bit codes and fp32 scales of blocks, in ordinary torch.

    The length of ``x`` is a multiple of `BLOCK`.
    """
    values = x.view(-1, BLOCK).float()
    scales = values.abs().amax(1, keepdim=True)
    codes = (values / scales * 127 + torch.rand(values.shape, device=x.device) + 128).floor().to(torch.uint8)
    return codes, scales


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The flat tensor that the codes and scales of `quantise` stand for."""
    return ((codes.float() - 128) * (scales / 127)).to(dtype).view(-1)


class _Cases:
    """All cases on one size and dtype.

    Each case has as many copies of its buffers as it takes to miss the L2 cache.
    """

    def __init__(self, target: Target, megabytes: float, dtype: torch.dtype, ranks: int) -> None:
        self.numel = max(1, round(megabytes * 1e6) // (dtype.itemsize * BLOCK)) * BLOCK
        self.stages: dict[tuple[str, str, str], Stage] = {}  # by case, family and name
        self._target, self._dtype, self._ranks = target, dtype, ranks
        nbytes = self.numel * dtype.itemsize
        copies = max(1, math.ceil(CACHES * target.cache_bytes / nbytes))
        generator = torch.Generator(target.device).manual_seed(0)
        self._xs = [torch.randn(self.numel, generator=generator, device=target.device).to(dtype) for _ in range(copies)]
        self._outs = [torch.empty_like(x) for x in self._xs]

    def add_copy(self) -> None:
        pairs = zip(self._xs, self._outs, strict=True)
        runs = [partial(out.copy_, x) for x, out in pairs]
        self.stages["copy_", "copy_", "copy_"] = Stage(runs, 2 * self.numel * self._dtype.itemsize)

    def add_codec(self, name: str, config: GQSGDConfig) -> None:
        setting = setting_of(config, self._ranks, self._dtype)
        layouts = layouts_of(self.numel, setting)
        nbytes = stage_bytes([layout for _, layout in layouts], self._dtype.itemsize, self._ranks)
        pairs = zip(self._xs, self._outs, strict=True)
        buckets = [Bucket(x, out, layouts, setting) for x, out in pairs]
        for stage in STAGES:
            self.stages[name, "gqsgd", stage] = Stage([getattr(entry, stage) for entry in buckets], nbytes[stage])

    def add_cast(self, to: torch.dtype) -> None:
        def compress(x: Tensor, small: Tensor) -> None:
            small.copy_(x).div_(self._ranks)

        smalls = [torch.empty_like(x, dtype=to) for x in self._xs]
        runs: dict[str, Sequence[Case]] = {
            "encode": [partial(compress, x, small) for x, small in zip(self._xs, smalls, strict=True)],
            "decode": [partial(out.copy_, small) for out, small in zip(self._outs, smalls, strict=True)],
        }
        for stage, nbytes in cast_bytes(self._dtype.itemsize).items():
            self.stages[f"{_short(to)} hook", "torch's hooks", stage] = Stage(runs[stage], nbytes * self.numel)

    def add_torch(self, *, compiled: bool) -> None:
        """Add the ordinary torch operations: one by one, or compiled."""
        there, back = quantise, dequantise
        coded = [quantise(x) for x in self._xs]
        sample = torch.ones(BLOCK, dtype=self._dtype)
        codes = quantise(sample)
        if compiled:
            torch._dynamo.reset()  # torch compiles for every size anew, and gives up after some sizes
            there, back = torch.compile(quantise, dynamic=False), torch.compile(dequantise, dynamic=False)
            moved = sample.nbytes + sum(entry.nbytes for entry in codes)
            nbytes = {"encode": moved, "decode": moved}
        else:
            nbytes = {
                "encode": traffic(partial(quantise, sample)),
                "decode": traffic(partial(dequantise, *codes, self._dtype)),
            }
        runs: dict[str, Sequence[Case]] = {
            "encode": [partial(there, x) for x in self._xs],
            "decode": [partial(back, *entry, self._dtype) for entry in coded],
        }
        name = "torch.compile" if compiled else "torch operations"
        for stage, of_block in nbytes.items():
            self.stages[name, name, stage] = Stage(runs[stage], of_block * self.numel / BLOCK)

    def seconds(self, rounds: int) -> dict[tuple[str, str, str], np.ndarray]:
        """Seconds of one copy of each stage, in every round."""
        burst = min(BURST, len(self._xs))
        turns = {key: partial(_some, itertools.cycle(stage.runs), burst) for key, stage in self.stages.items()}
        for turn in turns.values():
            turn()  # the first call compiles
        self._target.synchronise()
        names = {str(number): turn for number, turn in enumerate(turns.values())}
        times = in_turns(names, rounds, clock=self._target.clock)
        return {key: values / burst for key, values in zip(turns, times.values(), strict=True)}

    def host_seconds(self, case: str, rounds: int) -> dict[str, np.ndarray]:
        """Seconds in which the host issues each stage of a case after the stage before, in every round.

        The device is idle before the first stage.
        """
        stages = {stage: itertools.cycle(entry.runs) for (name, _, stage), entry in self.stages.items() if name == case}
        seconds = {stage: np.empty(rounds) for stage in stages}
        for number in range(-2, rounds):
            self._target.synchronise()
            for stage, runs in stages.items():
                run = next(runs)
                begun = time.perf_counter()
                run()
                if number >= 0:
                    seconds[stage][number] = time.perf_counter() - begun
        return seconds


def _some(runs: itertools.cycle[Case], count: int) -> None:
    for _ in range(count):
        next(runs)()


def facts_of(
    target: Target,
    megabytes: float,
    dtype: torch.dtype,
    *,
    ranks: int,
    rounds: int,
    codecs: Sequence[str] = tuple(CODECS),
) -> list[Fact]:
    """Measure all cases on one dtype and size, in 10^6 bytes, rounded down to whole blocks."""
    cases = _Cases(target, megabytes, dtype, ranks)
    cases.add_copy()
    for name in codecs:
        cases.add_codec(name, CODECS[name])
    for small in (torch.float16, torch.bfloat16):
        if small != dtype:
            cases.add_cast(small)
    for compiled in (False, True):
        cases.add_torch(compiled=compiled)
    seconds = cases.seconds(rounds)
    host = {case: cases.host_seconds(case, rounds) for case in dict.fromkeys(case for case, *_ in cases.stages)}
    size = (megabytes, _name(dtype), cases.numel)
    roof = ("copy_", "copy_", "copy_")
    facts = []
    for key, stage in cases.stages.items():
        case, family, name = key
        faster = Spread.of(seconds[roof] / seconds[key]).median
        share = faster * stage.nbytes / cases.stages[roof].nbytes
        median, issued = Spread.of(seconds[key]).median, Spread.of(host[case][name]).median
        facts.append(Fact(case, family, name, *size, median, stage.nbytes, share, issued))
    if dtype == torch.float32:
        bandwidth, moved = facts[0].nbytes / facts[0].seconds, AUTHORS_BYTES * cases.numel
        facts.append(Fact("Global-QSGD's code, counted", "Global-QSGD", "all", *size, moved / bandwidth, moved, 1.0))
    return facts


def row_of(facts: Sequence[Fact]) -> list[Any]:
    """A line of the table: all stages of a case on one size and dtype."""
    first, by_stage = facts[0], {fact.stage: fact for fact in facts}
    shown = [by_stage.get(stage) for stage in STAGES] if by_stage.keys() <= set(STAGES) else [first]

    def cell(number: Callable[[Fact], float | None], form: str) -> str:
        values = [None if fact is None else number(fact) for fact in shown]
        return " / ".join("–" if value is None else format(value, form) for value in values)

    host = [fact.host_seconds for fact in facts if fact.host_seconds is not None]
    return [
        first.case,
        f"{first.megabytes:g}",
        first.dtype,
        cell(lambda fact: 1e6 * fact.seconds, ".1f"),
        cell(lambda fact: fact.nbytes / fact.numel, ".2f"),
        sum(fact.nbytes for fact in facts) / first.numel,
        LIMITS.get(first.dtype) if first.family == "gqsgd" else None,
        cell(lambda fact: fact.nbytes / fact.seconds / 1e9, ".0f"),
        cell(lambda fact: fact.of_copy, ".2f"),
        cell(lambda fact: None if fact.host_seconds is None else 1e6 * fact.host_seconds, ".0f"),
        1e6 * sum(host) if host else None,
    ]


def measure(options: argparse.Namespace) -> Report:
    """Run all cases on all sizes of the command line."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"--device cuda: torch {torch.__version__} sees no CUDA device; run this on a machine with an NVIDIA GPU, "
            "its driver and a CUDA build of torch, or leave --device at cpu"
        )
    target = Target.cuda()
    facts = [
        fact
        for dtype in DTYPES
        for megabytes in options.megabytes
        for fact in facts_of(target, megabytes, getattr(torch, dtype), ranks=options.ranks, rounds=options.rounds)
    ]
    return report_of(facts, target, options.ranks, torch.cuda.get_device_name(target.device))


def report_of(facts: Sequence[Fact], target: Target, ranks: int, name: str) -> Report:
    """The table and the picture; ``name`` is the name of the device."""
    report = Report(
        f"kernels_{target.device.type}_{slug(name)}",
        f"Kernels on {name} against copy_, {ranks} ranks",
        {
            "case": "",
            "MB": "",
            "dtype": "",
            "time (us)": "",
            "bytes/coordinate": "",
            "together": ".2f",
            "limit": ".0f",
            "GB/s": "",
            "of copy_": "",
            "host (us)": "",
            "host, together (us)": ".0f",
        },
        notes=(
            f"Three numbers in a cell are of encode (the whole tensor), reduce (a shard: {ranks} messages of 1/{ranks} "
            f"of the tensor) and decode (the whole), as the reducer `two_shot` runs them, with the kernels "
            f"`{kernels_for(target.device).__name__.rpartition('.')[2]}`, pieces of up to {NCCL_PIECE_NUMEL:,} "
            f"coordinates and {'; '.join(described(facts))}; torch's operations have blocks of {BLOCK}. "
            "MB are 10^6 bytes of gradient.",
            "bytes/coordinate is a count: gradient and messages, read or written once, and 24 bytes of table per "
            "block; for torch's operations one by one, what each reads and writes; compiled, what goes in and comes "
            "out. GB/s is this count over the time; of copy_, its share of the copy's in the same round, median over "
            "rounds. limit: on encode, reduce and decode together.",
            f"Times are of CUDA events, cases in turns, median; the host issues a case while the device is still busy "
            f"with something else. Buffers are allocated beforehand, except in torch's operations, and exist so often "
            f"that all copies of a tensor are at least {CACHES} times the L2 cache of "
            f"{target.cache_bytes / 1e6:.0f} MB; a run takes up to {BURST} copies, and the next run others.",
            "host: time to issue the stages of one bucket after each other, the device idle before, nothing waited "
            "for; median after a warm-up.",
            "fp16 and bf16 hook: the casts of torch's compression hooks, with the division by the ranks, and back. "
            "torch operations: stochastic codes of 8 bits for blocks, written in torch. Global-QSGD's code was not "
            f"run: {AUTHORS_BYTES} bytes per fp32 coordinate, counted in it, at the copy's rate.",
        ),
        raw={"facts": [asdict(fact) for fact in facts]},
        machine=gpu_machine(target.device) if target.device.type == "cuda" else "",
        draw=lambda file: save_figure(facts, name, file),
    )
    for _, group in itertools.groupby(facts, lambda fact: (fact.dtype, fact.megabytes, fact.case)):
        report.rows.append(row_of(list(group)))
    return report


def described(facts: Sequence[Fact]) -> list[str]:
    """Returns the codes and the blocks of each codec that was measured, as the configuration has them."""
    names = dict.fromkeys(fact.case for fact in facts if fact.case in CODECS)
    configs = {name: CODECS[name] for name in names}
    return [f"{name}: {config.codec} codes in blocks of {config.block_size}" for name, config in configs.items()]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
