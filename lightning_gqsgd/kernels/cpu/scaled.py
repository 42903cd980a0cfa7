from __future__ import annotations

import numpy as np
from numba import int64

from lightning_gqsgd.kernels.cpu.casts import float_of, larger, numbers, part
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_mid, inlined_tiny, inlined_top
from lightning_gqsgd.kernels.cpu.loops import fill, maximum_and_zeros
from lightning_gqsgd.kernels.cpu.scales import received, rounded_up, sent
from lightning_gqsgd.layout import CODES, SCALE


def records(flag_of, encode, decode, decode_sum, pack, unpack):
    @inlined_top
    def write(values, given, block, key, c, s, wire):
        largest, zeros = maximum_and_zeros(numbers(values, 0, values.size, c.form.mask), c.form.mask)
        scale_bits = given if given >= 0 else rounded_up(int64(largest), c.form)
        flag = flag_of(zeros, values.size, c)
        if 0 < scale_bits < c.form.infinity:
            encode(values, float_of(larger(scale_bits, c.form.tiny), c.form.one), flag, block, key, c, s)
        else:
            fill(part(s.codes, 0, values.size), 0)
        if block[SCALE] >= 0:
            numbers(wire, block[SCALE], 1, c.form.scale)[0] = sent(scale_bits, flag, c.form)
        pack(s.codes, values.size, c.bits, wire, block[CODES])

    @inlined_top
    def read(wire, at, block, key, c, s, add, out):
        code = int64(numbers(wire, at + block[SCALE], 1, c.form.scale)[0])
        scale_bits = received(code, c.form)
        if 0 < scale_bits < c.form.infinity:
            unpack(wire, at + block[CODES], out.size, c.bits, s.codes)
            decode(float_of(scale_bits, c.form.one) * c.each, (code & 1) == 1, block, key, c, s, add, out)
        elif scale_bits > 0 or not add:
            fill(out, np.nan if scale_bits > 0 else 0.0)

    @inlined_top
    def read_sum(wire, scale_bits, block, keys, c, s, out):
        if 0 < scale_bits < c.form.infinity:
            unpack(wire, block[CODES], out.size, c.bits, s.codes)
            decode_sum(float_of(larger(scale_bits, c.form.tiny), c.form.one), block, keys, c, s, out)
        else:
            fill(out, np.nan if scale_bits > 0 else 0.0)

    return write, read, read_sum
