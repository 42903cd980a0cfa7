"""Elias coding of messages: against strings of bits, and against corrupt streams."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gqsgd.codecs import TopKCodec
from lightning_gqsgd.codecs.linear.codec import LinearQuantiser
from lightning_gqsgd.kernels.layout import CODES, LENGTH, RAW, SCALE, START, Segment, cut
from lightning_gqsgd.kernels.packing import code_bytes
from lightning_gqsgd.kernels.wire import SCALE_FORMATS
from lightning_gqsgd.reducers.elias import streams as elias
from lightning_gqsgd.reducers.elias.tables import omega_code, sign_bit


def readable_bits(codes: Sequence[int], levels: int) -> str:
    """The record of one block as a string of 0 and 1; codes are 0 to ``levels`` - 1."""
    if not any(codes):
        return "11"
    signed = [int(code) - levels // 2 for code in codes]
    positions = [j for j, level in enumerate(signed) if level]
    sparse = ["0", omega_code(len(positions) + 1)]
    for before, j in zip([-1, *positions], positions, strict=False):
        sparse += [omega_code(j - before), sign_bit(signed[j]), omega_code(abs(signed[j]))]
    dense = ["10"] + [omega_code(abs(level) + 1) + sign_bit(level) for level in signed]
    return min("".join(sparse), "".join(dense), key=len)


def quantiser(bits: int, levels: int, block_size: int) -> LinearQuantiser:
    return LinearQuantiser(bits=bits, levels=levels, odd_levels=levels, stochastic_from=-1.0, block_size=block_size)


def aligned(length):
    return -(-length // 16) * 16


def placed(
    rows: list[tuple[int, bool]], q: LinearQuantiser, dtype: torch.dtype, scales: bool = True
) -> tuple[Tensor, int]:
    """A table of parameters of (coordinates, raw or not), and its message's length: scales, codes, raw coordinates."""
    form = SCALE_FORMATS[dtype]
    table = cut([Segment(number, numel, raw) for number, (numel, raw) in enumerate(rows)], q.block_size)
    raw = table[:, RAW] == 1
    table[:, SCALE] = np.where(~raw & scales, np.cumsum(~raw) - 1, -1) * np.where(raw | (not scales), 1, form.nbytes)
    at = aligned(int((~raw).sum()) * form.nbytes * scales)
    for kind, size in ((~raw, code_bytes(table[:, LENGTH], q.bits)), (raw, table[:, LENGTH] * form.raw_bytes)):
        record = aligned(size)[kind]
        table[kind, CODES] = at + np.cumsum(record) - record
        at += int(record.sum())
    return torch.from_numpy(table), at


def write(codes: np.ndarray, q: LinearQuantiser, message: np.ndarray, at: int) -> None:
    """Bit planes of 8, 4, 2 and 1 bits: lane l of byte w has coordinate w + l * bytes."""
    j, low = np.arange(len(codes)), 0
    for plane in (8, 4, 2, 1):
        if q.bits & plane:
            words = -(-len(codes) * plane // 8)
            part = codes.astype(np.int64) >> low & (1 << plane) - 1
            np.bitwise_or.at(message, at + j % words, (part << plane * (j // words)).astype(np.uint8))
            at, low = at + words, low + plane


def message_of(codes: np.ndarray, blocks: Tensor, q: LinearQuantiser, size: int, seed: int = 0) -> Tensor:
    """A message of these codes, by flat coordinate, with noise wherever no codes lie."""
    message = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    for row in blocks.numpy():
        if not row[RAW]:
            message[row[CODES] : row[CODES] + aligned(code_bytes(row[LENGTH], q.bits))] = 0
            write(codes[row[START] : row[START] + row[LENGTH]], q, message, row[CODES])
    return torch.from_numpy(message)


def one_block(codes: list[int], q: LinearQuantiser) -> tuple[Tensor, Tensor]:
    """Message and table of one block without a scale: the stream is the record alone."""
    blocks, size = placed([(len(codes), False)], q, torch.float32, scales=False)
    return message_of(np.array(codes), blocks, q, size), blocks


def stream_of(bits: str) -> Tensor:
    filled = bits.ljust(-(-len(bits) // 8) * 8, "0")
    return torch.tensor([int(filled[at : at + 8], 2) for at in range(0, len(filled), 8)], dtype=torch.uint8)


def bits_of(stream: Tensor) -> str:
    return "".join(f"{byte:08b}" for byte in stream.tolist())


def reference_bits(codes: np.ndarray, blocks: Tensor, q: LinearQuantiser) -> str:
    coded = [row for row in blocks.numpy() if not row[RAW]]
    records = [codes[row[START] : row[START] + row[LENGTH]].tolist() for row in coded]
    return "".join(readable_bits(record, q.odd_levels) for record in records)


@st.composite
def messages(draw: st.DrawFn) -> tuple[np.ndarray, Tensor, Tensor, LinearQuantiser]:
    """Codes by coordinate, message, table, quantiser; blocks from all zero over sparse to uniform, some all codes 0."""
    bits = draw(st.integers(2, 8))
    levels = draw(st.one_of(st.just(2**bits - 1), st.integers(1, 2 ** (bits - 1)).map(lambda half: 2 * half - 1)))
    q = quantiser(bits, levels, draw(st.sampled_from([16, 40, 64, 700])))
    rows = draw(st.lists(st.tuples(st.integers(0, 800), st.booleans()), max_size=5))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    blocks, size = placed(rows, q, dtype, scales=draw(st.booleans()))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    codes = np.zeros(sum(numel for numel, _ in rows), dtype=np.int64)
    for row in blocks.numpy():
        block = codes[row[START] : row[START] + row[LENGTH]]
        zero = levels // 2
        uniform = rng.integers(0, levels, len(block))
        near = np.clip(zero + np.rint(rng.standard_normal(len(block)) * rng.choice([0.3, 1, 10])), 0, levels - 1)
        density = rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
        values = uniform if rng.random() < 0.5 else near
        block[:] = np.where(rng.random(len(block)) < density, values, zero) if rng.random() < 0.9 else 0
    return codes, message_of(codes, blocks, q, size, seed=1), blocks, q


integers = st.one_of(st.integers(1, 600), st.integers(1, 2**31))


@given(integers, integers)
def test_no_omega_code_begins_another(k: int, other: int) -> None:
    assert k == other or not omega_code(other).startswith(omega_code(k))


def test_0_has_no_omega_code() -> None:
    with pytest.raises(ValueError, match="not 0"):
        omega_code(0)


def test_omega_codes_of_the_literature() -> None:
    published = {1: "0", 2: "100", 3: "110", 4: "101000", 7: "101110", 8: "1110000", 15: "1111110", 16: "10100100000"}
    published |= {100: "1011011001000", 1000: "11100111111010000"}
    assert {k: omega_code(k) for k in published} == published


def test_forms_by_hand() -> None:
    assert readable_bits([0, 0, 0], 3) == "11"
    assert readable_bits([1] * 9, 3) == "0" + "0"
    assert readable_bits([1] * 7 + [0], 3) == "0" + "100" + "1110000" + "1" + "0"
    assert readable_bits([2, 4, 0], 5) == "10" + "0" + "1100" + "1101"


@settings(max_examples=100)
@given(messages())
def test_round_trip_is_exact_and_equals_the_reference(case: tuple[np.ndarray, Tensor, Tensor, LinearQuantiser]) -> None:
    codes, message, blocks, q = case
    bits = reference_bits(codes, blocks, q)
    rest = len(message) - int(aligned(code_bytes(blocks[blocks[:, RAW] == 0, LENGTH].numpy(), q.bits)).sum())
    stream = elias.compress(message, blocks, q)
    assert len(stream) == rest + -(-len(bits) // 8)
    assert bits_of(stream[rest:]) == bits.ljust(-(-len(bits) // 8) * 8, "0")
    assert torch.equal(elias.expand(stream, blocks, q, len(message)), message)


@pytest.mark.parametrize("positions", [[0], [299_999], [5, 70_000, 70_001, 299_998], list(range(0, 300_000, 300))])
def test_gaps_of_every_length(positions: list[int]) -> None:
    q = quantiser(4, 15, 300_000)
    codes = np.full(300_000, 7)
    codes[positions] = np.arange(len(positions)) % 7
    message, blocks = one_block(codes.tolist(), q)
    stream = elias.compress(message, blocks, q)
    assert bits_of(stream).rstrip("0") == readable_bits(codes.tolist(), 15).rstrip("0")
    assert torch.equal(elias.expand(stream, blocks, q, len(message)), message)


def test_blocks_without_a_usable_scale_cost_two_bits() -> None:
    q = quantiser(8, 255, 512)
    message, blocks = one_block([0] * 512, q)
    stream = elias.compress(message, blocks, q)
    assert bits_of(stream) == "11".ljust(8, "0")
    assert torch.equal(elias.expand(stream, blocks, q, len(message)), message)


def test_padding_in_code_records_comes_back_as_zeros() -> None:
    q = quantiser(3, 5, 16)
    message, blocks = one_block([1, 2, 3, 4, 0], q)
    noisy = message.clone()
    noisy[4:] = 255
    assert torch.equal(elias.compress(noisy, blocks, q), elias.compress(message, blocks, q))
    assert torch.equal(elias.expand(elias.compress(noisy, blocks, q), blocks, q, len(message)), message)


# --- corrupt streams -------------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(messages(), st.data())
def test_streams_that_are_too_short_or_too_long_are_refused(case: tuple, data: st.DataObject) -> None:
    _, message, blocks, q = case
    stream = elias.compress(message, blocks, q)
    more = torch.tensor(data.draw(st.lists(st.integers(0, 255), min_size=1, max_size=20)), dtype=torch.uint8)
    with pytest.raises(ValueError, match="corrupt stream"):
        elias.expand(torch.cat([stream, more]), blocks, q, len(message))
    if len(stream):
        with pytest.raises(ValueError, match="corrupt stream"):
            elias.expand(stream[: data.draw(st.integers(0, len(stream) - 1))], blocks, q, len(message))


def omega(*integers: int) -> str:
    return "".join(omega_code(k) for k in integers)


@pytest.mark.parametrize(
    ("bits", "reason"),
    [
        ("", "ends within"),
        ("1", "ends within"),  # and seven zeros: dense, six coordinates of seven
        ("0" + omega(9) + "0" * 8, "more non-zeros"),
        ("0" + omega(2**40) + "0" * 8, "more non-zeros"),
        ("0" + "1" * 200, "more non-zeros"),
        ("0" + omega(2, 8) + "0" + omega(1), "beyond its end"),
        ("0" + omega(2, 2**40) + "0" + omega(1), "beyond its end"),
        ("0" + omega(3, 7) + "0" + omega(1, 1) + "0" + omega(1), "beyond its end"),
        ("0" + omega(2, 1) + "0" + omega(4), "a level"),
        ("0" + omega(2, 1) + "1" + "1" * 200, "a level"),
        ("10" + omega(5) + "0" * 8, "a level"),
        ("10" + "1" * 200, "a level"),
        ("10" + 6 * (omega(2) + "0") + omega(4), "ends within"),  # 32 bits, one sign missing
        ("0" + omega(5, 1) + "0" + omega(1), "ends within"),
        ("11" + "000001", "data after"),
        ("11" + "000000" + "00000000", "data after"),
    ],
)
def test_what_is_wrong_with_a_stream_is_said(bits: str, reason: str) -> None:
    q = quantiser(3, 7, 16)
    _, blocks = one_block([3] * 7, q)
    with pytest.raises(ValueError, match=reason):
        elias.expand(stream_of(bits), blocks, q, 16)


def test_the_block_that_is_wrong_is_named() -> None:
    q = quantiser(3, 7, 16)
    blocks, size = placed([(16, False), (3, True), (16, False)], q, torch.float32, scales=False)
    rest = torch.zeros(size - 2 * 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="block 2: more non-zeros"):
        elias.expand(torch.cat([rest, stream_of("11" + "0" + omega(18))]), blocks, q, size)
    with pytest.raises(ValueError, match="block 2: the stream ends"):  # in the middle of the flag
        elias.expand(torch.cat([rest, stream_of("0" + omega(2, 1) + "0" + omega(1) + "1")]), blocks, q, size)
    with pytest.raises(ValueError, match="alone need 16"):
        elias.expand(rest[1:], blocks, q, size)


# --- misuse ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"odd_levels": 8},
        {"odd_levels": 9},
        {"odd_levels": -1},
        {"summable": True},
        {"bits": 9},
        {"bits": 0},
    ],
)
def test_quantisers_without_an_elias_code_are_refused(change: dict) -> None:
    q = quantiser(3, 7, 16)
    message, blocks = one_block([3] * 7, q)
    for other in (replace(q, **change), TopKCodec(0.1).quantiser(16)):
        with pytest.raises(ValueError, match="odd number of linear levels"):
            elias.compress(message, blocks, other)


def test_codes_beyond_the_levels_are_refused() -> None:
    message, blocks = one_block([3, 7], quantiser(3, 7, 16))
    with pytest.raises(ValueError, match="beyond the 7 levels"):
        elias.compress(message, blocks, quantiser(3, 7, 16))


@pytest.mark.parametrize("position", [-16, 1, 16])
def test_tables_that_do_not_fit_the_message_are_refused(position: int) -> None:
    q = quantiser(3, 7, 16)
    message, blocks = one_block([3] * 7, q)
    blocks[0, CODES] = position
    with pytest.raises(ValueError, match="side by side in 16 bytes"):
        elias.compress(message, blocks, q)
    with pytest.raises(ValueError, match="side by side in 16 bytes"):
        elias.expand(stream_of("11"), blocks, q, 16)


def test_tables_whose_records_overlap_are_refused() -> None:
    q = quantiser(3, 7, 16)
    blocks, size = placed([(16, False), (16, False)], q, torch.float32)
    message = message_of(np.full(32, 3), blocks, q, size)
    blocks[1, CODES] = blocks[0, CODES]
    with pytest.raises(ValueError, match="side by side"):
        elias.compress(message, blocks, q)
