"""Operations on floating-point numbers and their bits, in Triton.

``v`` and other numbers are in the compute type. ``c`` has the kernel's constants, see `constants.Constants`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lightning_gqsgd.kernels.cuda import ptx

_FP16_LARGEST = tl.constexpr(torch.finfo(torch.float16).max)
_BF16_LARGEST = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def one_and(draw):
    """Returns 1 + draw/2^16 in fp32, composed from its bits, because a GPU converts integers at a quarter of the speed
    of other arithmetic."""
    return ((draw << 7) | 0x3F800000).to(tl.float32, bitcast=True)


@triton.jit
def byte_as_float(code):
    """Returns an int32 from 0 to 255 in fp32, composed from its bits, which is faster than a conversion."""
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
    """Returns the square root of normal numbers above 0 that are not near the ends of the range, rounded correctly. The
    root of infinity is NaN.

    The root is one step of Newton's method from a GPU's fast reciprocal root. NVIDIA's compiler generates the same for
    `sqrt.rn`, but with a branch for other numbers, which takes more instructions than the root.
    """
    if c.number.compute == tl.float64 or not ptx.AVAILABLE:
        y = root(x, c)
    else:
        inverse = tl.rsqrt(x)
        y = x * inverse
        y = tl.fma(tl.fma(-y, y, x), inverse * 0.5, y)
    return y


@triton.jit
def quotient(x, y, inverse):
    """Returns x/y in fp32. It is rounded correctly if ``inverse`` is 1/y rounded, and if neither the quotient nor
    2^-24 x is near the ends of the range. This takes a third of the instructions of `divided`."""
    q = x * inverse
    return tl.fma(tl.fma(-q, y, x), inverse, q)


@triton.jit
def divided_by_scale(x, scale, c: tl.constexpr):
    """Returns the quotients of numbers from 1/2 to 2^8 and scales, rounded correctly.

    NVIDIA's compiler generates the same for a quotient, but with a branch for numbers near the ends of the range. Here,
    both numbers are first multiplied by 2^-8. Then none is near the ends, because scales are 2^-118 or more.
    """
    if c.number.compute == tl.float64 or not ptx.AVAILABLE:
        q = divided(x, scale, c)
    else:
        y = scale * 0.00390625
        inverse = ptx.approximate_reciprocal(y)
        inverse = tl.fma(tl.fma(-y, inverse, 1.0), inverse, inverse)
        q = quotient(x * 0.00390625, y, inverse)
    return q


@triton.jit
def rounded(v, rounder):
    """Returns the nearest integers to numbers that are not halfway between two integers. ``rounder`` is 1.5 times the
    power of two from which on all floats are integers. With a larger power, the result is zero."""
    return (v + rounder) - rounder


@triton.jit
def floor_plus(v, used, offset, c: tl.constexpr):
    """Returns floor(v) + offset if ``used`` is 1, and 0 if it is 0, as int32. Only the lowest 8 bits are meaningful.

    Args:
        v: numbers of the compute type below 2^22, [rows, half].
        used: 0 or 1, int32 [rows].
        offset: whole numbers below 2^8, fp32 [rows].
    """
    if c.number.compute == tl.float64 or not ptx.AVAILABLE:
        code = tl.floor(v).to(tl.int32) * used[:, None] + (offset.to(tl.int32) * used)[:, None]
    else:
        # The sum with 1.5 2^23 has an integer in its lowest bits. This is four times as fast as a conversion.
        factor = tl.where(used == 1, 1.0, 0.0)
        rounder = tl.where(used == 1, offset + 12582912.0, 12582912.0)
        code = ptx.sum_rounded_down(v, factor[:, None], rounder[:, None]).to(tl.int32, bitcast=True)
    return code


@triton.jit
def with_sign_of(v, x, c: tl.constexpr):
    """Returns non-negative numbers ``v`` with the signs of ``x``."""
    sign = x.to(c.number.integer, bitcast=True) & ~c.number.mask
    return (v.to(c.number.integer, bitcast=True) | sign).to(c.number.compute, bitcast=True)


@triton.jit
def magnitudes(v, c: tl.constexpr):
    """Returns magnitudes as integers, which are in the same order."""
    return v.to(c.number.integer, bitcast=True) & c.number.mask


@triton.jit
def clamped(v, limit):
    """Returns the numbers, clamped to the magnitude ``limit``; NaN stays NaN."""
    v = tl.maximum(v, -limit, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(v, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_finite(v):
    """Returns whether each number is neither infinite nor NaN."""
    # In fp64, a magnitude takes more instructions than a difference.
    return (v - v) == 0 if v.dtype == tl.float64 else tl.abs(v) < float("inf")


@triton.jit
def not_zero(v, c: tl.constexpr):
    """Returns 1 for numbers that are not zero, including NaN, and 0 for zero: int32."""
    # For a comparison in Triton, the compiler generates a selection, or masks whose bits are counted, which is slower.
    return tl.where(v != 0, 1, 0) if c.number.compute == tl.float64 or not ptx.AVAILABLE else ptx.one_unless_zero(v)


@triton.jit
def in_finite_range(v, DTYPE: tl.constexpr, KEEPS_INFINITY: tl.constexpr, c: tl.constexpr):
    """Clamp numbers to the finite range of a dtype; see `wire.in_finite_range`. NaN stays NaN.

    Args:
        v: the numbers.
        DTYPE: the type to which the numbers will be rounded.
        KEEPS_INFINITY: whether infinite numbers stay infinite. If not, they become finite, which takes fewer
            instructions.
    """
    if DTYPE.primitive_bitwidth < c.number.compute.primitive_bitwidth:
        LARGEST: tl.constexpr = _FP16_LARGEST if tl.float16 == DTYPE else _BF16_LARGEST
        limit = tl.full((), LARGEST, c.number.compute)
        v = tl.where(is_finite(v), clamped(v, limit), v) if KEEPS_INFINITY else clamped(v, limit)
    return v
