"""Companded codes: what their curves promise, what a configuration may ask of them, and what becomes of odd input."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gqsgd.codecs import CompandedCodec
from lightning_gqsgd.codecs.companded.codec import SLOPE, Curve
from lightning_gqsgd.kernels import cpu, reference
from tests.unit.test_kernels import BOTH, DTYPES, check_messages, codes_of, drawn, there_and_back

WIDTHS = range(2, 9)


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_box_mean_of_the_decoder_is_the_curve_of_the_encoder(bits: int) -> None:
    q, curve = CompandedCodec(bits).quantiser(64), Curve.of(2**bits)
    y = torch.linspace(-curve.middle, curve.middle, 501, dtype=torch.float64)
    e = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096 - 0.5
    mean = q._expanded(y[:, None] + e).mean(1)
    expected = (SLOPE * y + y * y.abs() / curve.middle) / (1 + SLOPE)
    assert torch.allclose(mean, expected, rtol=0, atol=1e-6)
    assert torch.allclose(q._compressed(expected), y, rtol=1e-12, atol=1e-12)
    z = torch.linspace(-curve.middle - 0.5, curve.middle + 0.5, 10001, dtype=torch.float64)
    assert (q._expanded(z).diff() > 0).all()


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(WIDTHS),
    dither=st.sampled_from(["adaptive", "subtractive"]),
    block=st.sampled_from([16, 40, 64, 256]),
    rows=st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=1, max_size=3),
)
def test_both_kernels_give_the_same_bits(seed, dtype, bits, dither, block, rows) -> None:
    segments, xs = drawn({"seed": seed, "dtype": dtype, "ranks": 3, "rows": rows})
    check_messages(segments, xs, CompandedCodec(bits, dither).quantiser(block))


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from(WIDTHS), st.sampled_from([1.0, 3.1415, 1e-30, 1.5e38, 1e-40, 6e-8]))
def test_an_error_is_within_the_curves_slope(seed: int, bits: int, largest: float) -> None:
    """A decoded number and its mean lie in the decoder's range over a box, which is as long as the curve is steep."""
    codec = CompandedCodec(bits, "subtractive")
    x = (torch.rand(512, generator=torch.Generator().manual_seed(seed)) * 2 - 1) * largest
    scale, middle = max(float(x.abs().max()), 2.0**-118) * (1 + 2**-7), (2**bits - 1) / 2
    root = (SLOPE**2 + 4 * (1 + SLOPE) * x.double().abs() / scale).sqrt()  # SLOPE + 2 |y|/m
    y, bad = there_and_back(cpu, x, codec.quantiser(512), (seed % 2**32, 5))
    assert bad == 0
    assert ((y.double() - x.double()).abs() <= scale / middle / (1 + SLOPE) * root * (1 + 1e-4) + 1e-45).all()


@pytest.mark.parametrize(("kernels", "dtype"), [(reference, torch.float32), (cpu, torch.float32), (cpu, torch.float64)])
def test_all_codes_are_used_and_none_is_passed(kernels, dtype: torch.dtype) -> None:
    for bits in WIDTHS:
        ends = torch.tensor([1.0, -1.0] * 2000, dtype=dtype)
        assert set(codes_of(kernels, ends, CompandedCodec(bits).quantiser(64))) == {0, 2**bits - 1}
        line = torch.linspace(-1, 1, 4096).to(dtype)
        assert set(codes_of(kernels, line, CompandedCodec(bits).quantiser(4096))) == set(range(2**bits))


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros_where_nearly_all_are(kernels, dtype: torch.dtype) -> None:
    x = torch.zeros(256, dtype=dtype)
    x[130], x[150] = 1.0, -0.3
    y, _ = there_and_back(kernels, x, CompandedCodec(4).quantiser(64))
    assert (y[x == 0] == 0).all()
    assert float(y[130]) == 1.0
    dense, _ = there_and_back(kernels, x, CompandedCodec(4, "subtractive").quantiser(64))
    assert (dense[:128] == 0).all()  # a block of zeros stays one under any dither
    assert (dense[128:192] != 0).all()
