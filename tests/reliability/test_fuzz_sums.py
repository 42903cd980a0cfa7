"""Kernels that add codes, and readers of rows, take any bytes: a value or an error, and nothing else is written."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.kernels import cpu, reference
from lightning_gqsgd.kernels.layout import Segment, cut, place
from lightning_gqsgd.kernels.protocol import Coding
from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.sparse.logarithmic import LogarithmicRows
from lightning_gqsgd.sparse.tables import Table, Touched
from tests.reliability.knobs import chance, scaled
from tests.reliability.mutations import mutated_bytes
from tests.reliability.test_fuzz_messages import GUARD_BYTE, GUARD_NUMEL, guarded, is_intact


def random_bytes(numbers: random.Random, count: int) -> Tensor:
    return torch.frombuffer(bytearray(numbers.randbytes(count + 1)), dtype=torch.uint8)[:count]


def check_sums(numbers: random.Random, fields: dict[str, object]) -> None:
    """Decode random bytes as a sum of codes, under scales of random bits."""
    ranks, sizes = numbers.choice([1, 2, 3]), [numbers.choice([1, 7, 64, 127, 300]) for _ in range(3)]
    config = GQSGDConfig(**{"block_size": 128, **fields})  # type: ignore[arg-type]
    q = codec_of(config).quantiser(128, ranks)
    table = cut([Segment(number, numel, False) for number, numel in enumerate(sizes)], 128)
    layout = place(table, q, shards=1, scale_bytes=0, raw_bytes=4)
    wire = random_bytes(numbers, layout.message_bytes)
    scales = random_bytes(numbers, 4 * len(table)).view(torch.int32) & 0x7FFFFFFF
    keys = [(numbers.getrandbits(32), numbers.getrandbits(32)) for _ in range(ranks)]
    for kernels in (reference, cpu):
        for dtype in (torch.float32, torch.float16):
            mean, whole = guarded(sum(sizes), dtype)
            kernels.decode_sum(wire, Coding(layout.blocks, q), mean, keys, scales)
            assert is_intact(whole)


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("fields", [{"codec": "linear", "dither": "subtractive"}, {"codec": "exponential"}], ids=str)
def test_any_bytes_decode_as_a_sum_and_touch_nothing_else(fields: dict[str, object], bits: int) -> None:
    numbers = chance("sums", fields, bits)
    for _ in range(scaled(20)):
        check_sums(numbers, {**fields, "bits": bits})


@pytest.mark.parametrize("bits", range(2, 9))
def test_any_bytes_are_combined_and_nothing_else_is_touched(bits: int) -> None:
    numbers, config = chance("combine", bits), GQSGDConfig(codec="exponential", bits=bits, block_size=128)
    q = codec_of(config).quantiser(128)
    for _ in range(scaled(20)):
        sizes = [numbers.choice([1, 7, 64, 127, 300]) for _ in range(3)]
        table = cut([Segment(number, numel, False) for number, numel in enumerate(sizes)], 128)
        layout = place(table, q, shards=1, scale_bytes=0, raw_bytes=4)
        mine, theirs = (random_bytes(numbers, layout.message_bytes) for _ in range(2))
        for kernels in (reference, cpu):
            whole = torch.full((layout.message_bytes + 2 * GUARD_NUMEL,), GUARD_BYTE, dtype=torch.uint8)
            middle = whole[GUARD_NUMEL:-GUARD_NUMEL]
            middle.copy_(mine)
            kernels.combine(middle, theirs, Coding(layout.blocks, q), (1, 2))
            assert (whole[:GUARD_NUMEL] == GUARD_BYTE).all()
            assert (whole[-GUARD_NUMEL:] == GUARD_BYTE).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bits", range(2, 9))
def test_any_bytes_are_logarithmic_rows(bits: int, dtype: torch.dtype) -> None:
    """Every code has a value: a number within the dtype's range, or NaN. Other rows' codes change no row."""
    numbers = chance("logarithmic rows", bits, dtype)
    for trial in range(scaled(100)):
        count, width = numbers.choice([0, 1, 2, 33]), numbers.choice([1, 3, 16])
        coder = LogarithmicRows(Table(0, 1000, width, raw=False), bits, dtype, trial % 4)
        rows = torch.arange(count)
        valid = torch.zeros(coder.nbytes(count), dtype=torch.uint8)
        scale = 10.0 ** numbers.uniform(-300, 300)
        drawn = torch.randn(count, width, generator=torch.Generator().manual_seed(trial), dtype=torch.float64)
        coder.write(Touched(rows, (drawn * scale).to(dtype)), valid, 0)
        message = random_bytes(numbers, len(valid)) if trial % 2 else valid.clone()
        for _ in range(numbers.randrange(4) if count else 0):
            message[numbers.randrange(len(message))] = numbers.choice([0, 0x7F, 0x80, 0xFF])
        read = coder.read(message, rows, 0)
        assert (read.shape, read.dtype) == ((count, width), dtype)
        assert not read.isinf().any()


def test_any_stream_of_row_numbers_is_rows_of_the_table_or_an_error() -> None:
    numbers, height = chance("row numbers"), 10_000_000
    hashed, neighbours = sorted(numbers.sample(range(height), 300)), range(300)
    valid = [row_numbers.write(np.array(rows)).tobytes() for rows in (hashed, neighbours)]  # one in each form
    for trial in range(scaled(2000)):
        form = trial // 2 % 3
        noise = bytes([form]) + numbers.randbytes(trial % 97)
        data = mutated_bytes(numbers, valid[form % 2]) if trial % 2 else noise
        count = numbers.choice([1, 2, 31, 32, 33, 300])
        try:
            read = row_numbers.read(np.frombuffer(data, np.uint8), count, height)
        except RuntimeError as error:
            refusal = str(error)
        else:
            assert len(read) == count
            assert (np.diff(read, prepend=-1) > 0).all()
            assert read[-1] < height
            continue
        assert "a message of row numbers is invalid" in refusal


@pytest.mark.parametrize("form", [0, 1])
def test_reading_row_numbers_takes_no_more_memory_than_its_stream_and_rows_ask_for(form: int) -> None:
    numbers, count = chance("row memory", form), 50_000
    stream = np.frombuffer(bytes([form]) + numbers.randbytes(100_000), np.uint8)
    tracemalloc.start()
    with pytest.raises(RuntimeError, match="invalid"):
        row_numbers.read(stream, count, 10_000_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 100 * len(stream)
