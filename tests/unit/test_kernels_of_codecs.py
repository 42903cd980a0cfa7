"""What single codecs promise of their kernels: top-k, sign and exponential."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_gqsgd.codecs import CODECS, Codec, ExponentialCodec, LinearCodec, SignCodec, TopKCodec
from lightning_gqsgd.codecs.variance import smallest_level
from lightning_gqsgd.kernels.layout import CODES, Segment, cut, place
from lightning_gqsgd.kernels.packing import unpack
from lightning_gqsgd.kernels.protocol import Coding, Kind, Quantiser
from lightning_gqsgd.research.simulation import average
from tests.unit.test_kernels import BOTH, DTYPES, gradient, layout_of, message, there_and_back


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("density", [0.004, 0.1, 1.0])
def test_top_k_keeps_the_largest(kernels, density: float) -> None:
    q = TopKCodec(density).quantiser(256)
    x = torch.randn(600)
    x[:10] = 5.0  # ties: the first ones
    y, bad = there_and_back(kernels, x, q)
    assert bad == 0
    for block in (slice(0, 256), slice(256, 512), slice(512, 600)):
        count = max(1, -(-(block.stop - block.start) * q.kept // 65536))
        assert count == TopKCodec(density).delta(block.stop - block.start) * (block.stop - block.start)
        kept = y[block] != 0
        assert int(kept.sum()) == count
        assert torch.equal(y[block][kept], x[block][kept])
        assert float(x[block][~kept].abs().max() if count < len(kept) else 0) <= float(y[block][kept].abs().min())
    assert torch.equal(y[:10] != 0, torch.arange(10) < -(-256 * q.kept // 65536))


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("codec", [TopKCodec(0.05), TopKCodec(0.05, 2)])
@pytest.mark.parametrize("place", [36, 63, 64, 65535])
def test_top_k_with_a_place_outside_of_the_block_is_nan_there(kernels, codec: TopKCodec, place: int) -> None:
    q = codec.quantiser(64)
    layout = layout_of([Segment(0, 100, False)], q, torch.float32)
    wire = message(kernels, torch.randn(100), layout, (1, 2), q)
    at = int(layout.blocks[1, CODES]) + 2 * 4  # behind two numbers, or behind two means
    wire[at : at + 2] = torch.tensor([place & 0xFF, place >> 8], dtype=torch.uint8)
    y = torch.zeros(100)
    assert kernels.decode(wire[None], Coding(layout.blocks, q), y, [(1, 2)]) == 1
    assert y[:64].isfinite().all()
    assert y[64:].isnan().all()


@pytest.mark.parametrize("kernels", BOTH)
def test_sign_decodes_to_the_scale(kernels) -> None:
    q = SignCodec().quantiser(64)
    x = torch.randn(256)
    layout = layout_of([Segment(0, 256, False)], q, x.dtype)
    scales = torch.tensor([1.0, 0.5, 2.0, 0.0]).view(torch.int32)
    y = torch.empty_like(x)
    kernels.decode(message(kernels, x, layout, (1, 2), q, scales)[None], Coding(layout.blocks, q), y, [(1, 2)])
    assert torch.equal(y, torch.sign(x) * torch.tensor([1.0, 0.5, 2.0, 0.0]).repeat_interleave(64))


@pytest.mark.parametrize("kernels", BOTH)
def test_sign_of_a_zero_is_drawn(kernels) -> None:
    q = SignCodec().quantiser(256)
    x = torch.zeros(1 << 14)
    x[::256] = 1.0
    (y, _), (z, _) = (there_and_back(kernels, x, q, key) for key in ((1, 2), (1, 3)))
    zeros = x == 0
    assert abs(float(y[zeros].mean())) < 5 / 128
    assert abs(float((y * z)[zeros].mean())) < 5 / 128
    assert (y[~zeros] == 1).all()


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mantissa", [0, 1, 2, 3])
@pytest.mark.parametrize("bits", [3, pytest.param(5, marks=pytest.mark.slow), 8])
def test_exponential_codes_are_neighbours_and_levels_are_kept(kernels, bits: int, mantissa: int, dtype) -> None:
    codec = ExponentialCodec(bits, mantissa)
    q = codec.quantiser(256)
    x = (torch.rand(3000, dtype=torch.float64) - 0.5) * 10 ** (4 * torch.rand(3000, dtype=torch.float64) - 4)
    x[::256] = 1.0
    x = x.to(dtype)
    y, _ = there_and_back(kernels, x, q)
    again, _ = there_and_back(kernels, y, q, (3, 4))
    assert torch.equal(y, again)  # what is a level is rounded to itself
    magnitudes = [smallest_level(k, mantissa) for k in range(codec.magnitudes, 0, -1)]
    levels = torch.tensor([0.0, *magnitudes], dtype=torch.float64)
    place = torch.searchsorted(levels, x.double().abs().contiguous(), right=True)
    low, high = levels[place - 1], levels[place.clamp(max=len(levels) - 1)]
    found = y.double().abs()
    assert ((found == low.to(dtype).double()) | (found == high.to(dtype).double())).all()
    assert ((y == 0) | (y.sign() == x.sign())).all()


def test_combine_adds_powers_of_two() -> None:
    """The cases that take no luck, and saturation; codes of bits=8 with 127 magnitudes."""
    q = ExponentialCodec(8).quantiser(64)
    cases = {
        (0, 0): 0, (5, 0): 5, (0, 5 + 128): 5 + 128,  # a zero: the other
        (5, 5): 6, (133, 133): 134, (127, 127): 127, (255, 255): 255,  # equal: doubled, up to the last
        (5, 133): 0, (133, 5): 0,  # opposite: zero
        (6, 133): 5, (133, 6): 5, (134, 5): 133, (1, 130): 129,  # 2 - 1 = 1
        (100, 1): 100, (1, 228): 228,  # too far apart for a draw of 32 bits
    }  # fmt: skip
    pairs = torch.tensor(list(cases), dtype=torch.uint8)
    layout = place(cut([Segment(0, len(cases), False)], 64), q, shards=1, scale_bytes=0, raw_bytes=4)
    for kernels in BOTH:
        mine, theirs = (torch.zeros(layout.message_bytes, dtype=torch.uint8) for _ in range(2))
        mine[: len(cases)], theirs[: len(cases)] = pairs.T
        kernels.combine(mine, theirs, Coding(layout.blocks, q), (1, 2))
        assert mine[: len(cases)].tolist() == list(cases.values())


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(1, 300))
@example(0, 3, 41)  # 17 bytes in bit planes, 16 in lanes for sums
def test_both_kernels_combine_alike(seed: int, bits: int, numel: int) -> None:
    check_combined(seed, bits, numel)


def check_combined(seed: int, bits: int, numel: int, both=BOTH) -> None:
    """Sums of exponential codes, with both kernels."""
    generator = torch.Generator().manual_seed(seed)
    q = ExponentialCodec(bits).quantiser(64)
    layout = layout_of([Segment(3, numel, False)], q, torch.float32)
    pair = torch.randint(256, (2, layout.message_bytes), dtype=torch.uint8, generator=generator)
    results = []
    for kernels in both:
        mine, theirs = pair.clone()
        kernels.combine(mine, theirs, Coding(layout.blocks, q), (seed % 2**32, 2))
        results.append(unpack(mine, layout.blocks, q.bits, q.block_size, summable=False))
    assert torch.equal(*results)


@pytest.mark.parametrize(("fast", "reducer"), [(LinearCodec, "sum"), (ExponentialCodec, "tree")])
def test_sums_of_codes_without_fast_kernels_are_those_of_the_readable_ones(
    fast: type[Codec], reducer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's codec has them."""

    def quantiser(codec: Codec, block_size: int, summed: int | None = None) -> Quantiser:
        q = fast.quantiser(codec, block_size, summed)
        return type("Readable", (type(q),), {"kind": Kind("readable")})(**vars(q))

    monkeypatch.setitem(CODECS, "readable", type("Readable", (fast,), {"name": "readable", "quantiser": quantiser}))
    gradients = [gradient(rank, 300, torch.float32) for rank in range(3)]
    expected = average(gradients, codec=fast.name, reducer=reducer, block_size=64)
    for mean, other in zip(average(gradients, codec="readable", reducer=reducer, block_size=64), expected, strict=True):
        assert torch.equal(mean, other)
