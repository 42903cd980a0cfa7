"""The lines of Criteo's text format, parsed by compiled code: the whole log has 46 million of them."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

#: Stands for a number that is missing in the log.
MISSING = np.iinfo(np.int32).min

_TAB, _NEWLINE, _RETURN, _MINUS, _ZERO, _NINE = 9, 10, 13, 45, 48, 57
_LARGEST, _MOST_DIGITS, _MOST_HEXADECIMALS = 2**31 - 1, 10, 8


@njit(nogil=True)  # without a cache: a log is parsed once, and a second compiles it
def parse_lines(
    text: NDArray[np.uint8], labels: NDArray[np.int8], numerical: NDArray[np.int32], categorical: NDArray[np.uint32]
) -> tuple[int, int]:
    """Parse as many lines as there are rows.

    Args:
        text: that many lines or more, each with a newline at its end, uint8 (bytes,).
        labels: written, int8 (rows,).
        numerical: written, int32 (rows, 13); `MISSING` for an empty field.
        categorical: written, uint32 (rows, 26); 0 for an empty field.

    Returns:
        How many lines are right before the first one that is not; and where that line, or what was not asked for,
        begins in the text.
    """
    at = 0
    for row in range(len(labels)):
        begin = at
        if (text[at] != _ZERO and text[at] != _ZERO + 1) or text[at + 1] != _TAB:
            return row, begin
        labels[row] = text[at] - _ZERO
        at += 1
        for column in range(numerical.shape[1]):
            number, at = _integer(text, at + 1)
            if at < 0 or text[at] != _TAB:
                return row, begin
            numerical[row, column] = number
        for column in range(categorical.shape[1]):
            if text[at] != _TAB:
                return row, begin
            number, at = _hexadecimal(text, at + 1)
            if at < 0:
                return row, begin
            categorical[row, column] = number
        while text[at] == _RETURN:
            at += 1
        if text[at] != _NEWLINE:
            return row, begin
        at += 1
    return len(labels), at


@njit(nogil=True)
def _integer(text: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """The integer at a place, and where it ends: -1 if it is none of 32 bits. A newline ends every field."""
    negative = text[at] == _MINUS
    at += negative
    begin, number = at, 0
    while _ZERO <= text[at] <= _NINE and at - begin < _MOST_DIGITS:
        number = 10 * number + text[at] - _ZERO
        at += 1
    if at == begin:
        return MISSING, -1 if negative else at
    return (-number if negative else number), (at if number <= _LARGEST + negative else -1)


@njit(nogil=True)
def _hexadecimal(text: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """The hexadecimal number at a place, and where it ends: -1 if it is longer than 32 bits."""
    begin, number = at, 0
    while True:
        byte = text[at]
        if _ZERO <= byte <= _NINE:
            digit = byte - _ZERO
        elif 97 <= (byte | 32) <= 102:  # a to f, and A to F
            digit = (byte | 32) - 87
        else:
            return number, at
        if at - begin == _MOST_HEXADECIMALS:
            return number, -1
        number = 16 * number + digit
        at += 1
