from __future__ import annotations

from numba import int64

from lightning_gqsgd.kernels.cpu.casts import larger
from lightning_gqsgd.kernels.cpu.jit import inlined, inlined_tiny


@inlined_tiny
def rounded_up(bits, f):
    """Bits of the scale for a largest magnitude with these bits; of infinity, if it is not finite."""
    if bits >= f.infinity:
        bits = f.infinity
    elif bits > 0:
        bits = (larger(bits, f.tiny) + (int64(1) << f.shift) - 1) >> f.shift << f.shift
        if bits == f.infinity:  # rounded up to it: the largest finite number
            bits = f.infinity - 1
    return bits


@inlined_tiny
def sent(bits, flag, f):
    """A scale on the wire: the largest finite number as if it were infinity, what is not finite as all ones."""
    return int64(-1) if bits == f.infinity else ((bits + 1) >> f.shift) << 1 | int64(flag)


@inlined_tiny
def received(code, f):
    """Bits of the scale that a code on the wire stands for."""
    bits = (code >> 1) << f.shift
    if bits > f.infinity:
        bits = f.infinity
    elif bits == f.infinity:
        bits = f.infinity - 1
    return bits
