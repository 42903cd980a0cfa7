"""Floating point numbers and their bits, in Triton.

``v`` and other numbers are in the compute type. ``c`` are the kernel's constants, see `constants.Constants`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FP16_LARGEST = tl.constexpr(torch.finfo(torch.float16).max)
_BF16_LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def one_and(draw):
    """1 + draw/2^16 in fp32, by its bits: a GPU converts integers at a quarter of the speed of other arithmetic."""
    return ((draw << 7) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def byte_as_float(code):
    """Returns an int32 from 0 to 255 in fp32, by its bits for the same reason."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def divided(x, y, c: tl.constexpr):
    """Returns the quotient, rounded correctly."""
    return x / y if c.number.compute == tl.float64 else tl.div_rn(x, y)


@triton.jit
def root(x, c: tl.constexpr):
    """Returns the square root, rounded correctly."""
    return tl.sqrt(x) if c.number.compute == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def positive_root(x, c: tl.constexpr):
    """Returns the square root of normal numbers above 0 that are not near the ends of the range, rounded correctly; NaN
    of infinity.

    One step of Newton's method from a GPU's fast reciprocal root: what NVIDIA's compiler makes of `sqrt.rn`, but for
    the branch to other numbers, which takes more instructions than the root.
    """
    if c.number.compute == tl.float64:
        y = tl.sqrt(x)
    else:
        inverse = tl.rsqrt(x)
        y = x * inverse
        y = tl.fma(tl.fma(-y, y, x), inverse * 0.5, y)
    return y


@triton.jit
def magnitudes(v, c: tl.constexpr):
    """Magnitudes as integers, which are ordered like them."""
    return v.to(c.number.integer, bitcast=True) & c.number.mask


@triton.jit
def clamped(v, limit):
    """Returns the numbers, clamped to the magnitude ``limit``."""
    return tl.minimum(tl.maximum(v, -limit), limit)


@triton.jit
def is_finite(v):
    """Returns which numbers are neither infinite nor NaN."""
    # In fp64, a magnitude takes more instructions than a difference.
    return (v - v) == 0 if v.dtype == tl.float64 else tl.abs(v) < float("inf")


@triton.jit
def in_finite_range(v, DTYPE: tl.constexpr, KEEPS_INFINITY: tl.constexpr, c: tl.constexpr):
    """Clamp numbers to the finite range of a dtype; see `wire.in_finite_range`. NaN stays NaN.

    Args:
        v: the numbers.
        DTYPE: the type that the numbers will be rounded to.
        KEEPS_INFINITY: whether infinite numbers stay so; otherwise they become finite, which takes fewer instructions.
    """
    if DTYPE.primitive_bitwidth < c.number.compute.primitive_bitwidth:
        LARGEST: tl.constexpr = _FP16_LARGEST if tl.float16 == DTYPE else _BF16_LARGEST
        limit = tl.full((), LARGEST, c.number.compute)
        if KEEPS_INFINITY:
            v = tl.where(is_finite(v), clamped(v, limit), v)
        else:
            v = tl.maximum(v, -limit, propagate_nan=tl.PropagateNan.ALL)
            v = tl.minimum(v, limit, propagate_nan=tl.PropagateNan.ALL)
    return v
