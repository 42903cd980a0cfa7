"""Elias omega codes, and tables of the short ones, so that no code in them has to be built or read bit by bit."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from lightning_gqsgd.codecs.linear.codec import LinearQuantiser
from lightning_gqsgd.kernels.protocol import Quantiser

#: The codes of integers below this number are in a table. Codes of larger integers have 16 bits or more.
SHORT = 256
#: Codes of at most this number of bits are read by one look-up.
HEAD = 12


class Tables(NamedTuple):
    """Codewords, right-aligned, uint64 [256], and their lengths in bits, uint8 [256].

    Attributes:
        zero: K // 2, the code of level 0, and the highest level.
        omega_word, omega_length: the codeword of each integer from 1 on.
        level_word, level_length: sign bit and Elias(|l|), by the code of l; empty for level 0.
        dense_word, dense_length: Elias(|l| + 1) and sign bit, by the code of l.
        head_value: for each value of `HEAD` bits, the integer whose codeword is at their start, uint8 [2^HEAD].
        head_length: the length of this codeword, uint8 [2^HEAD]; 0: the codeword is longer than `HEAD` bits.
    """

    zero: int
    omega_word: np.ndarray
    omega_length: np.ndarray
    level_word: np.ndarray
    level_length: np.ndarray
    dense_word: np.ndarray
    dense_length: np.ndarray
    head_value: np.ndarray
    head_length: np.ndarray


def levels_of(q: Quantiser) -> int:
    """Returns the number of levels K of a quantiser.

    Raises:
        ValueError: if there are no Elias codes for the quantiser.
    """
    levels = q.odd_levels if isinstance(q, LinearQuantiser) and not q.summable and 1 <= q.bits <= 8 else 0
    if levels % 2 != 1 or not 1 <= levels <= 2**q.bits:
        raise ValueError(f"Elias codes need an odd number of linear levels in separate words of 1 to 8 bits, not {q}")
    return levels


def omega_code(k: int) -> str:
    """Returns the Elias omega code of ``k`` >= 1 as a string of 0 and 1.

    The last digit is 0. It is preceded by k in binary. Each binary number is preceded by its number of digits minus
    one, in binary, down to 1, which is not written.

    Raises:
        ValueError: if ``k`` < 1, which has no code.
    """
    if k < 1:
        raise ValueError(f"the Elias omega code has integers from 1 on, not {k}")
    code = "0"
    while k > 1:
        binary = f"{k:b}"
        code = binary + code
        k = len(binary) - 1
    return code


def sign_bit(level: int) -> str:
    """Returns the sign bit of a level as a string; empty for level 0."""
    return {-1: "1", 0: "", 1: "0"}[(level > 0) - (level < 0)]


@lru_cache
def tables_of(levels: int) -> Tables:
    """Returns the tables for ``levels`` levels, an odd number."""
    signed = [code - levels // 2 for code in range(levels)]
    omega = [""] + [omega_code(k) for k in range(1, SHORT)]
    head_value, head_length = np.zeros((2, 1 << HEAD), np.uint8)
    for k, code in enumerate(omega):
        if 0 < len(code) <= HEAD:
            free = HEAD - len(code)
            head = slice(int(code, 2) << free, (int(code, 2) + 1) << free)
            head_value[head] = k
            head_length[head] = len(code)
    return Tables(
        levels // 2,
        *_words(omega),
        *_words([sign_bit(level) + omega_code(abs(level)) if level else "" for level in signed]),
        *_words([omega_code(abs(level) + 1) + sign_bit(level) for level in signed]),
        head_value,
        head_length,
    )


def _words(codes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codewords and their lengths. There are 256 entries for every K, so that no code, which is a byte, is
    out of range."""
    word = np.zeros(256, np.uint64)
    length = np.zeros(256, np.uint8)
    word[: len(codes)] = [int(code or "0", 2) for code in codes]
    length[: len(codes)] = [len(code) for code in codes]
    return word, length
