from __future__ import annotations

from numba import int64

from lightning_gqsgd.kernels.cpu.casts import numbers, part
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top, kernel
from lightning_gqsgd.kernels.cpu.loops import add_scaled, clamp, copy, divide, is_finite
from lightning_gqsgd.kernels.cpu.rotation import turn_block
from lightning_gqsgd.layout import CODES, LENGTH, RAW, START


def kernels(write, read, read_sum):
    @inlined_top
    def average(w, stride, block, keys, c, s, out):
        for source in range(keys.shape[0]):
            at, add = source * stride, source > 0
            if block[RAW]:
                add_scaled(numbers(w, at + block[CODES], out.size, c.each), c.each, add, out)
            else:
                read(w, at, block, keys[source], c, s, add, out)
        if c.rest != 1:
            divide(out, c.rest)

    @kernel
    def encode(x, blocks, scales, key, turn, c, s, wire):
        for k in range(blocks.shape[0]):
            block = blocks[k]
            n = block[LENGTH]
            values = part(x, block[START], n)
            if block[RAW]:
                copy(values, numbers(wire, block[CODES], n, c.each))
            else:
                if turn is not None:
                    mean = part(s.mean, 0, n)
                    copy(values, mean)
                    values = mean
                    turn_block(values, block, turn, False, s.u)
                given = int64(scales[k]) if scales.size else int64(-1)
                write(values, given, block, key, c, s, wire)

    @kernel
    def reduce(w, stride, blocks, keys, out_key, c, s, w_out):
        for k in range(blocks.shape[0]):
            block = blocks[k]
            mean = part(s.mean, 0, block[LENGTH])
            average(w, stride, block, keys, c, s, mean)
            if block[RAW]:
                copy(mean, numbers(w_out, block[CODES], mean.size, c.each))
            else:
                write(mean, int64(-1), block, out_key, c, s, w_out)

    @kernel
    def decode(w, stride, blocks, x, keys, turn, c, s):
        bad = 0
        for k in range(blocks.shape[0]):
            block = blocks[k]
            mean = part(x, block[START], block[LENGTH])
            average(w, stride, block, keys, c, s, mean)
            checked = mean.size if block[RAW] else 1
            if turn is not None:
                if not block[RAW]:
                    turn_block(mean, block, turn, True, s.u)
                    checked = mean.size
            bad += not is_finite(part(mean, 0, checked))
            if c.form.limit < c.form.largest and not block[RAW]:
                clamp(mean, c.form.limit)
        return bad

    @kernel
    def decode_sum(wire, scales, blocks, x, keys, c, s):
        bad = 0
        for k in range(blocks.shape[0]):
            block = blocks[k]
            mean = part(x, block[START], block[LENGTH])
            read_sum(wire, int64(scales[k]), block, keys, c, s, mean)
            bad += not is_finite(part(mean, 0, 1))
            if c.form.limit < c.form.largest:
                clamp(mean, c.form.limit)
        return bad

    return encode, reduce, decode, decode_sum
