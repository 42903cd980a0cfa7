"""The kernels on a GPU give the bits of the readable ones on the CPU, without waiting and without scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import EdenCodec, ExponentialCodec, LinearCodec, TopKCodec
from lightning_gqsgd.codecs.top_k.sparsifier import Sparsifier
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels import cpu, kernels_for, reference
from lightning_gqsgd.kernels.layout import START, Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding, Quantiser
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES, Key, scale_format
from tests.gpu.card import CPU, DEVICE, difference, differences, is_waiting, keep_busy, marks, needs_card, synchronise
from tests.unit.test_kernels import DITHERS, DTYPES, KEYS, gradient, layout_of, norms, other_codecs, quantiser

pytestmark = [*marks, pytest.mark.usefixtures("triton_kernels")]

BLOCKS = (256, 64, 40, 16)
RAGGED = [(600, False), (37, True), (1, False), (513, False), (0, False), (255, False), (300, True), (1030, False)]
ALIGNED = [(4096, False), (8192, False), (1024, True), (12288, False)]


#: Too few bits for two ranks' codes.
NO_SUM = (2, "stochastic")


def _linear() -> list[Quantiser]:
    found = []
    for bits in range(1, 9):
        for dither in DITHERS:
            try:
                found.append(quantiser(bits, dither, 64))
            except ConfigError:  # one bit and stochastic rounding
                continue
    return found


def _label(value: Any) -> str | None:
    if hasattr(value, "kind"):
        name = f"{value.kind.name}-{value.bits}bit-b{value.block_size}"
        details = {"m": "mantissa", "k": "kept", "s": "stochastic_from", "n": "nearest"}
        numbers = {key: float(getattr(value, field, 0)) for key, field in details.items()}
        return name + "".join(f"-{key}{number:g}" for key, number in numbers.items() if number)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def _cases() -> list[tuple[Quantiser, torch.dtype]]:
    """Every codec in fp32, a few of each kind in every dtype, block sizes in turns: each is compiled for itself."""
    every = [*_linear(), *other_codecs()]
    cases = [(q, torch.float32) for q in every]
    few = [quantiser(bits, "adaptive", 64) for bits in (1, 3, 8)]
    few += [quantiser(4, "stochastic", 64), ExponentialCodec(8, 3).quantiser(64), ExponentialCodec(4).quantiser(64)]
    few += [TopKCodec(0.3).quantiser(64), LinearCodec(3, "nearest").quantiser(64)]
    cases += [(q, dtype) for q in few for dtype in DTYPES if dtype != torch.float32]
    sized = [(replace(q, block_size=BLOCKS[number % len(BLOCKS)]), dtype) for number, (q, dtype) in enumerate(cases)]
    eden = [(1, 256, torch.float32), (2, 128, torch.bfloat16), (3, 512, torch.float64), (4, 256, torch.float16)]
    return [*sized, *((EdenCodec(bits).quantiser(block), dtype) for bits, block, dtype in eden)]


def _segments(rows: list[tuple[int, bool]]) -> list[Segment]:
    return [Segment(100 * number + 7, numel, raw) for number, (numel, raw) in enumerate(rows)]


def _number(count: Any) -> Tensor:
    """What `decode` returns, an int or a 0-d tensor, to compare."""
    return torch.as_tensor(count).to(CPU, torch.int64)


def _all_stages(
    kernels: ModuleType, device: torch.device, segments: list[Segment], xs: list[Tensor], q: Quantiser, given: bool
) -> dict[str, Tensor]:
    """Messages, reduced shards and means of two shots and of a gather, by name."""
    ranks, dtype, found = len(xs), xs[0].dtype, {}
    keys, xs = KEYS[:ranks], [x.to(device) for x in xs]
    layout, whole = layout_of(segments, q, dtype, shards=ranks), layout_of(segments, q, dtype)
    for name, one in (("two shots", layout), ("gather", whole)):
        for rank, (x, key) in enumerate(zip(xs, keys, strict=True)):
            wire, blocks = torch.zeros(one.message_bytes, dtype=torch.uint8, device=device), one.blocks
            maxima = (norms(kernels, x, blocks),) if given else ()
            kernels.encode(x, Coding(blocks, q), wire, key, *maxima)
            found[f"{name}: message of rank {rank}"] = wire
    for rank in range(ranks):
        wires = [found[f"two shots: message of rank {source}"].view(ranks, -1)[rank] for source in range(ranks)]
        shard = torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=device)
        owned = layout.shard(rank).blocks
        kernels.reduce(torch.stack(wires), Coding(owned, q), xs[rank], keys, rank, shard, KEYS[3])
        found[f"two shots: shard {rank}"] = shard
    shards = torch.cat([found[f"two shots: shard {rank}"] for rank in range(ranks)])[None]
    messages = torch.stack([found[f"gather: message of rank {rank}"] for rank in range(ranks)])
    for name, wires, one, sources in (("two shots", shards, layout, KEYS[3:]), ("gather", messages, whole, keys)):
        mean = torch.zeros_like(xs[0])
        bad = kernels.decode(wires, Coding(one.blocks, q), mean, sources)
        found |= {f"{name}: mean": mean, f"{name}: non-finite blocks": _number(bad)}
    return found


def _check_all_stages(segments: list[Segment], xs: list[Tensor], q: Quantiser, given: bool) -> None:
    expected = _all_stages(reference, CPU, segments, xs, q, given)
    found = _all_stages(kernels_for(DEVICE), DEVICE, segments, xs, q, given)
    assert differences(found, expected) == {}


def test_the_fast_kernels_are_the_ones_in_use() -> None:
    assert kernels_for(DEVICE).__name__ == "lightning_gqsgd.kernels.cuda"


@pytest.mark.parametrize(("q", "dtype"), _cases(), ids=_label)
def test_the_bits_of_the_readable_kernels(q: Quantiser, dtype: torch.dtype) -> None:
    for seed, rows in enumerate((RAGGED, ALIGNED)):
        segments = _segments(rows)
        numel = sum(one.numel for one in segments)
        _check_all_stages(segments, [gradient(10 * seed + rank, numel, dtype) for rank in range(3)], q, given=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("q", [quantiser(4, "stochastic", 64), ExponentialCodec(5, 1).quantiser(64)], ids=_label)
def test_the_bits_under_given_scales(q: Quantiser, dtype: torch.dtype) -> None:
    segments = _segments(RAGGED)
    xs = [gradient(rank, sum(one.numel for one in segments), dtype) for rank in range(2)]
    _check_all_stages(segments, xs, q, given=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize(
    "q", [quantiser(8, "adaptive", 64), ExponentialCodec(8, 3).quantiser(64), TopKCodec(0.3).quantiser(64)], ids=_label
)
def test_numbers_that_are_not_finite(q: Quantiser, dtype: torch.dtype, bad: float) -> None:
    """In a coded block of one rank, and in an uncompressed one of another; the largest finite number in a third.

    Means are compared, not messages: which of many NaNs comes out of arithmetic differs between processors.
    """
    segments = _segments([(300, False), (70, True)])
    xs = [gradient(rank, 370, dtype) for rank in range(3)]
    xs[0][100], xs[1][333], xs[2][20] = bad, bad, torch.finfo(dtype).max
    expected = _all_stages(reference, CPU, segments, xs, q, given=False)
    found = _all_stages(kernels_for(DEVICE), DEVICE, segments, xs, q, given=False)
    names = [name for name in expected if name.endswith(("mean", "blocks"))]
    assert differences({n: found[n] for n in names}, {n: expected[n] for n in names}) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("value", [0.0, 1e-7, 1e-30, 6e4])
def test_constant_and_tiny_blocks(value: float, dtype: torch.dtype) -> None:
    segments = _segments([(200, False)])
    xs = [torch.full((200,), value * sign, dtype=torch.float64).to(dtype) for sign in (1, -1)]
    for q in (quantiser(8, "adaptive", 64), quantiser(1, "subtractive", 64), ExponentialCodec(4).quantiser(64)):
        _check_all_stages(segments, xs, q, given=False)


def _sums(kernels: ModuleType, device: torch.device, segments: list[Segment], xs: list[Tensor], q: Quantiser) -> Any:
    dtype, ranks, found = xs[0].dtype, len(xs), {}
    keys, xs, layout = KEYS[:ranks], [x.to(device) for x in xs], layout_of(segments, q, dtype)
    blocks = layout.blocks
    maxima = torch.stack([kernels.block_maxima(x, blocks) for x in xs]).amax(0)
    lane, wires = torch.uint8 if 8 % q.bits == 0 else torch.int64, []
    for rank, (x, key) in enumerate(zip(xs, keys, strict=True)):
        wires.append(torch.zeros(layout.message_bytes, dtype=torch.uint8, device=device))
        kernels.encode(x, Coding(blocks, q), wires[-1], key, maxima)
        found[f"message of rank {rank}"] = wires[-1]
    total = torch.stack([wire.view(lane) for wire in wires]).sum(0, dtype=lane).view(torch.uint8)
    mean = torch.full_like(xs[0], 7)
    bad = kernels.decode_sum(total, Coding(blocks, q), mean, keys, maxima)
    return {**found, "maxima": maxima, "mean": mean, "non-finite blocks": _number(bad)}


#: In fp32 all widths; in the other dtypes lanes in words and in bytes.
SUMMED = [(bits, dither, torch.float32) for bits in range(2, 9) for dither in DITHERS if (bits, dither) != NO_SUM]
SUMMED += [(bits, "adaptive", dtype) for bits in (3, 8) for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("bits", "dither", "dtype"), SUMMED, ids=_label)
def test_sums_of_codes(bits: int, dither: str, dtype: torch.dtype) -> None:
    ranks = 2 if bits < 4 else 3
    q = quantiser(bits, dither, BLOCKS[bits % len(BLOCKS)], summed=ranks)
    segments = _segments(RAGGED)
    xs = [gradient(rank, sum(one.numel for one in segments), dtype) for rank in range(ranks)]
    expected = _sums(reference, CPU, segments, xs, q)
    assert differences(_sums(kernels_for(DEVICE), DEVICE, segments, xs, q), expected) == {}


def _tree(kernels: ModuleType, device: torch.device, xs: list[Tensor], q: Quantiser) -> dict[str, Tensor]:
    """Two ranks' codes, their sum, and what that means."""
    xs = [x.to(device) for x in xs]
    layout = place(cut([Segment(3, xs[0].numel(), False)], q.block_size), q, shards=1, scale_bytes=0, raw_bytes=4)
    blocks = layout.blocks
    maxima = torch.stack([kernels.block_maxima(x, blocks) for x in xs]).amax(0)
    mine, theirs = (torch.zeros(layout.message_bytes, dtype=torch.uint8, device=device) for _ in xs)
    for x, key, wire in zip(xs, KEYS, (mine, theirs), strict=False):
        kernels.encode(x, Coding(blocks, q), wire, key, maxima)
    found = {"mine": mine.clone(), "theirs": theirs}
    kernels.combine(mine, theirs, Coding(blocks, q), KEYS[2])
    mean = torch.zeros_like(xs[0])
    bad = kernels.decode_sum(mine, Coding(blocks, q), mean, KEYS[:2], maxima)
    return {**found, "sum": mine, "mean": mean, "non-finite blocks": _number(bad)}


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("bits", [3, 5, 8])
def test_sums_of_exponential_codes(bits: int, dtype: torch.dtype) -> None:
    q = ExponentialCodec(bits).quantiser(BLOCKS[bits % len(BLOCKS)], summed=2)
    xs = [gradient(rank, 5000, dtype) for rank in range(2)]
    assert differences(_tree(kernels_for(DEVICE), DEVICE, xs, q), _tree(reference, CPU, xs, q)) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("block", BLOCKS)
def test_maxima_moments_and_rotations(block: int, dtype: torch.dtype) -> None:
    segments = _segments(RAGGED)
    x = gradient(0, sum(one.numel for one in segments), dtype)
    table = torch.from_numpy(cut(segments, block))

    def found(kernels: ModuleType, device: torch.device) -> dict[str, Tensor]:
        here, blocks = x.to(device), table.to(device)
        rotated = here.to(COMPUTE_DTYPES[dtype], copy=True)
        kernels.rotate(rotated, blocks, (3, 4), block)
        back = rotated.clone()
        kernels.rotate(back, blocks, (3, 4), block, inverse=True)
        maxima, moments = kernels.block_maxima(here, blocks), kernels.block_moments(here, blocks)
        return {"maxima": maxima, "moments": moments, "rotated": rotated, "rotated back": back}

    assert differences(found(kernels_for(DEVICE), DEVICE), found(reference, CPU)) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rows", [RAGGED, ALIGNED], ids=["ragged", "aligned"])
def test_a_rotation_on_the_way_is_one_before_and_one_after(rows: list, block: int, dtype: torch.dtype) -> None:
    q, segments, key, rotation = quantiser(8, "adaptive", block), _segments(rows), KEYS[0], (5, 2**32 - 3)
    x = gradient(0, sum(one.numel for one in segments), dtype)
    layout, compute = layout_of(segments, q, dtype), COMPUTE_DTYPES[dtype]
    expected, rotated = {}, x.to(compute, copy=True)
    reference.rotate(rotated, layout.blocks, rotation, block)
    expected["message"] = torch.zeros(layout.message_bytes, dtype=torch.uint8)
    reference.encode(rotated, Coding(layout.blocks, q), expected["message"], key)
    mean = torch.zeros(x.shape, dtype=compute)
    reference.decode(expected["message"][None], Coding(layout.blocks, q), mean, [key])
    reference.rotate(mean, layout.blocks, rotation, block, inverse=True)
    expected["mean"] = mean.to(dtype)

    kernels, blocks = kernels_for(DEVICE), layout.blocks
    wire = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.encode(x.to(DEVICE), Coding(blocks, q, rotation=rotation), wire, key)
    found = torch.zeros(x.shape, dtype=dtype, device=DEVICE)
    kernels.decode(wire[None], Coding(blocks, q, rotation=rotation), found, [key])
    assert differences({"message": wire, "mean": found}, expected) == {}


LARGE = [
    quantiser(8, "adaptive", 256),
    quantiser(4, "adaptive", 256),
    quantiser(3, "stochastic", 512),
    quantiser(1, "subtractive", 64),
    ExponentialCodec(8, 3).quantiser(256),
    TopKCodec(0.01).quantiser(4096),
    quantiser(8, "adaptive", 65536),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_label)
@pytest.mark.parametrize("q", LARGE, ids=_label)
@needs_card
def test_millions_of_coordinates(q: Quantiser, dtype: torch.dtype) -> None:
    segments = _segments([(3_000_001, False), (12_345, True), (4096 * 500, False), (77, False)])
    xs = [gradient(rank, sum(one.numel for one in segments), dtype) for rank in range(2)]
    expected = _all_stages(cpu, CPU, segments, xs, q, given=False)
    assert differences(_all_stages(kernels_for(DEVICE), DEVICE, segments, xs, q, given=False), expected) == {}


@pytest.mark.parametrize("dtype", DTYPES, ids=_label)
@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("q", [quantiser(8, "adaptive", 256), ExponentialCodec(4).quantiser(64)], ids=_label)
def test_a_tensor_that_begins_anywhere(q: Quantiser, offset: int, dtype: torch.dtype) -> None:
    """DDP's buckets and their pieces are views: only coordinates of a few bytes are aligned."""
    segments = _segments(ALIGNED)
    numel = sum(one.numel for one in segments)
    x, layout, kernels = gradient(0, numel, dtype), layout_of(segments, q, dtype), kernels_for(DEVICE)
    view = torch.zeros(numel + 20, dtype=dtype, device=DEVICE)[offset : offset + numel]
    view.copy_(x)
    wire = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.encode(view, Coding(layout.blocks, q), wire, KEYS[0])
    around = torch.full((numel + 20,), 7.0, dtype=dtype, device=DEVICE)
    kernels.decode(wire[None], Coding(layout.blocks, q), around[offset : offset + numel], [KEYS[0]])

    expected, mean = torch.zeros(layout.message_bytes, dtype=torch.uint8), torch.full((numel + 20,), 7.0, dtype=dtype)
    reference.encode(x, Coding(layout.blocks, q), expected, KEYS[0])
    reference.decode(expected[None], Coding(layout.blocks, q), mean[offset : offset + numel], [KEYS[0]])
    assert difference(wire, expected) == "", "the message"
    assert difference(around, mean) == "", "the mean, or what is around it"


@needs_card
def test_positions_beyond_31_bits() -> None:
    """Coordinates and bytes: the last blocks come out as they do alone on the CPU."""
    if torch.cuda.mem_get_info(DEVICE)[0] < 40 << 30:
        pytest.skip("needs 40 GB of free memory on the card")
    dtype, block, numel, tail = torch.bfloat16, 1024, (1 << 31) + (1 << 20) + 5, 1 << 20
    q, kernels, key = quantiser(8, "adaptive", block), kernels_for(DEVICE), KEYS[1]
    layout = layout_of([Segment(3, numel, False)], q, dtype)
    blocks = layout.blocks
    x = torch.randn(numel, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE, dtype=dtype)
    wire = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.encode(x, Coding(blocks, q), wire, key)
    y = torch.zeros_like(x)
    bad = kernels.decode(wire[None], Coding(blocks, q), y, [key])
    assert int(bad) == 0, f"{int(bad)} blocks are said not to be finite"

    for name, rows in {"first": slice(0, tail // block), "last": slice(len(blocks) - tail // block, None)}.items():
        table = layout.blocks[rows].numpy().copy()
        first, count = int(table[0, START]), int(table[:, 1].sum())
        table[:, START] -= first
        form = scale_format(dtype)
        alone = place(table, q, shards=1, scale_bytes=form.nbytes, raw_bytes=form.raw_bytes)
        part = x[first : first + count].cpu()
        message, expected = torch.zeros(alone.message_bytes, dtype=torch.uint8), torch.zeros_like(part)
        cpu.encode(part, Coding(alone.blocks, q), message, key)
        cpu.decode(message[None], Coding(alone.blocks, q), expected, [key])
        worst = float((y[first : first + count].cpu().double() - part.double()).abs().max())
        assert difference(y[first : first + count], expected) == "", f"{name} blocks; largest error {worst}"
        step = 2 * float(part.abs().max()) * (1 + 2**-7) / (q.levels - 1)
        assert worst <= step * (1 + 2**-7), f"{name} blocks: an error of {worst}, with steps of at most {step}"


class _Buffers:
    """A tensor of 2^25 coordinates, its messages and their tables on the card."""

    def __init__(self, q: Quantiser, dtype: torch.dtype) -> None:
        ranks, numel = 4, 1 << 25
        self.q, self.dtype = q, dtype
        self.layout = layout_of([Segment(0, numel, False)], q, dtype, shards=ranks)
        self.blocks, self.owned = self.layout.blocks, self.layout.shard(0).blocks
        self.x = torch.randn(numel, device=DEVICE).to(dtype)
        self.y = torch.zeros_like(self.x)
        self.wire = torch.zeros(self.layout.message_bytes, dtype=torch.uint8, device=DEVICE)
        self.wires = torch.zeros(ranks, self.layout.shard_bytes, dtype=torch.uint8, device=DEVICE)
        self.shard = torch.zeros(self.layout.shard_bytes, dtype=torch.uint8, device=DEVICE)
        self.ranks = ranks

    def stages(self, step: int, **rotation: Key) -> dict[str, Callable[[], object]]:
        """Each stage with keys that no earlier step had."""
        kernels, q = kernels_for(DEVICE), self.q
        keys, down = [(step, rank) for rank in range(self.ranks)], (step, 99)
        return {
            "encode": lambda: kernels.encode(self.x, Coding(self.blocks, q, **rotation), self.wire, keys[0]),
            "reduce": lambda: kernels.reduce(self.wires, Coding(self.owned, q), self.x, keys, 0, self.shard, down),
            "decode": lambda: kernels.decode(self.wire[None], Coding(self.blocks, q, **rotation), self.y, [down]),
        }


BUFFERED = [
    quantiser(8, "adaptive", 256),
    ExponentialCodec(8, 3).quantiser(256),
    TopKCodec(0.01).quantiser(4096),
    EdenCodec(2).quantiser(256),
]


@contextmanager
def _errors_where_the_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("q", BUFFERED, ids=_label)
@needs_card
def test_the_host_never_waits(q: Quantiser) -> None:
    buffers = _Buffers(q, torch.bfloat16)
    rotations: list[dict[str, Key]] = [{}] if isinstance(q, Sparsifier) else [{}, {"rotation": (1, 2)}]
    for rotation in rotations:
        for stage in buffers.stages(0, **rotation).values():
            stage()  # compiles
        synchronise()
        keep_busy()
        with _errors_where_the_host_waits():
            for name, stage in buffers.stages(1, **rotation).items():
                stage()
                assert is_waiting(), f"{name} came back only after the kernels before it had ended"
        synchronise()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=_label)
@pytest.mark.parametrize("q", BUFFERED, ids=_label)
@needs_card
def test_no_stage_takes_memory(q: Quantiser, dtype: torch.dtype) -> None:
    buffers, used = _Buffers(q, dtype), {}
    rotations: list[dict[str, Key]] = [{}] if isinstance(q, Sparsifier) else [{}, {"rotation": (1, 2)}]
    for rotation in rotations:
        for stage in buffers.stages(0, **rotation).values():
            stage()
        synchronise()
        for name, stage in buffers.stages(1, **rotation).items():
            torch.cuda.reset_peak_memory_stats(DEVICE)
            before = torch.cuda.memory_allocated(DEVICE)
            stage()
            synchronise()
            used[f"{name} {rotation}"] = torch.cuda.max_memory_allocated(DEVICE) - before
    limit = buffers.x.nbytes // 100
    too_much = {name: nbytes for name, nbytes in used.items() if nbytes >= limit}
    assert too_much == {}, f"bytes taken beside the buffers, at most {limit} are allowed"


@needs_card
def test_what_one_stream_encodes_another_decodes() -> None:
    """The keys that a stage needs on the card are there in every stream's own time."""
    q, kernels = quantiser(8, "adaptive", 256), kernels_for(DEVICE)
    buffers = _Buffers(q, torch.float32)
    here, there = torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE)
    synchronise()
    worst = []
    for step in range(3):
        with torch.cuda.stream(here):
            keep_busy()
            kernels.encode(buffers.x, Coding(buffers.blocks, q), buffers.wire, (step, 1))
        there.wait_stream(here)
        with torch.cuda.stream(there):
            kernels.decode(buffers.wire[None], Coding(buffers.blocks, q), buffers.y, [(step, 1)])
        here.wait_stream(there)
        synchronise()
        worst.append(float((buffers.y - buffers.x).abs().max()))
    step_of_codes = 2 * float(buffers.x.abs().max()) * (1 + 2**-7) / (q.levels - 1)
    assert max(worst) <= step_of_codes, f"errors of {worst}, more than a step: other keys, or decoded too early"
