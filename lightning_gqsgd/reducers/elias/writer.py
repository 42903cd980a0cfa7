"""The kernels that write Elias codes.

Bits are collected in the 64-bit integer ``bits``. Its lowest ``fill`` < 32 bits belong to a word that is not complete
yet. This word has 32 bits and is at position ``at`` of ``words``. The caller of a kernel converts the byte order of all
words at the end.

Common arguments: ``t`` is a `tables.Tables`; ``codes`` are the codes of one block, uint8; ``positions`` are the
positions of its non-zeros, int32.
"""

from __future__ import annotations

from numba import int64, uint8, uint32, uint64

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.jit import called, inlined, kernel, loop
from lightning_gqsgd.kernels.cpu.packing import unpack_planes
from lightning_gqsgd.kernels.layout import CODES, LENGTH, RAW
from lightning_gqsgd.reducers.elias.tables import SHORT

#: The result of a kernel for a message with a code out of range.
BAD_CODE = -1


@inlined
def _append(word, length, bits, fill, at, words):
    """Append the low ``length`` <= 32 bits of ``word``; its other bits are zero. Returns ``bits``, ``fill`` and
    ``at``."""
    # The word is stored every time, even if it is incomplete. This is cheaper than a branch, which a processor could
    # not predict.
    bits = (bits << uint64(length)) | word
    fill += int64(length)
    words[at] = uint32((bits << uint64(63 - fill)) >> uint64(31))
    at += fill >> 5
    return bits, fill & 31, at


@called
def _omega(k):
    """Returns the codeword of k, which is at most 2^31, and the length of the codeword."""
    word = uint64(0)
    length = 1
    while k > 1:
        size = 0
        while k >> size:
            size += 1
        word |= uint64(k) << uint64(length)
        length += size
        k = size - 1
    return word, length


@inlined
def _append_omega(k, t, bits, fill, at, words):
    """Append the codeword of k. Returns ``bits``, ``fill`` and ``at``."""
    if k < SHORT:
        bits, fill, at = _append(t.omega_word[k], t.omega_length[k], bits, fill, at, words)
    else:  # two parts, because the codeword may have more than 32 bits
        word, length = _omega(k)
        bits, fill, at = _append(word >> uint64(16), length - 16, bits, fill, at, words)
        bits, fill, at = _append(word & uint64(0xFFFF), 16, bits, fill, at, words)
    return bits, fill, at


@inlined
def _omega_length(k, t):
    """Returns the length of the codeword of k."""
    length = int64(t.omega_length[k & (SHORT - 1)])
    if k >= SHORT:
        length = _omega(k)[1]
    return length


@loop
def _largest(codes):
    """Returns the largest code."""
    largest = uint8(0)
    for j in range(codes.size):
        largest = max(largest, codes[j])
    return largest


@loop
def _non_zeros(codes, zero, positions):
    """Write the positions of the non-zeros. Returns their number."""
    count = 0
    for j in range(codes.size):  # there is no branch, because a processor could not predict it
        positions[count] = j
        count += int64(codes[j] != zero)
    return count


@called
def _plan(codes, t, positions):
    """Returns the number of bits of a block in the sparse and in the dense form, and the number of non-zeros. Their
    positions are written into ``positions``.

    The number of non-zeros is -1 if a code is out of range, and -2 if the block is void.
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
    sparse = 1 + _omega_length(count + 1, t)
    before = -1
    for i in range(count):
        j = int64(positions[i])
        sparse += _omega_length(j - before, t) + int64(t.level_length[codes[j]])
        before = j
    return sparse, dense, count


@kernel("elias_compress")
def write_records(message, blocks, width, t, codes, positions, words):
    """Write all records. Returns their number of bits, or `BAD_CODE`. ``width`` is the number of bits of a code in the
    message."""
    bits = uint64(0)
    fill = 0
    at = 0
    for k in range(blocks.shape[0]):
        if blocks[k, RAW] != 1:
            n = blocks[k, LENGTH]
            unpack_planes(message, blocks[k, CODES], n, width, codes)
            sparse, dense, count = _plan(part(codes, 0, n), t, positions)
            if count == -1:
                return BAD_CODE
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
