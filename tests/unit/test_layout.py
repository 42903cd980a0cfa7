import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gqsgd.codecs.linear.codec import LinearQuantiser
from lightning_gqsgd.kernels.layout import (
    ALIGNMENT,
    CODES,
    INDEX,
    LENGTH,
    PARAMETER,
    PIECE_NUMEL,
    RAW,
    SCALE,
    START,
    PieceSize,
    Run,
    Segment,
    cut,
    owners,
    pieces,
    place,
    place_by_owner,
    runs,
    table_of,
    whole,
)
from lightning_gqsgd.kernels.packing import code_bytes, summable_code_bytes


def quantiser(bits: int, summable: bool = False) -> LinearQuantiser:
    return LinearQuantiser(bits, 2, 1, 1.0, 256, summable)


segments = st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=12).map(
    lambda rows: [Segment(number, numel, raw) for number, (numel, raw) in enumerate(rows)]
)


@given(segments, st.sampled_from([16, 64, 256]))
def test_blocks_cover_every_coordinate_once_and_never_straddle_parameters(rows: list[Segment], block: int) -> None:
    table = cut(rows, block)
    owner = np.repeat([row.parameter for row in rows], [row.numel for row in rows])
    at = 0
    for row in table:
        assert row[START] == at
        assert 0 < row[LENGTH] <= block
        assert set(owner[at : at + row[LENGTH]]) == {row[PARAMETER]}
        at += row[LENGTH]
    assert at == len(owner)
    for row in rows:
        assert table[table[:, PARAMETER] == row.parameter, INDEX].tolist() == list(range(-(-row.numel // block)))


@given(segments, st.integers(1, 2000))
def test_pieces_are_bounded_and_lose_nothing(rows: list[Segment], numel: int) -> None:
    table = cut(rows, 64)
    parts = [table_of(part, 64) for part in pieces(whole(rows, 64), numel, 64)]
    assert all(len(part) for part in parts)
    starts = np.cumsum([0, *(part[:, LENGTH].sum() for part in parts)])
    for part, start in zip(parts, starts, strict=False):
        part[:, START] += start
    assert np.array_equal(np.concatenate([table[:0], *parts]), table)
    assert all(part[:, LENGTH].sum() <= numel + 64 for part in parts)


@given(
    segments,
    st.integers(1, 9),
    st.integers(1, 8),
    st.sampled_from([0, 2, 4]),
    st.sampled_from([4, 8]),
    st.booleans(),
)
def test_records_do_not_overlap_and_shards_have_equal_length(
    rows: list[Segment], shards: int, bits: int, scale_bytes: int, raw_bytes: int, summable: bool
) -> None:
    table = cut(rows, 64)
    layout = place(table, quantiser(bits, summable), shards=shards, scale_bytes=scale_bytes, raw_bytes=raw_bytes)
    assert layout.shards == shards
    assert layout.first[0] == 0
    assert layout.first[-1] == len(table)
    assert layout.shard_bytes % ALIGNMENT == 0
    taken = np.zeros(layout.message_bytes, dtype=int)
    packed = (summable_code_bytes if summable else code_bytes)(table[:, LENGTH], bits)
    for shard in range(shards):
        lo, hi = layout.first[shard], layout.first[shard + 1]
        for row, nbytes in zip(layout.blocks.numpy()[lo:hi], packed[lo:hi], strict=True):
            length = row[LENGTH] * raw_bytes if row[RAW] else nbytes
            assert row[CODES] % ALIGNMENT == 0
            assert shard * layout.shard_bytes <= row[CODES] <= (shard + 1) * layout.shard_bytes - length
            taken[row[CODES] : row[CODES] + length] += 1
            if row[RAW] or not scale_bytes:
                assert row[SCALE] == -1
            else:
                assert row[SCALE] % scale_bytes == 0
                taken[row[SCALE] : row[SCALE] + scale_bytes] += 1
    assert taken.max(initial=0) <= 1


def test_pieces_of_few_bits_grow_where_there_are_several() -> None:
    of_bits = {bits: PieceSize.of_bits(bits) for bits in (1, 2, 4, 8, 16)}
    small, bucket, large = 2 * PIECE_NUMEL, 6_553_600, 1 << 30
    assert {size.within(small) for size in of_bits.values()} == {PIECE_NUMEL}
    assert [-(-bucket // size.within(bucket)) for size in of_bits.values()] == [6, 6, 7, 13, 13]
    assert [size.within(large) // PIECE_NUMEL for size in of_bits.values()] == [4, 4, 2, 1, 1]
    assert PieceSize(1000, 1000).within(large) == 1000


def test_shards_are_balanced() -> None:
    table = cut([Segment(0, 1 << 20, False)], 256)
    for shards in (2, 3, 5, 8):
        layout = place(table, quantiser(4), shards=shards, scale_bytes=2, raw_bytes=4)
        ideal = (1 << 20) * 4 / 8 + (1 << 12) * 2
        assert layout.message_bytes <= ideal + shards * (256 + ALIGNMENT)


def test_bits_on_the_wire_are_the_bits_asked_for() -> None:
    length = np.int64(256)
    for bits in range(1, 9):
        assert code_bytes(length, bits) == 32 * bits
    assert [8 * summable_code_bytes(length, bits) / 256 for bits in (2, 4, 8)] == [2, 4, 8]
    assert [round(8 * summable_code_bytes(length, bits) / 256, 1) for bits in (3, 5, 6, 7)] == [3.2, 5.5, 6.5, 7.2]


@given(segments, st.integers(1, 5))
def test_a_rank_encodes_what_others_decode_and_what_travels_uncompressed(rows: list[Segment], shards: int) -> None:
    layout = place_by_owner(cut(rows, 64), quantiser(4), shards=shards, scale_bytes=2, raw_bytes=4, striped=False)
    raw = layout.table[layout.table[:, RAW] == 1, START].tolist()
    for shard in range(shards):
        others = layout.others(shard).blocks.numpy()
        assert np.all(np.diff(others[:, START]) > 0)  # in the order of memory, whoever owns them
        of_others = [layout.shard(other).blocks[:, START].tolist() for other in range(shards) if other != shard]
        assert set(others[:, START]) == set(raw).union(*of_others)
        assert set(others[:, CODES]) <= set(layout.table[:, CODES])


@given(segments, st.integers(1, 70), st.booleans())
def test_owners_depend_on_the_parameter_only(rows: list[Segment], shards: int, striped: bool) -> None:
    table = cut(rows, 64)
    owner = owners(table, shards, striped=striped)
    for row in rows:
        alone = owners(cut([row], 64), shards, striped=striped)
        assert np.array_equal(owner[table[:, PARAMETER] == row.parameter], alone)
    layout = place_by_owner(table, quantiser(4), shards=shards, scale_bytes=2, raw_bytes=4, striped=striped)
    assert layout.blocks[:, START].tolist() == table[:, START].tolist()
    for shard in range(shards):
        assert sorted(layout.shard(shard).blocks[:, START].tolist()) == table[owner == shard, START].tolist()


@given(segments, st.integers(1, 9), st.booleans())
def test_runs_are_the_longest_whatever_the_order(rows: list[Segment], shards: int, shuffled: bool) -> None:
    table = cut(rows, 64)
    owner = owners(table, shards, striped=True) if shuffled else np.zeros(len(table), dtype=int)
    for shard in range(shards):
        mine = table[owner == shard]
        covered = [
            (run.start + k, run.parameter, run.offset + k)
            for run in runs(mine[::-1], 64)
            for first in range(0, run.stretches * run.stride or 1, run.stride or 1)
            for k in range(first, first + run.numel)
        ]
        expected = [
            (row[START] + k, row[PARAMETER], row[INDEX] * 64 + k)
            for row in mine
            if not row[RAW]
            for k in range(row[LENGTH])
        ]
        assert covered == expected
    whole = [Run(sum(r.numel for r in rows[:k]), row.parameter, 0, row.numel) for k, row in enumerate(rows)]
    assert runs(table, 64) == [one for one, row in zip(whole, rows, strict=True) if row.numel and not row.raw]


def test_the_stripes_of_an_owner_are_few_runs() -> None:
    table = cut([Segment(0, 1000, False), Segment(1, 300_000, False), Segment(2, 70_000, False)], 256)[2:-9]
    layout = place_by_owner(table, quantiser(4), shards=4, scale_bytes=2, raw_bytes=4, striped=True)
    for part in (layout.shard(1), layout.others(1), layout.whole):
        assert len(part.runs) <= 3 * 3  # the stripes of a parameter, and those at its ends that are shorter


@pytest.mark.parametrize("shards", [2, 8])
def test_tables_take_about_a_byte_for_each_value(shards: int) -> None:
    numel = 1 << 20
    q = LinearQuantiser(4, 2, 1, 1.0, 128, False)
    table = cut([Segment(0, numel, False)], 128)
    layout = place_by_owner(table, q, shards=shards, scale_bytes=2, raw_bytes=4, striped=False)
    parts = (layout.others(0), layout.shard(0))
    nbytes = layout.table.nbytes + layout.order.nbytes + sum(part.blocks.numpy().nbytes for part in parts)
    assert nbytes / numel == pytest.approx(1.06, abs=0.01)


def test_tables_of_other_devices_stay_on_the_host() -> None:
    layout = place(cut([Segment(0, 3000, False)], 64), quantiser(4), shards=3, scale_bytes=2, raw_bytes=4)
    assert layout.on(torch.device("cpu")) is layout
    assert np.shares_memory(layout.blocks.numpy(), layout.table)
    there = layout.on(torch.device("meta"))
    assert not there._parts  # not before the first use
    assert (there.whole.device.type, there.blocks.device.type) == ("meta", "cpu")
    assert layout.on(torch.device("meta")) is there
    assert there.on(torch.device("meta")) is there
    assert (there.first, there.shard_bytes) == (layout.first, layout.shard_bytes)
    assert there.shard(1).runs == layout.shard(1).runs
    assert "runs" not in vars(layout.whole)  # only a memory asks for them


def test_owners_of_a_real_model_have_about_equal_shares() -> None:
    """A ResNet-20: convolutions of 432 to 36,864 coordinates, each followed by two small parameters."""
    sizes = [432, *[2304] * 6, 4608, *[9216] * 5, 18432, *[36864] * 5, 640]
    rows = [Segment(3 * number, size, size < 1024) for number, size in enumerate(sizes)]
    table = cut(rows, 256)
    whole = place(table, quantiser(4), shards=1, scale_bytes=2, raw_bytes=4)
    for shards in (2, 4, 8):
        for striped, more in ((True, 1.25), (False, 1.1)):
            layout = place_by_owner(table, quantiser(4), shards=shards, scale_bytes=2, raw_bytes=4, striped=striped)
            assert layout.message_bytes < more * whole.message_bytes
