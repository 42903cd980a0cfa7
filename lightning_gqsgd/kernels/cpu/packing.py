from __future__ import annotations

from numba import int64, uint8

from lightning_gqsgd.kernels.cpu.casts import numbers, part, smaller
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top


@inlined_mid
def pack_planes(codes, n, bits, wire, at):
    for plane in (8, 4, 2, 1):
        if bits & plane:
            words = (n * plane + 7) // 8
            _pack_plane(codes, n, bits & -(2 * plane), plane, part(wire, at, words))
            at += words


@inlined
def _pack_plane(codes, n, low, plane, words):
    mask, down = uint8((1 << plane) - 1), uint8(low)
    for w in range(words.size):
        words[w] = uint8(uint8(codes[w] >> down) & mask)
    for lane in range(1, 8 // plane):
        lane_codes = part(codes, lane * words.size, smaller(words.size, n - lane * words.size))
        up = uint8(lane * plane)
        for w in range(lane_codes.size):
            words[w] = uint8(words[w] | uint8(uint8(uint8(lane_codes[w] >> down) & mask) << up))


@inlined
def pack_lanes(codes, n, bits, wire, at):
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    words = numbers(wire, at, count, int64(0))
    for k in range(count):
        words[k] = 0
    for lane in range(lanes):
        lane_codes = part(codes, lane * count, smaller(count, n - lane * count))
        for k in range(lane_codes.size):
            words[k] |= int64(lane_codes[k]) << (lane * bits)


@inlined_mid
def unpack_planes(wire, at, n, bits, codes):
    for plane in (8, 4, 2, 1):
        if bits & plane:
            words = (n * plane + 7) // 8
            _unpack_plane(part(wire, at, words), n, bits & -(2 * plane), plane, codes)
            at += words


@inlined
def _unpack_plane(words, n, low, plane, codes):
    mask, up = uint8((1 << plane) - 1), uint8(low)
    for lane in range(8 // plane):
        lane_codes = part(codes, lane * words.size, smaller(words.size, n - lane * words.size))
        down = uint8(lane * plane)
        if low == 0:
            for w in range(lane_codes.size):
                lane_codes[w] = 0
        for w in range(lane_codes.size):
            lane_codes[w] = uint8(lane_codes[w] | uint8(uint8(uint8(words[w] >> down) & mask) << up))


@inlined
def unpack_lanes(wire, at, n, bits, codes):
    lanes = 64 // bits
    count = (n + lanes - 1) // lanes
    mask = (1 << bits) - 1
    words = numbers(wire, at, count, int64(0))
    for lane in range(lanes):
        lane_codes = part(codes, lane * count, smaller(count, n - lane * count))
        for k in range(lane_codes.size):
            lane_codes[k] = uint8((words[k] >> (lane * bits)) & mask)
