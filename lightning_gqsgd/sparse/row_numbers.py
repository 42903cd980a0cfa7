"""The format of row numbers in a message: the gaps between ascending integers, in the shorter of two formats.

The gap of the first row is its number. The gap of a later row is the number of rows between it and the previous row.
The first byte of a stream is the format:

* 0, packed (FastSGD, arXiv 2112.04291, which has 5 bits for a width): groups of 32 gaps. First one byte for each group,
  the number of bits w of its largest gap, and then the gaps of each group, w bits each, which are 4 w bytes. Gaps
  beyond the last row are zero.
* 1, Elias gamma (P. Elias, IEEE Transactions on Information Theory 21, 1975) of each gap + 1: as many zeros as the
  number has binary digits after the first one, a one, and then these digits. The zeros and ones of all numbers come
  first, and then all digits. Each of the two parts is padded to whole bytes. This takes as many bits as the original
  order, apart from padding, and allows reading all numbers at once.

Packed is shorter if gaps are similar, as for hashed features. Gamma is shorter if most gaps are zero and some are
large.
"""

from __future__ import annotations

import numpy as np

_GROUP = 32
_PACKED = 0
_GAMMA = 1
#: Bits of the largest gap that `read` accepts.
_WIDEST = 62


def write(rows: np.ndarray) -> np.ndarray:
    """Returns the stream of row numbers, uint8 [bytes]; empty if there are none.

    Args:
        rows: int64 [rows], ascending and unique.
    """
    if not len(rows):
        return np.zeros(0, dtype=np.uint8)
    gaps = np.diff(rows, prepend=-1) - 1
    packed = _write_packed(gaps)
    gamma = _write_gamma(gaps)
    form, body = (_PACKED, packed) if len(packed) <= len(gamma) else (_GAMMA, gamma)
    return np.concatenate([np.array([form], dtype=np.uint8), body])


def read(stream: np.ndarray, count: int, height: int) -> np.ndarray:
    """Returns the row numbers of a stream, int64 [count], ascending.

    Args:
        stream: uint8 [bytes]. It comes from the network, so its contents are checked.
        count: number of rows.
        height: number of rows of the table.

    Raises:
        RuntimeError: if the stream is not a result of `write` for such a table.
    """
    if not count:
        return np.zeros(0, dtype=np.int64)
    form, body = (int(stream[0]), stream[1:]) if len(stream) else (-1, stream)
    if form not in (_PACKED, _GAMMA):
        raise _invalid(f"it begins with {form}, which is not a known form")
    gaps = (_read_packed if form == _PACKED else _read_gamma)(body, count)
    if gaps.max() >= height:
        raise _invalid(f"a gap of {gaps.max()} in a table of {height} rows")
    rows = np.cumsum(gaps + 1) - 1
    if rows[-1] >= height:
        raise _invalid(f"row {rows[-1]} of a table of {height} rows")
    return rows


def _write_packed(gaps: np.ndarray) -> np.ndarray:
    groups = np.zeros((-(-len(gaps) // _GROUP), _GROUP), dtype=np.int64)
    groups.reshape(-1)[: len(gaps)] = gaps
    widths = _digits(groups.max(axis=1))
    ends = np.cumsum(widths * (_GROUP // 8))
    body = np.zeros(int(ends[-1]), dtype=np.uint8)
    for width in np.unique(widths[widths > 0]).tolist():
        chosen = np.flatnonzero(widths == width)
        bits = groups[chosen, :, None] >> np.arange(width - 1, -1, -1) & 1
        written = np.packbits(bits.astype(np.uint8).reshape(len(chosen), -1), axis=1)
        body[(ends[chosen] - written.shape[1])[:, None] + np.arange(written.shape[1])] = written
    return np.concatenate([widths.astype(np.uint8), body])


def _read_packed(body: np.ndarray, count: int) -> np.ndarray:
    groups = np.zeros((-(-count // _GROUP), _GROUP), dtype=np.int64)
    widths = body[: len(groups)].astype(np.int64)
    ends = len(groups) + np.cumsum(widths * (_GROUP // 8))
    if len(widths) < len(groups) or widths.max() > _WIDEST or ends[-1] != len(body):
        raise _invalid(f"{len(body)} bytes are not those of {count} packed rows")
    for width in np.unique(widths[widths > 0]).tolist():
        chosen = np.flatnonzero(widths == width)
        length = width * _GROUP // 8
        read_bytes = body[(ends[chosen] - length)[:, None] + np.arange(length)]
        bits = np.unpackbits(read_bytes, axis=1).reshape(len(chosen), _GROUP, width)
        gaps = np.zeros((len(chosen), _GROUP), dtype=np.int64)
        for digit in range(width):
            gaps = gaps << 1 | bits[:, :, digit]
        groups[chosen] = gaps
    return groups.reshape(-1)[:count]


def _write_gamma(gaps: np.ndarray) -> np.ndarray:
    numbers = gaps + 1
    digits = _digits(numbers) - 1
    lengths = np.zeros(int(digits.sum()) + len(numbers), dtype=np.uint8)
    lengths[np.cumsum(digits + 1) - 1] = 1
    owner, place = _places(digits)
    tails = numbers[owner] >> (digits[owner] - 1 - place) & 1
    return np.concatenate([np.packbits(lengths), np.packbits(tails.astype(np.uint8))])


def _read_gamma(body: np.ndarray, count: int) -> np.ndarray:
    bits = np.unpackbits(body)
    ones = np.flatnonzero(bits)[:count]
    digits = np.diff(ones, prepend=-1) - 1
    first = -(-(int(ones[-1]) + 1) // 8) if len(ones) == count else 0
    if not first or digits.max() > _WIDEST or first + -(-int(digits.sum()) // 8) != len(body):
        raise _invalid(f"{len(body)} bytes are not those of {count} rows in Elias codes")
    owner, place = _places(digits)
    numbers = np.left_shift(1, digits)
    np.add.at(numbers, owner, bits[8 * first : 8 * first + len(owner)].astype(np.int64) << (digits[owner] - 1 - place))
    return numbers - 1


def _places(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For consecutive runs of these lengths, returns the number of each element's run and the element's place in it."""
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return owner, np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]


def _digits(numbers: np.ndarray) -> np.ndarray:
    """Returns the number of binary digits of each number, int64; 0 for 0."""
    # frexp is exact for integers below 2^53; the halves keep larger ones exact.
    high = numbers >> 32
    return np.where(high > 0, 32 + np.frexp(high.astype(np.float64))[1], np.frexp(numbers.astype(np.float64))[1])


def _invalid(reason: str) -> RuntimeError:
    return RuntimeError(f"a message of row numbers is invalid: {reason}")
