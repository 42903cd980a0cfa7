"""Records that consist of a scale and codes of a fixed width, for the families with such records.

Each function here returns a compiled function, built from the functions of a family for the numbers of a block. Common
arguments of the compiled functions: ``c``, a `blocks.Constants`; ``s``, a `blocks.Scratch`; ``block``, the
block's row of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import int64

from lightning_gqsgd.kernels.cpu.casts import float_of, larger, numbers, part
from lightning_gqsgd.kernels.cpu.jit import inlined
from lightning_gqsgd.kernels.cpu.loops import fill, maximum_and_zeros
from lightning_gqsgd.kernels.cpu.scales import received, rounded_up, sent
from lightning_gqsgd.kernels.layout import CODES, SCALE

Compiled = Callable[..., Any]


def record_writer(flag_of: Compiled, encode: Compiled, pack: Compiled) -> Compiled:
    """Returns the function ``write`` of `blocks.codec_kernel`.

    Args:
        flag_of: ``flag_of(zeros, n, c)`` returns the flag of a block with ``n`` coordinates, of which ``zeros`` are
            zero.
        encode: ``encode(values, scale, flag, block, key, c, s)`` writes codes into ``s.codes``.
        pack: a function of `packing`.
    """

    @inlined
    def write(values, given, block, key, c, s, wire):
        largest, zeros = maximum_and_zeros(numbers(values, 0, values.size, c.form.mask), c.form.mask)
        scale_bits = given if given >= 0 else rounded_up(int64(largest), c.form)
        flag = flag_of(zeros, values.size, c)
        if 0 < scale_bits < c.form.infinity:
            encode(values, float_of(larger(scale_bits, c.form.tiny), c.form.zero), flag, block, key, c, s)
        else:  # codes have no meaning in blocks that are all zero or not finite
            fill(part(s.codes, 0, values.size), 0)
        if block[SCALE] >= 0:
            numbers(wire, block[SCALE], 1, c.form.scale)[0] = sent(scale_bits, flag, c.form)
        pack(s.codes, values.size, c.bits, wire, block[CODES])

    return write


def record_reader(decode: Compiled, unpack: Compiled) -> Compiled:
    """Returns the function ``read`` of `blocks.codec_kernel`. A block whose scale is not finite becomes NaN.

    Args:
        decode: ``decode(scale, flag, block, key, c, s, add, out)`` decodes ``s.codes``, and writes the coordinates into
            ``out``, or adds them if ``add`` is true.
        unpack: a function of `packing`.
    """

    @inlined
    def read(wire, at, block, key, c, s, add, out):
        code = int64(numbers(wire, at + block[SCALE], 1, c.form.scale)[0])
        scale_bits = received(code, c.form)
        if 0 < scale_bits < c.form.infinity:
            unpack(wire, at + block[CODES], out.size, c.bits, s.codes)
            decode(float_of(scale_bits, c.form.zero) * c.each, (code & 1) == 1, block, key, c, s, add, out)
        elif scale_bits > 0 or not add:
            fill(out, np.nan if scale_bits > 0 else 0.0)

    return read


def sum_reader(decode_sum: Compiled, unpack: Compiled) -> Compiled:
    """Returns the function ``read_sum`` of `blocks.sum_kernel`. A block whose scale is not finite becomes NaN.

    Args:
        decode_sum: ``decode_sum(scale, block, keys, c, s, out)`` decodes the summed codes in ``s.codes``, and writes
            the mean into ``out``.
        unpack: a function of `packing`.
    """

    @inlined
    def read_sum(wire, scale_bits, block, keys, c, s, out):
        if 0 < scale_bits < c.form.infinity:
            unpack(wire, block[CODES], out.size, c.bits, s.codes)
            decode_sum(float_of(larger(scale_bits, c.form.tiny), c.form.zero), block, keys, c, s, out)
        else:
            fill(out, np.nan if scale_bits > 0 else 0.0)

    return read_sum
