"""EDEN codes: their levels, what a configuration may ask of them, and what becomes of odd input."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gqsgd.codecs import EdenCodec
from lightning_gqsgd.codecs.eden.codec import folded
from lightning_gqsgd.codecs.variance import LLOYD_MAX
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.dither import words
from lightning_gqsgd.kernels.layout import CODES, Segment
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.kernels.rotation import SHORTEST, padded
from lightning_gqsgd.kernels.wire import SCALE_FORMATS, SCALE_PLACE
from lightning_gqsgd.research import theory
from tests.unit.test_kernels import BOTH, DTYPES, check_messages, drawn, layout_of, message, there_and_back

WIDTHS = range(1, 5)


@pytest.mark.parametrize("bits", WIDTHS)
def test_each_level_is_the_mean_of_what_is_rounded_to_it(bits: int) -> None:
    """So the levels are those of Lloyd and Max; thresholds are halfway between two of them."""
    q, normal = EdenCodec(bits).quantiser(128), NormalDist()
    ends = [*q.thresholds, 40.0]
    assert len(q.magnitudes) == len(q.thresholds) == 2 ** (bits - 1)
    for level, low, high in zip(q.magnitudes, ends[:-1], ends[1:], strict=True):
        mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
        assert level == pytest.approx(mean, rel=1e-9)
    assert ends[1:-1] == [(low + high) / 2 for low, high in zip(LLOYD_MAX[bits][:-1], LLOYD_MAX[bits][1:], strict=True)]


def test_distortion_is_that_of_the_literature() -> None:
    """Max's table of 1960, for 2 to 16 levels; at 1 bit, 1 - 2/π, and so ω = π/2 - 1 for DRIVE."""
    for bits, distortion in zip(WIDTHS, (0.3634, 0.1175, 0.03454, 0.009497), strict=True):
        assert theory.gaussian_distortion(bits) == pytest.approx(distortion, abs=6e-5)
    assert theory.omega_eden(1) == pytest.approx(math.pi / 2 - 1, rel=1e-12)
    with pytest.raises(ConfigError, match="bits=5 is out of range: 1 to 4"):
        theory.omega_eden(5)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(WIDTHS),
    block=st.sampled_from([128, 256, 1024]),
    rows=st.lists(st.tuples(st.integers(0, 1500), st.booleans()), min_size=1, max_size=3),
)
def test_both_kernels_give_the_same_bits(seed, dtype, bits, block, rows) -> None:
    segments, xs = drawn({"seed": seed, "dtype": dtype, "ranks": 3, "rows": rows})
    check_messages(segments, xs, EdenCodec(bits).quantiser(block))


def kinds_of_blocks(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Blocks that kernels handle in different ways: dense, sparse, zero, not finite, tiny and huge ones."""
    dense = torch.randn(length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    sparse = torch.where(torch.arange(length) % 50 == 7, dense, 0)
    broken = torch.where(torch.arange(length) == length // 2, torch.nan, dense)
    info = torch.finfo(dtype)
    huge = dense.clamp(-1, 1) * info.max
    blocks = [dense, sparse, torch.zeros(length), broken, dense, dense * info.tiny, huge, -sparse, dense]
    return [block.to(dtype) for block in blocks]


def check_blocks_side_by_side(codec: type[EdenCodec], length: int, dtype: torch.dtype) -> None:
    """Both kernels give the same bits for blocks of every kind in a row, at each number of bits."""
    blocks = kinds_of_blocks(length, dtype)
    x = torch.cat([*blocks, blocks[0][: length // 2 + 3]])
    for bits in WIDTHS:
        q = codec(bits).quantiser(length)
        layout = layout_of([Segment(5, len(x), False)], q, dtype)
        slow, fast = (message(kernels, x, layout, (1, 2), q) for kernels in BOTH)
        assert torch.equal(slow, fast), bits
        mean = [torch.full_like(x, 7) for _ in BOTH]
        wires = torch.stack([slow, message(cpu, x.flip(0), layout, (3, 4), q)])
        bad = [k.decode(wires, Coding(layout.blocks, q), y, [(1, 2), (3, 4)]) for k, y in zip(BOTH, mean, strict=True)]
        assert bad[0] == bad[1] > 0
        assert torch.equal(mean[0].isnan(), mean[1].isnan())
        assert torch.equal(mean[0].nan_to_num(), mean[1].nan_to_num()), bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("length", [128, 256, 512, 2048])
def test_blocks_that_lie_side_by_side_do_not_touch_each_other(length: int, dtype: torch.dtype) -> None:
    """Kernels handle short ones together. Each number of bits has loops of its own, and each length other passes."""
    check_blocks_side_by_side(EdenCodec, length, dtype)


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_one_coordinate_keeps_its_value_up_to_the_scale(kernels, dtype: torch.dtype) -> None:
    """Its rotated coordinates have one magnitude per sign pattern, so <decoded, x> = |x|² says all."""
    for value in (1.0, -3.1415, 1e-3, 250.0):
        x = torch.tensor([value], dtype=dtype)
        y, bad = there_and_back(kernels, x, EdenCodec(2).quantiser(256))
        assert bad == 0
        assert float(y) == pytest.approx(float(x), rel=2**-7)


@pytest.mark.parametrize("numel", [1, 2, 100, 128, 129, 255, 256, 300])
@pytest.mark.parametrize("bits", WIDTHS)
def test_what_is_lost_is_orthogonal_to_what_was_encoded(bits: int, numel: int) -> None:
    """<decoded, x> = |x|² in each message, up to the rounding of the scale, which is at most 2^-7 of it."""
    for seed in range(3):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
        y, _ = there_and_back(cpu, x, EdenCodec(bits).quantiser(256), (seed, 9))
        for block in range(0, numel, 256):
            original, decoded = x[block : block + 256].double(), y[block : block + 256].double()
            assert float(decoded @ original / (original @ original)) == pytest.approx(1, abs=2**-7)


@pytest.mark.parametrize("length", [1, 100, 127, 128, 129, 255, 256, 257, 3000, 4096])
def test_a_record_has_the_codes_of_the_next_power_of_two(length: int) -> None:
    whole = max(SHORTEST, 2 ** math.ceil(math.log2(length)))
    assert padded(length, 4096) == whole
    assert padded(torch.tensor([length, 1]), 4096).tolist() == [whole, SHORTEST]
    assert EdenCodec(3).quantiser(4096).record_bytes(np.array([length]), 4) == whole * 3 / 8


def test_sums_are_added_in_one_order() -> None:
    terms = torch.rand(3, 256, generator=torch.Generator().manual_seed(0))
    expected = terms.clone()
    for half in (128, 64, 32, 16, 8, 4, 2, 1):
        expected[:, :half] += expected[:, half : 2 * half]
    assert torch.equal(folded(terms), expected[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_is_rounded_to_its_neighbours_with_the_right_mean(dtype: torch.dtype) -> None:
    """At every size: also below the smallest scale, and at the largest number, where it would become infinite."""
    form = SCALE_FORMATS[dtype]
    random = torch.randint(2**32, (200_000,), generator=torch.Generator().manual_seed(0))
    tiny = float(form.floats(torch.tensor(form.tiny)))
    for value in (1.0, 1.003, 3.1e-5, 2.7e30, tiny * 1.3, tiny * 0.3, tiny * 0.003):
        values = torch.full((len(random),), value, dtype=dtype)
        ratios = form.floats(form.rounded_at_random(values, random)).double() / values.double()
        assert len(ratios.unique()) <= 2
        assert abs(float(ratios.mean()) - 1) <= 4 * float(ratios.std()) / math.sqrt(len(random)) + 1e-9
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    bits = form.rounded_at_random(largest, random[:1000])
    assert (bits <= form.infinity - 1).all()
    assert (form.received(form.sent(bits, torch.zeros(1000, dtype=torch.bool)))[0] < form.infinity).all()


def test_no_coordinate_has_the_random_number_of_the_scale() -> None:
    blocks = layout_of([Segment(3, 65536, False)], EdenCodec(1).quantiser(65536), torch.float32).blocks
    hashes = words(blocks, (5, 6), torch.cat([torch.arange(32768), torch.tensor([SCALE_PLACE])]))[0]
    assert int((hashes == hashes[-1]).sum()) == 1


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_zeros_stays_one(kernels, dtype: torch.dtype) -> None:
    x = torch.zeros(300, dtype=dtype)
    x[130] = 1.0
    y, bad = there_and_back(kernels, x, EdenCodec(3).quantiser(128))
    assert bad == 0
    assert (y[:128] == 0).all()
    assert (y[256:] == 0).all()
    assert float(y[130]) == pytest.approx(1, rel=2**-7)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e30])
def test_results_scale_with_powers_of_two(size: float) -> None:
    """Squares neither overflow nor vanish."""
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    factor = 2.0 ** round(math.log2(size))
    expected, _ = there_and_back(cpu, x, EdenCodec(3).quantiser(256))
    assert torch.equal(there_and_back(cpu, x * factor, EdenCodec(3).quantiser(256))[0], expected * factor)


def test_ranks_and_blocks_and_steps_are_rotated_by_different_signs() -> None:
    x = torch.randn(256, generator=torch.Generator().manual_seed(0))
    q = EdenCodec(2).quantiser(256)
    layout = layout_of([Segment(0, 512, False)], q, x.dtype)
    first, second = there_and_back(cpu, torch.cat([x, x]), q)[0].view(2, 256)
    assert not torch.equal(first, second)
    wires = [message(cpu, torch.cat([x, x]), layout, key, q)[int(layout.table[0, CODES]) :] for key in ((1, 2), (3, 2))]
    assert not torch.equal(*wires)
