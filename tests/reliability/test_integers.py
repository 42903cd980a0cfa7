"""Codes and their sums, exhaustively where there are few, and at the extremes where there are many ranks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.codecs import LinearCodec
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.packing import pack, unpack
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, average

#: Coordinates of a block.
WIDTH = 256
#: Ranks times steps over which a tree's bias is measured.
TREE_RANK_STEPS = 512


def packed_sum(codes: Tensor, bits: int) -> Tensor:
    """The sums of all ranks' codes, int64 [ranks, numel], as the messages' words give them."""
    numel = codes.shape[1]
    q = LinearCodec(bits, "subtractive").quantiser(WIDTH, len(codes))
    layout = place(cut([Segment(0, numel, False)], WIDTH), q, shards=1, scale_bytes=0, raw_bytes=4)
    wires = torch.zeros(len(codes), layout.message_bytes, dtype=torch.uint8)
    for wire, row in zip(wires, codes, strict=True):
        pack(_in_blocks(row, len(layout.table)), layout.blocks, wire, bits, summable=True)
    lane = torch.uint8 if 8 % bits == 0 else torch.int64
    total = wires.view(lane).sum(0, dtype=lane).view(torch.uint8)
    return unpack(total, layout.blocks, bits, WIDTH, summable=True).flatten()[:numel]


def _in_blocks(row: Tensor, blocks: int) -> Tensor:
    padded = torch.zeros(blocks * WIDTH, dtype=torch.int64)
    padded[: len(row)] = row
    return padded.view(blocks, -1)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_combination_of_codes_adds_up_without_a_carry(bits: int, ranks: int) -> None:
    try:
        levels = LinearCodec(bits, "subtractive").quantiser(256, ranks).levels
    except ConfigError:
        assert (2**bits - 1) // ranks < 1
        return
    assert ranks * (levels - 1) <= 2**bits - 1
    every = torch.tensor(list(itertools.product(range(levels), repeat=ranks))).T
    lanes = 64 // bits
    for shift in range(lanes):  # every combination meets every place of a word, and other neighbours
        codes = torch.roll(every, shift, dims=1)
        assert torch.equal(packed_sum(codes, bits), codes.sum(0))
        pairs = torch.cat([codes, codes.flip(1)], dim=1)
        assert torch.equal(packed_sum(pairs, bits), pairs.sum(0))


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_survives_every_place_of_bit_planes(bits: int) -> None:
    q = LinearCodec(bits, "subtractive").quantiser(WIDTH)
    first = torch.arange(2**bits)[:, None]
    for length in (*range(1, 34), 255, 256):  # in block k, the first coordinate has code k, and the others follow
        table = cut([Segment(number, length, False) for number in range(2**bits)], WIDTH)
        layout = place(table, q, shards=1, scale_bytes=2, raw_bytes=4)
        codes = (torch.arange(WIDTH)[None] * 37 + first) % 2**bits
        wire = torch.zeros(layout.message_bytes, dtype=torch.uint8)
        pack(codes, layout.blocks, wire, bits, summable=False)
        unpacked = unpack(wire, layout.blocks, bits, WIDTH, summable=False)
        assert torch.equal(unpacked[:, :length], codes[:, :length])


def check_extremes(ranks: int, bits: int) -> None:
    """All ranks at the largest coordinate, of either sign or of both: each rank's dither moves it by half a step."""
    numel = 520
    signs = torch.where(torch.arange(numel) % 3 == 0, -1.0, 1.0)
    levels = LinearCodec(bits, "subtractive").quantiser(256, ranks).levels
    step = 2 * 3.0 * 1.01 / (levels - 1)  # scales are rounded up by at most 2^-7
    for pattern in (torch.ones(numel), -torch.ones(numel), signs):
        check_sum([pattern * 3.0] * ranks, bits, step)
    halves = [3.0 * (torch.ones(numel) if rank % 2 else -torch.ones(numel)) for rank in range(ranks)]
    check_sum(halves, bits, step)


def check_sum(gradients: list[Tensor], bits: int, step: float) -> None:
    """The mean of a sum of codes: within half a step, and within six deviations of n independent errors."""
    mean = average(gradients, reducer="sum", codec="linear", dither="subtractive", bits=bits, block_size=256)[0]
    away = (mean.double() - torch.stack(gradients).double().mean(0)).abs().max()
    assert away <= 1.001 * step / 2
    assert away <= 6 * step / math.sqrt(12 * len(gradients))


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 15, 16])
def test_extremes_add_up_on_few_ranks(ranks: int) -> None:
    for bits in (4, 5, 8):
        if (2**bits - 1) // ranks >= 1:
            check_extremes(ranks, bits)


@pytest.mark.reliability
@pytest.mark.parametrize("ranks", [*range(2, 17), 64, 128, 255])
def test_extremes_add_up_on_many_ranks(ranks: int) -> None:
    for bits in range(2, 9):
        if (2**bits - 1) // ranks >= 1:
            check_extremes(ranks, bits)


@pytest.mark.reliability
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [64, 128, 1024])
@pytest.mark.parametrize("reducer", ["two_shot", "gather", "tree"])
def test_extremes_of_many_ranks_are_averaged_right(ranks: int, reducer: str) -> None:
    fields = {"codec": "exponential", "bits": 6} if reducer == "tree" else {"bits": 8}
    for value in (1.0, 3.0e38, 1e-30):
        for gradients in ([torch.full((300,), value)] * ranks, [torch.full((300,), -value)] * ranks):
            if reducer == "tree":
                check_tree(gradients, fields)
            else:
                mean = average(gradients, reducer=reducer, **fields)[0].double()
                assert (mean - gradients[0].double()).abs().max() <= 0.02 * value


def check_tree(gradients: list[Tensor], fields: dict[str, Any]) -> None:
    """Every hop rounds to a power of two, at random: the average of some steps is near the mean, without bias."""
    virtual = VirtualRanks(len(gradients), [Segment(0, len(gradients[0]), False)], torch.float32, None,
                           reducer="tree", **fields)  # fmt: skip
    value, steps = gradients[0].double(), max(2, TREE_RANK_STEPS // len(gradients))
    relative = torch.stack([virtual.mean(gradients, step).double() / value for step in range(steps)])
    assert (relative.abs() <= 2.01).all()
    deviation = float(relative.std()) / math.sqrt(relative.numel())
    bias = float(relative.mean()) - 1.0
    assert abs(bias) <= 5 * deviation + 1e-6, (bias, deviation)
    assert relative.min() >= 0.49  # no coordinate loses its sign or more than half of its size
