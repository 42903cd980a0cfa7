"""The fast kernels against the readable ones, and both against the contract at the edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gqsgd.codecs import CODECS, Codec, CompandedCodec, ExponentialCodec, LinearCodec, SignCodec, TopKCodec
from lightning_gqsgd.codecs.top_k.sparsifier import Sparsifier
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.dither import uniform
from lightning_gqsgd.kernels.layout import INDEX, LENGTH, PARAMETER, RAW, START, Layout, Segment, cut, place
from lightning_gqsgd.kernels.packing import unpack
from lightning_gqsgd.kernels.protocol import Coding, Quantiser
from lightning_gqsgd.kernels.wire import Origin, scale_format

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
KEYS = [(11, 5), (2**32 - 1, 2**31), (0, 0), (7, 1234567)]
BOTH = [reference, cpu]
DITHERS = ["adaptive", "subtractive", "stochastic"]


#: Codecs whose kernels have tests of their own, beside linear with dither: their blocks are powers of two, or they have
#: no kernels.
ELSEWHERE = {"eden", "trellis", "dct_top_k", "float"}


def named_codecs() -> list[Codec]:
    """One of each kind that is named here, beside linear with dither."""
    codecs: list[Codec] = [SignCodec(), TopKCodec(0.01), TopKCodec(0.3), LinearCodec(3, "nearest")]
    codecs += [ExponentialCodec(bits, mantissa) for bits in (2, 4, 5, 8) for mantissa in (0, 1, 3)]
    codecs += [ExponentialCodec(5, 0, most=8), LinearCodec(4, "stochastic", most=4)]
    codecs.append(CompandedCodec(4))
    return codecs


def new_codecs() -> list[Codec]:
    """Every codec that tests of kernels do not name, at its default bits."""
    named = {codec.name for codec in named_codecs()} | ELSEWHERE
    return [kind.of(kind.default_bits) for name, kind in CODECS.items() if name not in named]


def other_codecs() -> list[Quantiser]:
    """One of each kind beside linear with dither."""
    return [codec.quantiser(64) for codec in (*named_codecs(), *new_codecs())]


def test_a_codec_that_no_test_names_is_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class New(ExponentialCodec):
        name = "new"

    monkeypatch.setitem(CODECS, "new", New)
    assert New(8) in new_codecs()
    assert New(8).quantiser(64) in other_codecs()


def quantiser(bits: int, dither: str, block: int, summed: int = 0) -> Quantiser:
    return LinearCodec(bits, dither).quantiser(block, summed or None)


def layout_of(segments: list[Segment], q: Quantiser, dtype: torch.dtype, shards: int = 1) -> Layout:
    form = scale_format(dtype)
    table = cut(segments, q.block_size)
    table = table[table[:, RAW] == 0] if q.summable else table
    return place(
        table,
        q,
        shards=shards,
        scale_bytes=0 if q.summable or isinstance(q, Sparsifier) else form.nbytes,
        raw_bytes=form.raw_bytes,
    )


def message(
    kernels, x: Tensor, layout: Layout, key: tuple[int, int], q: Quantiser, *maxima: Tensor, **rotation
) -> Tensor:
    wire = torch.zeros(layout.message_bytes, dtype=torch.uint8)
    kernels.encode(x, Coding(layout.blocks, q, **rotation), wire, key, *maxima)
    return wire


def there_and_back(
    kernels, x: Tensor, q: Quantiser, key: tuple[int, int] = (1, 2), *, raw: bool = False
) -> tuple[Tensor, int]:
    """A gradient after encoding and decoding, and the number of blocks that are not finite."""
    layout = layout_of([Segment(0, len(x), raw)], q, x.dtype)
    y = torch.full_like(x, 7)
    bad = kernels.decode(message(kernels, x, layout, key, q)[None], Coding(layout.blocks, q), y, [key])
    return y, int(bad)


def codes_of(kernels, x: Tensor, q: Quantiser) -> list[int]:
    """The code of each coordinate of a gradient."""
    layout = layout_of([Segment(0, len(x), False)], q, x.dtype)
    codes = unpack(message(kernels, x, layout, (1, 2), q), layout.blocks, q.bits, q.block_size, summable=False)
    return codes[torch.arange(q.block_size)[None] < layout.blocks[:, LENGTH, None]].tolist()


def gradient(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Runs of very different size, with zeros, some of them mostly zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64)
    scale = 10.0 ** torch.randint(-12, 4, (numel // 50 + 1,), generator=generator, dtype=torch.float64)
    x = x * scale.repeat_interleave(50)[:numel]
    zeros = torch.tensor([0.0, 0.2, 0.7, 0.95])[torch.randint(4, (numel // 200 + 1,), generator=generator)]
    x[torch.rand(numel, generator=generator) < zeros.repeat_interleave(200)[:numel]] = 0
    return x.to(dtype)


cases = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "dtype": st.sampled_from(DTYPES),
        "bits": st.integers(1, 8),
        "dither": st.sampled_from(DITHERS),
        "block": st.sampled_from([16, 40, 64, 256]),
        "ranks": st.integers(1, 4),
        "rows": st.lists(st.tuples(st.integers(0, 600), st.booleans()), min_size=1, max_size=5),
    }
)


def drawn(case: dict) -> tuple[list[Segment], list[torch.Tensor]]:
    """The segments of a case, and every rank's gradient."""
    segments = [Segment(100 * number, numel, raw) for number, (numel, raw) in enumerate(case["rows"])]
    numel = sum(segment.numel for segment in segments)
    return segments, [gradient(case["seed"] + rank, numel, case["dtype"]) for rank in range(case["ranks"])]


@pytest.mark.parametrize("rotation", [{}, {"rotation": (3, 4)}], ids=["as they are", "rotated"])
@settings(max_examples=40)
@given(case=cases)
def test_both_kernels_give_the_same_bits(case: dict, rotation: dict) -> None:
    segments, xs = drawn(case)
    try:
        q = quantiser(case["bits"], case["dither"], case["block"])
    except ConfigError:
        return
    check_messages(segments, xs, q, **rotation)


@settings(max_examples=40)
@given(cases, st.sampled_from(other_codecs()), st.booleans())
def test_both_kernels_give_the_same_bits_with_every_codec(case: dict, q: Quantiser, given_scales: bool) -> None:
    segments, xs = drawn(case)
    check_messages(segments, xs, q, norms if given_scales else None)


def norms(kernels, x: Tensor, blocks: Tensor) -> Tensor:
    """Scales below the largest magnitude, in the wire's format."""
    form = scale_format(x.dtype)
    maxima = kernels.block_maxima(x, blocks) >> form.shift
    return (maxima - 1).clamp(min=0) << form.shift


def from_origin(kernels, blocks: Tensor) -> tuple[Tensor, Origin]:
    """A table and its origin, which is another one for the readable kernels than for the fast ones."""
    origin = Origin(2**31 + 3, 1000) if kernels is not reference else Origin(1, 2)
    counted = blocks.clone()
    counted[:, PARAMETER] -= origin.parameter
    counted[:, INDEX] -= origin.block
    return counted, origin


def check_messages(segments: list[Segment], xs: list[Tensor], q: Quantiser, scales=None, both=BOTH, **rotation) -> None:
    """Encode, reduce, decode, with both kernels. ``rotation``: a key, if blocks are to be rotated."""
    ranks, dtype = len(xs), xs[0].dtype
    keys = KEYS[:ranks]
    results = []
    for kernels in both:
        layout = layout_of(segments, q, dtype, shards=ranks)
        maxima = [() if scales is None else (scales(kernels, x, layout.blocks),) for x in xs]
        wires = [
            message(kernels, x, layout, key, q, *m, **rotation) for x, key, m in zip(xs, keys, maxima, strict=True)
        ]
        shards = []
        for rank in range(ranks):
            received = torch.stack([wire.view(ranks, -1)[rank] for wire in wires])
            shards.append(torch.zeros(layout.shard_bytes, dtype=torch.uint8))
            how = Coding(layout.shard(rank).blocks, q, **rotation)
            kernels.reduce(received, how, xs[rank], keys, rank, shards[-1], KEYS[3])
        two_shot, gathered = torch.zeros_like(xs[0]), torch.zeros_like(xs[0])
        bad = kernels.decode(torch.cat(shards)[None], Coding(layout.blocks, q, **rotation), two_shot, KEYS[3:])
        whole = layout_of(segments, q, dtype)
        wires += [
            message(kernels, x, whole, key, q, *m, **rotation) for x, key, m in zip(xs, keys, maxima, strict=True)
        ]
        counted, origin = from_origin(kernels, whole.blocks)
        how = Coding(counted, q, origin=origin, **rotation)
        again = torch.zeros_like(wires[ranks])
        kernels.encode(xs[0], how, again, keys[0], *maxima[0])
        assert torch.equal(again, wires[ranks])
        bad += kernels.decode(torch.stack(wires[ranks:]), how, gathered, keys)
        scattered = xs[-1].clone()
        bad += kernels.decode(torch.stack(wires[ranks:]), how, scattered, keys, own=ranks - 1)
        assert bad == 0
        results.append([*wires, *shards, two_shot, gathered, scattered])
    assert all(torch.equal(slow, fast) for slow, fast in zip(*results, strict=True))


def test_a_rotation_within_encoding_is_that_of_rotate() -> None:
    for kernels in BOTH:
        q, x = quantiser(8, "subtractive", 64), torch.randn(300)
        layout = layout_of([Segment(0, 250, False), Segment(1, 50, True)], q, x.dtype)
        rotated = x.clone()
        kernels.rotate(rotated, layout.blocks, (3, 4), 64)
        wire = message(kernels, x, layout, (1, 2), q, rotation=(3, 4))
        assert torch.equal(wire, message(kernels, rotated, layout, (1, 2), q))
        y, z = torch.zeros(300), torch.zeros(300)
        kernels.decode(wire[None], Coding(layout.blocks, q, rotation=(3, 4)), y, [(1, 2)])
        kernels.decode(wire[None], Coding(layout.blocks, q), z, [(1, 2)])
        kernels.rotate(z, layout.blocks, (3, 4), 64, inverse=True)
        assert torch.equal(y, z)


@settings(max_examples=50)
@given(cases)
def test_both_kernels_give_the_same_sums(case: dict) -> None:
    check_sums(case)


def check_sums(case: dict, both=BOTH) -> None:
    """Sums of codes, with both kernels."""
    dtype, ranks = case["dtype"], case["ranks"]
    segments, xs = drawn(case)
    keys = KEYS[:ranks]
    try:
        q = quantiser(case["bits"], case["dither"], case["block"], summed=ranks)
    except ConfigError:
        return
    results = []
    for kernels in both:
        layout = layout_of(segments, q, dtype)
        maxima = torch.stack([kernels.block_maxima(x, layout.blocks) for x in xs]).amax(0)
        lane = torch.uint8 if 8 % q.bits == 0 else torch.int64
        wires = [message(kernels, x, layout, key, q, maxima) for x, key in zip(xs, keys, strict=True)]
        total = torch.stack([wire.view(lane) for wire in wires]).sum(0, dtype=lane).view(torch.uint8)
        mean = torch.full_like(xs[0], 7)
        assert kernels.decode_sum(total, Coding(layout.blocks, q), mean, keys, maxima) == 0
        untouched = torch.cat([torch.full((s.numel,), s.raw) for s in segments])
        assert (mean[untouched] == 7).all()
        results.append([*wires, mean])
    assert all(torch.equal(slow, fast) for slow, fast in zip(*results, strict=True))


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dither", DITHERS)
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("largest", [1.0, 3.1415, 1e-30, 1.5e38, 1e-40, 6e-8])
def test_every_coordinate_is_within_a_step(kernels, dither: str, bits: int, largest: float) -> None:
    if bits == 1 and dither == "stochastic":
        pytest.skip("refused by GQSGDConfig")
    q = quantiser(bits, dither, 256)
    x = torch.linspace(-1, 1, 1000) * largest
    y, _ = there_and_back(kernels, x, q)
    step = 2 * max(largest, 2.0**-118) * (1 + 2**-7) / (q.levels - 1)
    worst = float((y.double() - x.double()).abs().max())
    assert worst <= step * (0.5 if dither == "subtractive" else 1.0) * (1 + 1e-5)


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_levels_are_used_and_none_is_passed(kernels, dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, -1.0] * 2000, dtype=dtype)
    for bits in range(1, 9):
        # At the largest magnitude the dither reaches half a step beyond the last level, never a level more.
        assert set(codes_of(kernels, x, quantiser(bits, "subtractive", 64))) == {0, 2**bits - 1}


@pytest.mark.parametrize("kernels", BOTH)
def test_non_finite_uncompressed_coordinates_are_counted_and_kept(kernels) -> None:
    x = torch.randn(100)
    x[70] = torch.inf
    y, bad = there_and_back(kernels, x, quantiser(8, "subtractive", 64), raw=True)
    assert bad == 1
    assert torch.equal(x, y)


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(kernels, dtype: torch.dtype) -> None:
    x = torch.zeros(300, dtype=dtype)
    x[100:150] = torch.linspace(-1, 1, 50)
    x[140] = 0
    for dither in ("subtractive", "stochastic"):
        y, _ = there_and_back(kernels, x, quantiser(8, dither, 64))
        assert (y[:64] == 0).all()  # a block of zeros stays one
        assert (y[192:] == 0).all()
    assert (y[x == 0] == 0).all()  # stochastic rounding keeps single zeros, too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uncompressed_16_bit_values_survive(dtype: torch.dtype) -> None:
    """Every bit pattern comes back, NaN as NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for kernels in BOTH:
        y, _ = there_and_back(kernels, x, quantiser(8, "subtractive", 256), raw=True)
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x[~x.isnan()], y[~y.isnan()])


def test_dither_does_not_depend_on_the_rest_of_the_bucket() -> None:
    q = quantiser(4, "subtractive", 64)
    x = torch.randn(1000)
    alone = layout_of([Segment(7, 500, False)], q, x.dtype)
    among = layout_of([Segment(3, 300, True), Segment(7, 500, False), Segment(9, 200, False)], q, x.dtype, shards=3)
    y, z = torch.zeros(500), torch.zeros(1000)
    cpu.decode(message(cpu, x[300:800].clone(), alone, (1, 2), q)[None], Coding(alone.blocks, q), y, [(1, 2)])
    cpu.decode(message(cpu, x, among, (1, 2), q)[None], Coding(among.blocks, q), z, [(1, 2)])
    assert torch.equal(y, z[300:800])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_with_gaps_in_memory_is_like_one_without(dtype: torch.dtype) -> None:
    q = quantiser(8, "adaptive", 64)
    x = torch.randn(400).to(dtype)[::2]
    layout = layout_of([Segment(0, 150, False), Segment(1, 50, True)], q, dtype)
    wire = message(cpu, x, layout, (1, 2), q)
    assert torch.equal(wire, message(cpu, x.contiguous(), layout, (1, 2), q))
    y, z = torch.zeros(400, dtype=dtype), torch.zeros(200, dtype=dtype)
    cpu.decode(wire[None], Coding(layout.blocks, q), y[::2], [(1, 2)])
    cpu.decode(wire[None], Coding(layout.blocks, q), z, [(1, 2)])
    assert torch.equal(y[::2], z)
    assert (y[1::2] == 0).all()


@pytest.mark.parametrize(
    ("kernels", "bits"),
    [  # the reference takes long, and gives the same bits
        pytest.param(kernels, bits, marks=pytest.mark.slow if kernels is reference and bits != 3 else ())
        for kernels in BOTH
        for bits in range(2, 9)
    ],
)
def test_adaptive_takes_the_dither_with_the_smaller_error_in_each_block(kernels, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    block, count = 256, 400
    density = torch.linspace(0.01, 1, count).repeat_interleave(block)
    x = torch.randn(block * count, generator=generator) * (torch.rand(block * count, generator=generator) < density)
    errors = {}
    for dither in DITHERS:
        q = quantiser(bits, dither, block)
        total = torch.zeros(count)
        for step in range(20):
            y, _ = there_and_back(kernels, x, q, (step, step + 1))
            total += (y - x).view(count, block).square().sum(1)
        errors[dither] = total
    best = torch.minimum(errors["subtractive"], errors["stochastic"])
    assert float(errors["adaptive"].sum()) < 1.07 * float(best.sum())
    assert float(errors["adaptive"].sum()) < 0.95 * min(float(errors[one].sum()) for one in DITHERS[1:])
    # Blocks are either kind as a whole, with that kind's very codes.
    same = [errors["adaptive"] == errors[one] for one in DITHERS[1:]]
    assert (same[0] | same[1]).all()


def test_dither_is_uniform_and_independent() -> None:
    """Moments, neighbours, and the same coordinate under other keys, parameters and blocks."""
    blocks = torch.from_numpy(cut([Segment(0, 1 << 18, False), Segment(1, 1 << 18, False)], 256))
    one = uniform(blocks, (1, 2), 256).double() - 0.5
    other = uniform(blocks, (1, 3), 256).double() - 0.5
    n = one.numel()
    assert abs(float(one.mean())) < 5 / (12 * n) ** 0.5
    assert abs(float(one.square().mean()) - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
    flat = one.flatten()
    pairs = {
        "keys": (one, other),
        "neighbours": (flat[1:], flat[:-1]),
        "halves": (one[:, :128], one[:, 128:]),
        "blocks": (one[1:], one[:-1]),
        "parameters": (one[:1024], one[1024:]),
    }
    for name, (a, b) in pairs.items():
        correlation = float((a * b).mean()) * 12
        assert abs(correlation) < 5 / a.numel() ** 0.5, name
    counts = torch.histc(one.float(), 256, -0.5, 0.5)
    chi2 = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert 255 - 5 * (2 * 255) ** 0.5 < chi2 < 255 + 5 * (2 * 255) ** 0.5


@settings(max_examples=40)
@given(cases)
def test_both_kernels_give_the_same_moments_and_rotations(case: dict) -> None:
    check_moments_and_rotations(case)


def check_moments_and_rotations(case: dict, both=BOTH) -> None:
    """Largest magnitudes, sums, and rotations there and back, with both kernels."""
    segments, (x, *_) = drawn(case)
    blocks = torch.from_numpy(cut(segments, case["block"]))
    assert torch.equal(*(kernels.block_maxima(x, blocks) for kernels in both))
    assert torch.equal(*(kernels.block_moments(x, blocks) for kernels in both))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    rotated = [x.clone() for _ in both]
    for kernels, y in zip(both, rotated, strict=True):
        kernels.rotate(y, blocks, (3, 4), case["block"])
    assert torch.equal(*rotated)
    untouched = torch.cat([torch.full((s.numel,), s.raw) for s in segments])
    assert torch.equal(rotated[0][untouched], x[untouched])
    assert torch.allclose(rotated[0].double().norm(), x.double().norm(), rtol=1e-5)
    for kernels, y in zip(both, rotated, strict=True):
        counted, origin = from_origin(kernels, blocks)
        kernels.rotate(y, counted, (3, 4), case["block"], inverse=True, origin=origin)
    assert torch.equal(*rotated)
    for k in range(len(blocks)):
        part = slice(int(blocks[k, START]), int(blocks[k, START] + blocks[k, LENGTH]))
        assert torch.allclose(rotated[0][part], x[part], rtol=0, atol=float(x[part].abs().max()) * 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_kernels_turn_blocks_of_every_power_of_two_alike(dtype: torch.dtype) -> None:
    """Short ones go through other loops than long ones, and even and odd powers through other passes."""
    for exponent in range(17):
        x = gradient(exponent, 1 << exponent, dtype)
        blocks = torch.from_numpy(cut([Segment(0, len(x), False)], 1 << 16))
        for inverse in (False, True):
            rotated = [x.clone() for _ in BOTH]
            for kernels, y in zip(BOTH, rotated, strict=True):
                kernels.rotate(y, blocks, (3, 4), 1 << 16, inverse=inverse)
            assert torch.equal(*rotated), (exponent, inverse)


def test_moments_are_sums() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    blocks = torch.from_numpy(cut([Segment(0, 1000, False)], 256))
    for kernels in BOTH:
        assert torch.allclose(torch.stack([x.abs().sum(), x.square().sum()]), kernels.block_moments(x, blocks).sum(0))
    x[300] = torch.nan
    assert cpu.block_moments(x, blocks).isnan().all(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("kernels", BOTH)
def test_rotation_spreads_one_coordinate_over_its_block(kernels) -> None:
    x = torch.zeros(512)
    x[70] = 16.0
    blocks = torch.from_numpy(cut([Segment(0, 512, False)], 256))
    kernels.rotate(x, blocks, (1, 2), 256)
    assert torch.equal(x.abs(), torch.cat([torch.ones(256), torch.zeros(256)]))
    y = torch.ones(256)
    kernels.rotate(y, blocks[:1], (1, 2), 256)
    kernels.rotate(z := torch.ones(256), blocks[:1], (1, 3), 256)
    assert float(y.abs().max()) < 6  # without signs, all would go to one place
    assert not torch.equal(y, z)
