"""Top-k codes of few bits: what is kept, what is lost, and what wrong messages decode to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import TopKCodec
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import average

BITS = (2, 3, 4)


def decoded(x: Tensor, bits: int, density: float = 0.1, block_size: int = 256) -> Tensor:
    """What one rank's message decodes to."""
    fields = {"codec": "top_k", "bits": bits, "density": density, "block_size": block_size, "memory": "none"}
    return average([x], reducer="gather", **fields)[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("density", [0.004, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_largest_are_kept_at_means_of_cells(bits: int, density: float, dtype: torch.dtype) -> None:
    x = torch.randn(600, generator=torch.Generator().manual_seed(bits), dtype=torch.float64).to(dtype)
    y = decoded(x, bits, density)
    for block in (slice(0, 256), slice(256, 512), slice(512, 600)):
        own, sent = x[block].double(), y[block].double()
        kept = sent != 0
        count = max(1, math.ceil(len(own) * int(density * 65536) / 65536))
        assert int(kept.sum()) == count
        assert own[~kept].abs().max() <= own[kept].abs().min() if count < len(own) else True
        assert torch.equal(own[kept].sign(), sent[kept].sign())
        assert len(sent[kept].abs().unique()) <= 2 ** (bits - 1)
        lost = own.square().sum() - (own - sent).square().sum()
        assert float(lost) == pytest.approx(float(sent.square().sum()), rel=2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("bits", [*BITS, 32])
@pytest.mark.parametrize("length", [256, 4096])
def test_the_first_of_equal_magnitudes_are_kept_as_on_every_device(bits: int, length: int) -> None:
    x = torch.ones(length)
    x[1::2] = -1
    x[-3:] = torch.tensor([2.0, 0.5, -3.0])
    kept = decoded(x, bits, 0.1, length).nonzero().flatten().tolist()
    count = math.ceil(length * int(0.1 * 65536) / 65536)
    assert kept == [*range(count - 2), length - 3, length - 1]


@pytest.mark.parametrize("bits", BITS)
def test_more_bits_lose_less_and_none_loses_more_than_everything(bits: int) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) ** 3
    few, many = (float((decoded(x, b, 0.02, 4096) - x).norm()) for b in (bits, 32))
    assert many < few < float(x.norm())
    if bits > 2:
        assert few < float((decoded(x, bits - 1, 0.02, 4096) - x).norm())
    delta = TopKCodec(0.02, bits).delta(4096)
    assert few**2 <= (1 - delta) * float(x.square().sum())


@pytest.mark.parametrize("x", [torch.zeros(300), torch.full((300,), -2.5), torch.full((300,), 3e38)])
def test_constants_and_the_largest_numbers(x: Tensor) -> None:
    assert torch.equal(decoded(x, 2, 1.0), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_block_nan(bad: float) -> None:
    x = torch.randn(512)
    x[300] = bad
    y = decoded(x, 2)
    assert y[256:].isnan().all()
    assert y[:256].isfinite().all()


def test_bytes_of_a_message() -> None:
    """64 of 4096 coordinates at 2 bits: two means, and 2 + 1/4 bytes for each, an eighteenth of a bit per bit."""
    q = TopKCodec(1 / 64, 2).quantiser(4096)
    assert int(q.record_bytes(torch.tensor([4096]).numpy(), 4)[0]) == 8 + 64 * 2 + 16
    assert GQSGDConfig(codec="top_k", bits=2, density=1 / 64, memory="ef").describe().startswith("0.281 bits")


def test_memory_sends_everything_in_the_long_run() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    from lightning_gqsgd.research.simulation import VirtualRanks

    ranks = VirtualRanks(1, [Segment(0, 1000, False)], preset="topk_ef", bits=2, density=0.05)
    total = sum(ranks.mean([x], step) for step in range(200)) / 200
    assert float((total - x).norm() / x.norm()) < 0.1


@pytest.mark.parametrize("bits", [1, 5, 8, 16])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="has bits=2, 3, 4 or 32, not bits="):
        GQSGDConfig(codec="top_k", bits=bits, memory="ef", reducer="gather")
