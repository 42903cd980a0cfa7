"""Trellis codes: their alphabets, the search for the best sequence, and the same bits from all kernels."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gqsgd.codecs import EdenCodec, TrellisCodec
from lightning_gqsgd.codecs.trellis import codec
from lightning_gqsgd.codecs.trellis.codec import (
    COST_UNIT,
    FARTHEST,
    LANES,
    MAGNITUDES,
    MEMORY,
    NEVER,
    PATH,
    SEGMENT,
    STATES,
    WINDOWS,
    alphabets,
    best_windows,
    costs_of,
    subset_of,
)
from lightning_gqsgd.kernels.layout import LENGTH, Segment, cut
from tests.unit.test_eden import check_blocks_side_by_side
from tests.unit.test_kernels import DTYPES, check_messages, drawn

WIDTHS = range(1, 5)
#: Blocks that kernels handle together, and one by one. The reference takes seconds for either.
SHORT_AND_LONG = [(128, torch.bfloat16), (1024, torch.float32)]


@pytest.mark.parametrize("bits", WIDTHS)
def test_windows_that_are_opposite_have_opposite_levels(bits: int) -> None:
    levels = alphabets(MAGNITUDES[bits])
    assert levels.shape == (WINDOWS, 2 ** (bits - 1))
    assert (np.diff(levels) > 0).all()
    assert np.array_equal(levels, -levels[::-1, ::-1])
    assert len(np.unique(np.abs(levels))) == 2**bits + 1


def test_a_state_chooses_between_two_subsets_with_one_level_between_any_two_of_each() -> None:
    for state in range(STATES):
        zero, one = (subset_of(state | u << MEMORY) for u in (0, 1))
        assert (zero - one) % 4 == 2
    assert [subset_of(window) for window in range(WINDOWS)].count(3) == 4


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_sequence_is_the_best_of_all(bits: int) -> None:
    """Compared with all 2^8 sequences of 8 steps."""
    x = torch.randn(3, SEGMENT, LANES, generator=torch.Generator().manual_seed(bits)).clamp(-FARTHEST, FARTHEST)
    levels = alphabets(MAGNITUDES[bits])
    constant, slope = map(torch.from_numpy, costs_of(levels))
    costs = (constant - x[..., None, None] * slope).amin(-1).round().long()
    totals = []
    for bits_of_steps in itertools.product((0, 1), repeat=SEGMENT):
        u = (0,) * MEMORY + bits_of_steps
        windows = [sum(u[step + back] << back for back in range(MEMORY + 1)) for step in range(SEGMENT)]
        totals.append(sum(costs[:, step, :, window] for step, window in enumerate(windows)))
    found = best_windows(x, torch.full((3,), SEGMENT), levels)
    assert torch.equal(costs.gather(-1, found[..., None])[..., 0].sum(1), torch.stack(totals).amin(0))


@pytest.mark.parametrize("bits", WIDTHS)
def test_costs_fit_into_words(bits: int) -> None:
    """The word of any state, within a segment or before the first step, is an integer of 32 bits."""
    constant, slope = costs_of(alphabets(MAGNITUDES[bits]))
    x = np.linspace(-FARTHEST, FARTHEST, 1001, dtype=np.float32)[:, None, None]
    costs = (constant - x * slope).min(-1) / COST_UNIT
    lowest, highest = float(costs.min()), float(costs.max())
    apart = MEMORY * (highest - lowest)
    assert apart < NEVER / COST_UNIT  # no sequence that begins elsewhere is better than one that begins at 0
    largest = SEGMENT * max(-lowest, highest) + apart
    assert max(largest, NEVER / COST_UNIT + MEMORY * highest) * COST_UNIT < 1 << (31 - PATH)
    assert -lowest * COST_UNIT < 2**22  # costs are rounded in the lowest bits of an fp32 number


def test_each_coordinate_has_one_place_and_neighbours_come_from_everywhere() -> None:
    """Two coordinates follow each other in a sequence in about as many messages as any other two do."""
    blocks = cut([Segment(0, 2000 * 256, False)], 256)
    table = torch.from_numpy(blocks)
    table[1000:, LENGTH] = 128
    orders = codec.orders(table, (3, 5), 256)
    assert torch.equal(orders.sort(dim=1).values, torch.arange(256).expand(2000, 256))
    for found, length in ((orders[:1000], 256), (orders[1000:, :128], 128)):
        pairs = found[:, LANES:] ^ found[:, :-LANES]
        shares = pairs.flatten().bincount(minlength=length) / pairs.numel()
        assert shares[0] == 0
        # Steps next to each other come from rows whose numbers are even and odd, or the other way round.
        assert 2 < float(shares.max()) * length < 3
        assert int((shares > 0).sum()) == length // 2


#: Each width has a kernel of its own for fp64, which takes long to compile: one of them always, the others as slow
#: tests.
FEW_KERNELS = [(dtype, bits) for dtype in DTYPES for bits in WIDTHS if dtype != torch.float64 or bits == 2]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    kernel=st.sampled_from(FEW_KERNELS),
    block=st.sampled_from([128, 256, 1024]),
    rows=st.lists(st.tuples(st.integers(0, 1500), st.booleans()), min_size=1, max_size=3),
)
def test_both_kernels_give_the_same_bits(seed, kernel, block, rows) -> None:
    check_kernels(seed, *kernel, block, rows)


def check_kernels(seed: int, dtype: torch.dtype, bits: int, block: int, rows: list[tuple[int, bool]]) -> None:
    """Messages of three ranks, with both kernels."""
    segments, xs = drawn({"seed": seed, "dtype": dtype, "ranks": 3, "rows": rows})
    check_messages(segments, xs, TrellisCodec(bits).quantiser(block))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 3, 4])
def test_both_kernels_give_the_same_bits_in_64_bits(bits: int) -> None:
    for block in (128, 256, 1024):
        check_kernels(block, torch.float64, bits, block, [(1500, False), (3, True), (700, False)])


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        pytest.param(length, dtype, marks=[] if (length, dtype) in SHORT_AND_LONG else pytest.mark.slow)
        for length in (128, 256, 1024)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ],
)
def test_blocks_that_lie_side_by_side_do_not_touch_each_other(length: int, dtype: torch.dtype) -> None:
    check_blocks_side_by_side(TrellisCodec, length, dtype)


def test_messages_are_as_long_as_those_of_eden() -> None:
    lengths = np.array([1, 100, 128, 500, 1024])
    for bits in WIDTHS:
        ours, others = (kind(bits).quantiser(1024).record_bytes(lengths, 4) for kind in (TrellisCodec, EdenCodec))
        assert np.array_equal(ours, others)
