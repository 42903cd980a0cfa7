"""The kernel that reads Elias codes. The codes come from the network, so nothing in them is trusted.

``at`` is a position in bits. It can exceed ``end`` by at most one code before a function notices. Nothing is read at a
position beyond ``end``.

Common arguments: ``words`` is the stream, uint64, with two more words at its end; ``t`` is a `tables.Tables`; ``codes``
are the codes of one block, uint8.
"""

from __future__ import annotations

from numba import int64, uint8, uint64

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.jit import called, inlined, kernel
from lightning_gqsgd.kernels.cpu.packing import pack_planes
from lightning_gqsgd.kernels.layout import CODES, LENGTH, RAW
from lightning_gqsgd.reducers.elias.tables import HEAD

#: The largest number of coordinates in a block. Up to this number, codes have at most 43 bits, and positions fit int32.
MOST = 2**31 - 1
_ENDS = -2
_COUNT = -3
_GAP = -4
_LEVEL = -5
#: Messages for errors in a stream, by the number that `read_records` returns.
REASONS = {
    _ENDS: "the stream ends within it",
    _COUNT: "more non-zeros than coordinates",
    _GAP: "a non-zero lies beyond its end",
    _LEVEL: "a level is out of range",
}

_WINDOW = 63  # bits in view while reading: a signed 64-bit integer that stays non-negative
_MASK = 2**_WINDOW - 1


@inlined
def _window(words, at):
    """Returns the _WINDOW bits from ``at`` on as a non-negative integer, whose highest bit is the first one."""
    shift = uint64(at & 63)
    high = words[at >> 6] << shift
    low = (words[(at >> 6) + 1] >> uint64(1)) >> (uint64(63) - shift)
    return int64((high | low) >> uint64(1))


@called
def _long_omega(window):
    """Returns the results of `_omega_of` for codes of any length."""
    k = 1
    length = 0
    while (window >> (_WINDOW - 1 - length)) & 1:
        size = k + 1
        if length + size >= _WINDOW:
            return MOST + 1, _WINDOW
        k = (window >> (_WINDOW - length - size)) & ((1 << size) - 1)
        length += size
    return k, length + 1


@inlined
def _omega_of(window, t):
    """Returns the integer whose code is at the start of a window, and the length of the code. The integer is above
    `MOST` if the code is longer than the window."""
    head = window >> (_WINDOW - HEAD)
    k = int64(t.head_value[head])
    length = int64(t.head_length[head])
    if length == 0:
        k, length = _long_omega(window)
    return k, length


@called
def _read_dense(words, at, end, t, codes):
    """Read a dense block after its flag. Returns the position after the block, or the number of an error."""
    for j in range(codes.size):
        window = _window(words, at)
        k, length = _omega_of(window, t)
        level = k - 1
        if level > t.zero:
            return _LEVEL
        # At level 0, this bit belongs to the next code. It has no effect, because it is multiplied by 0 below.
        negative = (window >> (_WINDOW - 1 - length)) & 1
        codes[j] = uint8(t.zero + level - 2 * level * negative)
        at += length + int64(level > 0)
        if at > end:
            return _ENDS
    return at


@called
def _read_sparse(words, at, end, t, codes):
    """Read a sparse block after its flag. Returns the position after the block, or the number of an error."""
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


@kernel("elias_expand")
def read_records(words, end, blocks, width, t, codes, message):
    """Write all code records of a message. Returns the number of bits read, and the number of blocks.

    If there is an error, the first result is a key of `REASONS`, and the second result is the number of the block with
    the error.

    Args:
        words: the stream.
        end: number of bits in the stream.
        blocks: block table.
        width: bits of a code in the message.
        t: tables.
        codes: scratch space.
        message: the message, uint8 [bytes].
    """
    at = 0
    for k in range(blocks.shape[0]):
        if blocks[k, RAW] != 1:
            n = blocks[k, LENGTH]
            flag = _window(words, at) >> (_WINDOW - 2)
            at += 1 if flag < 2 else 2
            if at > end:
                at = _ENDS
            elif flag < 2:
                at = _read_sparse(words, at, end, t, part(codes, 0, n))
            elif flag == 2:
                at = _read_dense(words, at, end, t, part(codes, 0, n))
            else:
                for j in range(n):
                    codes[j] = 0
            if at < 0:
                return at, k
            pack_planes(codes, n, width, message, blocks[k, CODES])
    return at, blocks.shape[0]
