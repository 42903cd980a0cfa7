"""Packs codes into bytes, and unpacks them; `kernels.packing` describes the two layouts.

Lane l of word w of a run holds coordinate w + l * words. Common arguments: ``codes``, uint8; ``n``, the number of
coordinates; ``bits``, the number of bits of a code; ``wire``, the message, and ``at``, the position of the block's
codes in it.

Bytes are shifted as bytes. The operators of Numba would shift them as 64-bit integers, and a vector would hold fewer.
"""

from __future__ import annotations

from numba import int64, uint8

from lightning_gqsgd.kernels.cpu.casts import numbers, part, shifted_down, shifted_up, smaller
from lightning_gqsgd.kernels.cpu.jit import inlined, loop


@inlined
def pack_planes(codes, n, bits, wire, at):
    """Write codes in bit planes."""
    for plane in (8, 4, 2, 1):
        if bits & plane:
            words = (n * plane + 7) // 8
            _pack_plane(codes, n, bits & -(2 * plane), plane, part(wire, at, words))
            at += words


@loop
def _pack_plane(codes, n, used, plane, words):
    """Write one bit plane. ``used`` is the number of bits in the planes before it."""
    mask = uint8((1 << plane) - 1)
    down = uint8(used)
    for w in range(words.size):
        words[w] = uint8(shifted_down(codes[w], down) & mask)
    for lane in range(1, 8 // plane):
        lane_codes = part(codes, lane * words.size, smaller(words.size, n - lane * words.size))
        up = uint8(lane * plane)
        for w in range(lane_codes.size):
            words[w] = uint8(words[w] | shifted_up(uint8(shifted_down(lane_codes[w], down) & mask), up))


@inlined
def unpack_planes(wire, at, n, bits, codes):
    """Read codes from bit planes."""
    for plane in (8, 4, 2, 1):
        if bits & plane:
            words = (n * plane + 7) // 8
            _unpack_plane(part(wire, at, words), n, bits & -(2 * plane), plane, codes)
            at += words


@loop
def _unpack_plane(words, n, used, plane, codes):
    """Read one bit plane. ``used`` is the number of bits in the planes before it."""
    mask = uint8((1 << plane) - 1)
    up = uint8(used)
    for lane in range(8 // plane):
        lane_codes = part(codes, lane * words.size, smaller(words.size, n - lane * words.size))
        down = uint8(lane * plane)
        if used == 0:  # the first plane sets the codes, and the others add bits to them
            for w in range(lane_codes.size):
                lane_codes[w] = uint8(shifted_down(words[w], down) & mask)
        else:
            for w in range(lane_codes.size):
                lane_codes[w] = uint8(lane_codes[w] | shifted_up(uint8(shifted_down(words[w], down) & mask), up))


@loop
def pack_lanes(codes, n, bits, wire, at):
    """Write codes in lanes of 64-bit words, which can be added."""
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    words = numbers(wire, at, count, int64(0))
    for w in range(count):  # the first lane is full
        words[w] = int64(codes[w])
    for lane in range(1, lanes):
        lane_codes = part(codes, lane * count, smaller(count, n - lane * count))
        for w in range(lane_codes.size):
            words[w] |= int64(lane_codes[w]) << (lane * bits)


@loop
def unpack_lanes(wire, at, n, bits, codes):
    """Read codes from lanes of 64-bit words."""
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    mask = (1 << bits) - 1
    words = numbers(wire, at, count, int64(0))
    for lane in range(lanes):
        lane_codes = part(codes, lane * count, smaller(count, n - lane * count))
        for w in range(lane_codes.size):
            lane_codes[w] = uint8((words[w] >> (lane * bits)) & mask)
