"""Lines of Criteo's text format: compiled code reads them as Python would."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import criteo
from recipes.data.click_lines import MISSING, parse_lines
from recipes.errors import RecipeError

LABELS = st.sampled_from([b"0", b"1", b"2", b"", b"01"])
NUMBERS = st.one_of(
    st.integers(-(2**31), 2**31 - 1).map(lambda number: b"%d" % number),
    st.sampled_from([b"", b"-", b"--1", b"2147483648", b"-2147483649", b"99999999999", b"1.5", b" 1", b"007", b"+1"]),
)
HEXADECIMALS = st.one_of(
    st.integers(0, 2**32 - 1).map(lambda number: b"%x" % number),
    st.sampled_from([b"", b"ABCDEF09", b"0x1f", b"123456789", b"g", b"1_0", b"@", b"`", b"G", b"-1"]),
)
#: A line with two numbers and two hexadecimal numbers.
LINE = re.compile(rb"[01](\t(-?\d{1,10})?){2}(\t[0-9a-fA-F]{0,8}){2}\n")


@given(LABELS, st.lists(NUMBERS, max_size=3), st.lists(HEXADECIMALS, max_size=3))
def test_lines_are_read_as_python_reads_them(label: bytes, numbers: list[bytes], texts: list[bytes]) -> None:
    right = b"0\t7\t7\ta\ta\r\n"
    line = b"\t".join([label, *numbers, *texts]) + b"\n"
    labels, numerical, categorical = np.zeros(2, np.int8), np.zeros((2, 2), np.int32), np.zeros((2, 2), np.uint32)
    found = parse_lines(np.frombuffer(right + line, np.uint8), labels, numerical, categorical)
    fields = line.strip(b"\n").split(b"\t")
    if LINE.fullmatch(line) and all(-(2**31) <= int(text or b"0") < 2**31 for text in fields[1:3]):
        assert found == (2, len(right + line))
        assert labels[1] == int(fields[0])
        assert numerical[1].tolist() == [int(text) if text else MISSING for text in fields[1:3]]
        assert categorical[1].tolist() == [int(text or b"0", 16) for text in fields[3:]]
    else:
        assert found == (1, len(right))
    assert (labels[0], numerical[0].tolist(), categorical[0].tolist()) == (0, [7, 7], [10, 10])


@pytest.mark.parametrize("size", [200, 4096])
def test_lines_are_whole_in_blocks_of_any_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", size)
    file = tmp_path / "train.txt"
    lines = [b"\t".join([b"%d" % (row % 2), *[b"%d" % row] * 13, *[b"%x" % row] * 26]) + b"\n" for row in range(100)]
    file.write_bytes(b"".join(lines).rstrip(b"\n"))  # the last line may have no end
    log = criteo.parse(file, None)
    assert log.labels.tolist() == [row % 2 for row in range(100)]
    assert np.array_equal(log.numerical, np.repeat(np.arange(100), 13).reshape(100, 13))
    assert np.array_equal(log.categorical, np.repeat(np.arange(100), 26).reshape(100, 26))
    for rows in (1, 50, 100, 1000):
        assert len(criteo.parse(file, rows).labels) == min(rows, 100)
    file.write_bytes(b"".join(lines) + b"0" * 5000)  # longer than a block
    with pytest.raises(RecipeError, match="line 101: 1 columns instead of 40"):
        criteo.parse(file, None)
