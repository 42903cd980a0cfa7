"""QSGD's entropy coder: the codes of a message, fixed-width on the wire, as Elias omega codes, and back, without loss.

Sources: P. Elias, Universal codeword sets and representations of the integers, IEEE Trans. Inf. Theory 21(2), 1975;
D. Alistarh et al., QSGD, NIPS 2017, arXiv 1610.02132, which codes what is sparse. Its text only cites the coder of
dense vectors; Elias(|l| + 1) is ours, and meets the paper's bound of 2.8 bits per coordinate at s = sqrt(d).

A code c is an integer 0 to K-1, K odd, and stands for level l = c - K//2. With Elias(k) the omega code of k >= 1, a
sign bit of 1 for l < 0, and n coordinates, a block's record is the shortest of these, "sparse" if two are:

    void     11                                                                     all codes are 0, not all levels
    sparse   0   Elias(non-zeros + 1), then per non-zero: Elias(gap), sign bit, Elias(|l|)
    dense    10  per coordinate: Elias(|l| + 1), then for a non-zero: sign bit

A gap counts from the non-zero before, the first one from position -1. Blocks whose scale is zero or not finite hold
codes 0 in a message, hence the void form: 0 is the lowest level, the dearest there is.

A stream has the bytes of the message that belong to no code record first (scales, raw records, padding; verbatim, in
their order), then the records of all coded blocks, in the order of the table, bit after bit without alignment, the
first bit in the highest bit of a byte, and zeros to the end of the last byte. No lengths are sent: both sides have the
table. Streams come from the network, so `expand` trusts nothing in them.

Common arguments: ``message`` uint8 [bytes], one shard's, on the CPU; ``blocks`` its block table, int64 [B, COLUMNS]
(see `layout`), with positions counted from the start of ``message``; ``q`` the quantiser, of which ``bits`` and
``odd_levels``, K, matter, and whose codes must be linear and not summable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import int64, uint8, uint32, uint64
from torch import Tensor

from lightning_gqsgd.kernels.cpu import _inline, _kernel, _pack, _unpack
from lightning_gqsgd.kernels.packing import code_bytes
from lightning_gqsgd.kernels.protocol import Kind, Quantiser
from lightning_gqsgd.layout import ALIGNMENT, CODES, LENGTH, RAW

# --- readable: one integer, one block ---------------------------------------------------------------------------------


def omega_code(k: int) -> str:
    """Elias omega code of ``k`` >= 1 as a string of 0 and 1.

    Before the closing 0 stands k in binary, before that its number of digits less one in binary, and so on down to 1,
    which is not written.

    Raises:
        ValueError: ``k`` < 1 has no code.
    """
    if k < 1:
        raise ValueError(f"the Elias omega code has integers from 1 on, not {k}")
    code = "0"
    while k > 1:
        binary = f"{k:b}"
        code = binary + code
        k = len(binary) - 1
    return code


def omega_bits(k: int) -> int:
    """Length in bits of the Elias omega code of ``k`` >= 1: log2 k + log2 log2 k + ... + 1, every term rounded up.

    Raises:
        ValueError: ``k`` < 1 has no code.
    """
    if k < 1:
        raise ValueError(f"the Elias omega code has integers from 1 on, not {k}")
    bits = 1
    while k > 1:
        bits += k.bit_length()
        k = k.bit_length() - 1
    return bits


def reference_block_bits(codes: Sequence[int], levels: int) -> str:
    """The record of one block as a string of 0 and 1.

    Args:
        codes: codes 0 to ``levels`` - 1.
        levels: number of levels K, odd.
    """
    if not any(codes):
        return "11"
    signed = [int(code) - levels // 2 for code in codes]
    positions = [j for j, level in enumerate(signed) if level]
    sparse = ["0", omega_code(len(positions) + 1)]
    for before, j in zip([-1, *positions], positions, strict=False):
        sparse += [omega_code(j - before), _sign(signed[j]), omega_code(abs(signed[j]))]
    dense = ["10"] + [omega_code(abs(level) + 1) + _sign(level) for level in signed]
    return min("".join(sparse), "".join(dense), key=len)


def reference_block_codes(bits: str, length: int, levels: int) -> tuple[list[int], int]:
    """The ``length`` codes of the record that ``bits`` begins with, and how many bits it has: the inverse of
    `reference_block_bits`. ``bits`` must be valid."""
    if bits.startswith("11"):
        return [0] * length, 2
    signed = [0] * length
    if bits.startswith("10"):
        at = 2
        for j in range(length):
            k, at = _omega_read(bits, at)
            if k > 1:
                signed[j], at = _signed(k - 1, bits[at]), at + 1
    else:
        count, at = _omega_read(bits, 1)
        j = -1
        for _ in range(count - 1):
            gap, at = _omega_read(bits, at)
            magnitude, after = _omega_read(bits, at + 1)
            j += gap
            signed[j], at = _signed(magnitude, bits[at]), after
    return [level + levels // 2 for level in signed], at


def _sign(level: int) -> str:
    return {-1: "1", 0: "", 1: "0"}[(level > 0) - (level < 0)]


def _signed(magnitude: int, sign: str) -> int:
    return -magnitude if sign == "1" else magnitude


def _omega_read(bits: str, at: int) -> tuple[int, int]:
    """The integer whose code starts at ``at``, and the position after it."""
    k = 1
    while bits[at] == "1":
        k, at = int(bits[at : at + k + 1], 2), at + k + 1
    return k, at + 1


# --- messages ---------------------------------------------------------------------------------------------------------


def compressed_bits(message: Tensor, blocks: Tensor, q: Quantiser) -> int:
    """Bits of all coded blocks' records in a stream, before it is filled up to a byte; the rest does not count.

    Raises:
        ValueError: as `compress`.
    """
    tables, table = _tables(q), blocks.numpy()
    _rest(table, message.numel(), q.bits)
    codes, positions = _scratch(table)
    source = np.ascontiguousarray(message.numpy())
    return _checked(_count_kernel(source, _NO_WORDS, table, q.bits, tables, codes, positions), q)


def compress(message: Tensor, blocks: Tensor, q: Quantiser) -> Tensor:
    """The stream of a message: uint8, of a length that depends on the codes.

    Raises:
        ValueError: ``q`` has an even K, more levels than codes, or codes that are summable or not linear; code records
            overlap or leave the message; a code is K or larger.
    """
    tables, table = _tables(q), blocks.numpy()
    rest = _rest(table, message.numel(), q.bits)
    codes, positions = _scratch(table)
    coded = table[table[:, RAW] != 1, LENGTH]
    most = len(coded) * 2 + int(coded.sum()) * int(tables.dense_length.max())
    words = np.empty(most // 32 + 2, np.uint32)
    source = np.ascontiguousarray(message.numpy())
    bits = _checked(_compress_kernel(source, _NO_WORDS, table, q.bits, tables, codes, positions, words), q)
    records = words[: -(-bits // 32)].astype(">u4").view(np.uint8)[: -(-bits // 8)]
    return torch.from_numpy(np.concatenate([*(source[lo:hi] for lo, hi in rest), records]))


def expand(stream: Tensor, blocks: Tensor, q: Quantiser, message_bytes: int) -> Tensor:
    """The message of ``message_bytes`` bytes that `compress` made ``stream``, uint8 [bytes], of.

    Equal to it byte for byte, except that all padding within code records is zero.

    Raises:
        ValueError: ``stream`` is too short or too long, or has a count, gap or level out of range (other corruption
            cannot be told from another message; its codes are below K, too); or ``q`` or ``blocks`` as in `compress`.
    """
    tables, table = _tables(q), blocks.numpy()
    rest = _rest(table, message_bytes, q.bits)
    source = stream.numpy()
    first = sum(hi - lo for lo, hi in rest)
    if source.size < first:
        raise ValueError(f"corrupt stream: {source.size} bytes, of which scales and raw records alone need {first}")
    message = np.zeros(message_bytes, np.uint8)
    at = 0
    for lo, hi in rest:
        message[lo:hi] = source[at : at + hi - lo]
        at += hi - lo
    # Two words of zeros at the end: `_window` reads the word that its position lies in and the next one.
    end = 8 * (source.size - first)
    padded = np.zeros((end // 64 + 2) * 8, np.uint8)
    padded[: source.size - first] = source[first:]
    words = padded.view(">u8").astype(np.uint64)
    codes, _ = _scratch(table)
    used, block = _expand_kernel(words, end, _NO_WORDS, table, q.bits, tables, codes, message)
    if used < 0:
        raise ValueError(f"corrupt stream: block {block}: {_REASONS[used]}")
    if end - used >= 8 or padded[used // 8] & (0xFF >> used % 8):
        raise ValueError(f"corrupt stream: data after the last block, from bit {used} of {end} on")
    return torch.from_numpy(message)


def _rest(table: np.ndarray, message_bytes: int, bits: int) -> list[tuple[int, int]]:
    """The byte ranges of a message that belong to no code record, in order.

    Raises:
        ValueError: records overlap or leave the message.
    """
    coded = table[table[:, RAW] != 1]
    coded = coded[np.argsort(coded[:, CODES], kind="stable")]
    size = -(-code_bytes(coded[:, LENGTH], bits) // ALIGNMENT) * ALIGNMENT
    low = np.concatenate([[0], coded[:, CODES] + size])
    high = np.concatenate([coded[:, CODES], [message_bytes]])
    if (low > high).any() or (coded[:, LENGTH] < 0).any() or (coded[:, LENGTH] > _MOST).any():
        raise ValueError(f"the code records of the block table do not lie side by side in {message_bytes} bytes")
    used = low < high
    return list(zip(low[used].tolist(), high[used].tolist(), strict=True))


def _scratch(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Space for the codes of one block, and for the positions of its non-zeros."""
    size = int(table[:, LENGTH].max()) + 1 if len(table) else 1  # positions are written one beyond the last
    return np.empty(size, np.uint8), np.empty(size, np.int32)


def _checked(bits: int, q: Quantiser) -> int:
    if bits < 0:
        raise ValueError(f"the message has a code beyond the {q.odd_levels} levels of its quantiser")
    return bits


# --- tables -----------------------------------------------------------------------------------------------------------

_SHORT = 256  # integers below this have their code in a table; from here on codes have 16 bits or more
_HEAD = 12  # a code of at most this many bits is read by one look-up
_WINDOW = 63  # bits in view while reading: a signed 64-bit integer that stays non-negative
_MASK = 2**_WINDOW - 1
_MOST = 2**31 - 1  # coordinates of a block: codes have at most 43 bits, and positions fit int32
_NO_WORDS = np.empty(0, np.int64)  # in place of words of summable codes, which do not come here

_BAD_CODE, _ENDS, _COUNT, _GAP, _LEVEL = -1, -2, -3, -4, -5
_REASONS = {
    _ENDS: "the stream ends within it",
    _COUNT: "more non-zeros than coordinates",
    _GAP: "a non-zero lies beyond its end",
    _LEVEL: "a level is out of range",
}


class _Tables(NamedTuple):
    """Codewords, right-aligned, and their lengths in bits; ``t`` below. uint64 and uint8, [256] unless said."""

    zero: int  # K // 2, code of level 0 and the highest level
    omega_word: np.ndarray  # of an integer from 1 on
    omega_length: np.ndarray
    level_word: np.ndarray  # sign bit and Elias(|l|), by the code; empty for level 0
    level_length: np.ndarray
    dense_word: np.ndarray  # Elias(|l| + 1) and sign bit, by the code
    dense_length: np.ndarray
    head_value: np.ndarray  # uint8 [2^_HEAD]: the integer whose code is a prefix of these bits
    head_length: np.ndarray  # uint8 [2^_HEAD]: length of its code, 0: it has more bits


def _tables(q: Quantiser) -> _Tables:
    """Tables of a quantiser.

    Raises:
        ValueError: there are none for it.
    """
    levels = getattr(q, "odd_levels", 0)
    fixed_width = q.kind == Kind.LINEAR and not q.summable and 1 <= q.bits <= 8
    if not fixed_width or levels % 2 != 1 or not 1 <= levels <= 2**q.bits:
        raise ValueError(f"Elias codes need an odd number of linear levels in separate words of 1 to 8 bits, not {q}")
    return _tables_of(levels)


@lru_cache
def _tables_of(levels: int) -> _Tables:
    signed = [code - levels // 2 for code in range(levels)]
    omega = [""] + [omega_code(k) for k in range(1, _SHORT)]
    head_value, head_length = np.zeros((2, 1 << _HEAD), np.uint8)
    for k, code in enumerate(omega):
        if 0 < len(code) <= _HEAD:
            free = _HEAD - len(code)
            head = slice(int(code, 2) << free, (int(code, 2) + 1) << free)
            head_value[head], head_length[head] = k, len(code)
    return _Tables(
        levels // 2,
        *_words(omega),
        *_words([_sign(level) + omega_code(abs(level)) if level else "" for level in signed]),
        *_words([omega_code(abs(level) + 1) + _sign(level) for level in signed]),
        head_value,
        head_length,
    )


def _words(codes: list[str]) -> tuple[np.ndarray, np.ndarray]:
    # 256 entries whatever K, so that no code, a byte, is out of range.
    word, length = np.zeros(256, np.uint64), np.zeros(256, np.uint8)
    word[: len(codes)] = [int(code or "0", 2) for code in codes]
    length[: len(codes)] = [len(code) for code in codes]
    return word, length


# --- writing ----------------------------------------------------------------------------------------------------------
# Bits are collected in a 64-bit integer, of which the low `fill` < 32 bits are still to be written in full, and go to
# `words`, of 32 bits, at position `at`; bytes are put in order at the end, all at once.


@_inline
def _append(word, length, bits, fill, at, words):
    """Append the low ``length`` <= 32 bits of ``word``, which has no others."""
    # Every time, the word is stored as it is so far: cheaper than a branch, which cannot be predicted.
    bits = (bits << uint64(length)) | word
    fill += int64(length)
    words[at] = uint32((bits << uint64(63 - fill)) >> uint64(31))
    at += fill >> 5
    return bits, fill & 31, at


@_kernel
def _omega(k):
    """Codeword of k, at most 2^31, and its length."""
    word, length = uint64(0), 1
    while k > 1:
        size = 0
        while k >> size:
            size += 1
        word |= uint64(k) << uint64(length)
        length += size
        k = size - 1
    return word, length


@_inline
def _append_omega(k, t, bits, fill, at, words):
    if k < _SHORT:
        bits, fill, at = _append(t.omega_word[k], t.omega_length[k], bits, fill, at, words)
    else:  # in two parts, as it may have more than 32 bits
        word, length = _omega(k)
        bits, fill, at = _append(word >> uint64(16), length - 16, bits, fill, at, words)
        bits, fill, at = _append(word & uint64(0xFFFF), 16, bits, fill, at, words)
    return bits, fill, at


@_inline
def _omega_length(k, t):
    length = int64(t.omega_length[k & (_SHORT - 1)])
    if k >= _SHORT:
        length = _omega(k)[1]
    return length


@_inline
def _largest(codes):
    largest = uint8(0)
    for j in range(codes.size):
        largest = max(largest, codes[j])
    return largest


@_inline
def _non_zeros(codes, zero, positions):
    """Positions of the non-zeros; returns how many."""
    count = 0
    for j in range(codes.size):  # no branch: it could not be predicted
        positions[count] = j
        count += int64(codes[j] != zero)
    return count


@_kernel
def _plan(codes, t, positions):
    """Bits of a block in the sparse and the dense form, and the number of non-zeros, whose positions are written.

    -1 non-zeros: a code is out of range; -2: the block is void.
    """
    largest = int64(_largest(codes))
    if largest > 2 * t.zero:
        return 0, 0, -1
    if largest == 0:
        return 2, 2, -2
    count = _non_zeros(codes, t.zero, positions)
    dense = 2
    for j in range(codes.size):
        dense += int64(t.dense_length[codes[j]])
    sparse, before = 1 + _omega_length(count + 1, t), -1
    for i in range(count):
        j = int64(positions[i])
        sparse += _omega_length(j - before, t) + int64(t.level_length[codes[j]])
        before = j
    return sparse, dense, count


@_kernel
def _count_kernel(message, no_words, blocks, width, t, codes, positions):
    """Bits of all records, or _BAD_CODE."""
    total = 0
    for k in range(blocks.shape[0]):
        if blocks[k, RAW] != 1:
            n = blocks[k, LENGTH]
            _unpack(message, no_words, blocks[k, CODES], n, width, False, codes)
            sparse, dense, count = _plan(codes[:n], t, positions)
            if count == -1:
                return _BAD_CODE
            total += min(sparse, dense)
    return total


@_kernel
def _compress_kernel(message, no_words, blocks, width, t, codes, positions, words):
    """Write all records; returns their bits, or _BAD_CODE."""
    bits, fill, at = uint64(0), 0, 0
    for k in range(blocks.shape[0]):
        if blocks[k, RAW] != 1:
            n = blocks[k, LENGTH]
            _unpack(message, no_words, blocks[k, CODES], n, width, False, codes)
            sparse, dense, count = _plan(codes[:n], t, positions)
            if count == -1:
                return _BAD_CODE
            if count == -2:
                bits, fill, at = _append(uint64(3), 2, bits, fill, at, words)
            elif sparse <= dense:
                bits, fill, at = _append(uint64(0), 1, bits, fill, at, words)
                bits, fill, at = _append_omega(count + 1, t, bits, fill, at, words)
                before = -1
                for i in range(count):
                    j = int64(positions[i])
                    bits, fill, at = _append_omega(j - before, t, bits, fill, at, words)
                    code = codes[j]
                    bits, fill, at = _append(t.level_word[code], t.level_length[code], bits, fill, at, words)
                    before = j
            else:
                bits, fill, at = _append(uint64(2), 2, bits, fill, at, words)
                for j in range(n):
                    code = codes[j]
                    bits, fill, at = _append(t.dense_word[code], t.dense_length[code], bits, fill, at, words)
    _append(uint64(0), 0, bits, fill, at, words)
    return 32 * at + fill


# --- reading ----------------------------------------------------------------------------------------------------------
# `at` is a position in bits. It never passes `end` by more than one code before that is noticed, and nothing is read
# at a position beyond `end`.


@_inline
def _window(words, at):
    """The _WINDOW bits from ``at`` on, the first one highest, as a non-negative integer."""
    high, low, shift = words[at >> 6], words[(at >> 6) + 1], uint64(at & 63)
    return int64(((high << shift) | ((low >> uint64(1)) >> (uint64(63) - shift))) >> uint64(1))


@_kernel
def _long_omega(window):
    """See `_omega_of`, for codes of any length."""
    k, length = 1, 0
    while (window >> (_WINDOW - 1 - length)) & 1:
        size = k + 1
        if length + size >= _WINDOW:
            return _MOST + 1, _WINDOW
        k = (window >> (_WINDOW - length - size)) & ((1 << size) - 1)
        length += size
    return k, length + 1


@_inline
def _omega_of(window, t):
    """The integer whose code a window starts with, and the code's length; an integer above _MOST, if the code is
    longer than the window."""
    head = window >> (_WINDOW - _HEAD)
    k, length = int64(t.head_value[head]), int64(t.head_length[head])
    if length == 0:
        k, length = _long_omega(window)
    return k, length


@_kernel
def _read_dense(words, at, end, t, codes):
    """Read a block after its flag; returns the position after it, or what is wrong with it."""
    for j in range(codes.size):
        window = _window(words, at)
        k, length = _omega_of(window, t)
        level = k - 1
        if level > t.zero:
            return _LEVEL
        negative = (window >> (_WINDOW - 1 - length)) & 1  # of level 0, this is the next code's bit, and no matter
        codes[j] = uint8(t.zero + level - 2 * level * negative)
        at += length + int64(level > 0)
        if at > end:
            return _ENDS
    return at


@_kernel
def _read_sparse(words, at, end, t, codes):
    """Read a block after its flag; returns the position after it, or what is wrong with it."""
    for j in range(codes.size):
        codes[j] = uint8(t.zero)
    count, length = _omega_of(_window(words, at), t)
    count -= 1
    at += length
    if at > end:
        return _ENDS
    if count > codes.size:
        return _COUNT
    j = -1
    for _ in range(count):
        gap, length = _omega_of(_window(words, at), t)
        at += length
        if at > end:
            return _ENDS
        if gap >= codes.size - j:
            return _GAP
        j += gap
        window = _window(words, at)
        level, length = _omega_of((window << 1) & _MASK, t)
        at += 1 + length
        if at > end:
            return _ENDS
        if level > t.zero:
            return _LEVEL
        negative = window >> (_WINDOW - 1)
        codes[j] = uint8(t.zero + level - 2 * level * negative)
    return at


@_kernel
def _expand_kernel(words, end, no_words, blocks, width, t, codes, message):
    """Write all code records; returns the bits read, or what is wrong, and with which block."""
    at = 0
    for k in range(blocks.shape[0]):
        if blocks[k, RAW] != 1:
            n = blocks[k, LENGTH]
            flag = _window(words, at) >> (_WINDOW - 2)
            at += 1 if flag < 2 else 2
            if at > end:
                at = _ENDS
            elif flag < 2:
                at = _read_sparse(words, at, end, t, codes[:n])
            elif flag == 2:
                at = _read_dense(words, at, end, t, codes[:n])
            else:
                for j in range(n):
                    codes[j] = 0
            if at < 0:
                return at, k
            _pack(codes, n, width, False, message, no_words, blocks[k, CODES])
    return at, 0
