"""The rank that averages a shard takes its own gradient exactly, and not through its own message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import Codec, CompandedCodec, ExponentialCodec, LinearCodec, TopKCodec
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.layout import Layout, Segment
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.reducers.two_shot import TwoShot
from lightning_gqsgd.research.simulation import VirtualRanks
from tests.unit.test_kernels import KEYS, gradient, layout_of, message

SEGMENTS = [Segment(0, 300, False), Segment(1, 37, True), Segment(2, 81, False)]
CODECS = [LinearCodec(4, "adaptive"), CompandedCodec(3), ExponentialCodec(6, 1), TopKCodec(0.1)]


def messages(kernels: Any, codec: Codec, xs: list[Tensor]) -> tuple[Any, Any, Tensor]:
    """Quantiser, layout and the messages of all ranks."""
    q = codec.quantiser(64)
    layout = layout_of(SEGMENTS, q, xs[0].dtype)
    return q, layout, torch.stack([message(kernels, x, layout, key, q) for x, key in zip(xs, KEYS, strict=False)])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
def test_an_owner_does_not_read_its_own_codes(kernels: Any, codec: Codec) -> None:
    xs = [gradient(seed, 418, torch.float32) for seed in range(3)]
    q, layout, wires = messages(kernels, codec, xs)
    broken = wires.clone()
    raw = message(kernels, xs[1], layout, KEYS[1], q)
    broken[1] = 255
    raw_at = layout.table[layout.table[:, 6] == 1, 5]
    for at in raw_at:  # what travels uncompressed is read from all messages, in rank order
        broken[1, at : at + 64 * 4] = raw[at : at + 64 * 4]
    shards = []
    for received in (wires, broken):
        out = torch.zeros(layout.shard_bytes, dtype=torch.uint8)
        kernels.reduce(received, Coding(layout.blocks, q), xs[1], KEYS[:3], 1, out, KEYS[3])
        mean = xs[1].clone()
        assert kernels.decode(received, Coding(layout.blocks, q), mean, KEYS[:3], own=1) == 0
        shards.append((out, mean))
    assert torch.equal(shards[0][0], shards[1][0])
    assert torch.equal(shards[0][1], shards[1][1])
    through_messages = torch.zeros_like(xs[0])
    kernels.decode(wires, Coding(layout.blocks, q), through_messages, KEYS[:3])
    alone = torch.zeros_like(xs[0])
    kernels.decode(wires[1:2], Coding(layout.blocks, q), alone, KEYS[1:2])
    expected = through_messages + (xs[1] - alone) / 3
    assert torch.allclose(shards[0][1], expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("fields", [{}, {"rotation": True}, {"codec": "linear", "norm": "l2"}, {"memory": "ef"}])
def test_the_bits_are_those_of_ranks_that_encode_everything(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    xs = [gradient(rank, 418, torch.float32) for rank in range(3)]
    means = []
    for _ in range(2):
        virtual = VirtualRanks(3, SEGMENTS, torch.float32, bits=4, block_size=64, reducer="two_shot", **fields)
        means.append(virtual.average([x.clone() for x in xs], 7)[0])
        monkeypatch.setattr(Layout, "others", lambda layout, rank: layout.whole)
    assert torch.equal(*means)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
def test_an_owners_block_that_is_not_finite_becomes_nan(
    kernels: Any, codec: Codec, dtype: torch.dtype, bad: float
) -> None:
    xs = [gradient(seed, 418, dtype) for seed in range(3)]
    q, layout, wires = messages(kernels, codec, xs)
    xs[1][70] = bad
    mean = xs[1].clone()
    assert kernels.decode(wires, Coding(layout.blocks, q), mean, KEYS[:3], own=1) == 1
    assert mean[64:128].isnan().all()
    assert mean.isfinite().sum() == 418 - 64
    out, decoded = torch.zeros(layout.shard_bytes, dtype=torch.uint8), torch.zeros_like(xs[0])
    kernels.reduce(wires, Coding(layout.blocks, q), xs[1], KEYS[:3], 1, out, KEYS[3])
    assert kernels.decode(out[None], Coding(layout.blocks, q), decoded, KEYS[3:]) == 1
    assert decoded[64:128].isnan().all()
    assert decoded.isfinite().sum() == 418 - 64


@pytest.mark.parametrize("fields", [{}, {"rotation": True}, {"scale_per": "parameter"}])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_error_is_that_of_the_other_ranks_and_of_the_mean(ranks: int, fields: dict[str, Any]) -> None:
    """ω (n-1)/n² + ω with equal gradients, whose blocks and means have the same scales; through messages of all ranks
    the first term would be ω/n, which is 1.25 times the sum for two ranks, and 1.09 and 1.04 times for three and
    four."""
    numel = 1 << 17
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)).clamp(-4, 4)
    x[::256] = 4  # parts of the parameter have the same scale as the whole
    one = VirtualRanks(
        1 + ranks, [Segment(0, numel, False)], torch.float32, bits=7, dither="subtractive", reducer="gather", **fields
    )
    rounding = float((one.average([x.clone() for _ in range(1 + ranks)], 0)[0] - x).square().sum()) * (1 + ranks)
    virtual = VirtualRanks(
        ranks, [Segment(0, numel, False)], torch.float32, bits=7, dither="subtractive", reducer="two_shot", **fields
    )
    error = float((virtual.average([x.clone() for _ in range(ranks)], 0)[0] - x).square().sum())
    assert error == pytest.approx(rounding * ((ranks - 1) / ranks**2 + 1), rel=0.025)
    codec = LinearCodec(7, "subtractive")
    ratio = TwoShot.mean_error(codec, ranks) / codec.error_variance()
    assert ratio == pytest.approx((ranks - 1) / ranks**2 + 1)


@pytest.mark.parametrize(
    "fields", [{}, {"bits": 3, "codec": "companded"}, {"rotation": True}, {"dtype": torch.bfloat16}]
)
def test_results_do_not_depend_on_how_parameters_are_put_together(fields: dict[str, Any]) -> None:
    """Owners follow from blocks, not from buckets."""
    fields = {"bits": 4, **fields}
    dtype = fields.pop("dtype", torch.float32)
    sizes = [5000, 17, 2301, 300]
    segments = [Segment(number, size, False) for number, size in enumerate(sizes)]
    xs = [gradient(rank, sum(sizes), dtype) for rank in range(3)]
    whole = VirtualRanks(3, segments, dtype, reducer="two_shot", **fields).average([x.clone() for x in xs], 5)[0]
    at = 0
    for segment in segments:
        alone = VirtualRanks(3, [segment], dtype, reducer="two_shot", **fields)
        part = slice(at, at + segment.numel)
        assert torch.equal(alone.average([x[part].clone() for x in xs], 5)[0], whole[part])
        at += segment.numel
