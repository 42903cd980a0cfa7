"""Instructions of NVIDIA's GPUs that Triton does not offer: permutations of bytes, and rounding downwards.

They are written in PTX, whose manual defines them. For AMD's GPUs, operations of Triton compute the same numbers. The
functions below without such a form are called by `floats` for NVIDIA's GPUs only. Triton's interpreter does not support
PTX; in tests, `tests/unit/interpreter.py` computes these instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Whether kernels are compiled for NVIDIA's GPUs: a PyTorch is built for those or for AMD's.
AVAILABLE = tl.constexpr(torch.version.hip is None)

_LOWER_NIBBLES = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_UPPER_NIBBLES = tl.constexpr("shr.u32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;")

# `prmt` composes a word from four bytes of two words. Each digit of the selector is the number of a byte. With 8 added
# to the digit, the byte's sign is repeated eight times. So the 16 bits of a draw, the byte of a code above them and the
# code's sign become one word.
_DRAWS_BELOW = tl.constexpr(
    "prmt.b32 $0, $4, $8, 0xC410; prmt.b32 $1, $5, $8, 0xD510; "
    "prmt.b32 $2, $6, $8, 0xE610; prmt.b32 $3, $7, $8, 0xF710;"
)
_UPPER_DRAWS_BELOW = tl.constexpr(
    "prmt.b32 $0, $4, $8, 0xC432; prmt.b32 $1, $5, $8, 0xD532; "
    "prmt.b32 $2, $6, $8, 0xE632; prmt.b32 $3, $7, $8, 0xF732;"
)
_FLIPPED = tl.constexpr("xor.b32 $0, $1, 0x80808080;")


@triton.jit
def lower_nibbles(x):
    """Returns the lower four bits of bytes, uint8."""
    if AVAILABLE:
        y = tl.inline_asm_elementwise(_LOWER_NIBBLES, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        y = x & 0x0F
    return y


@triton.jit
def upper_nibbles(x):
    """Returns the upper four bits of bytes, uint8."""
    if AVAILABLE:
        y = tl.inline_asm_elementwise(_UPPER_NIBBLES, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        y = x >> 4
    return y


@triton.jit
def less_128(x):
    """Returns bytes minus 128 in two's complement, uint8."""
    if AVAILABLE:
        x = tl.inline_asm_elementwise(_FLIPPED, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)
    else:
        x ^= 0x80
    return x


@triton.jit
def above_draws(x, draw, UPPER: tl.constexpr):
    """Returns 2^16 x + draw as int32.

    Args:
        x: numbers in two's complement, uint8.
        draw: words with the 16 bits of draws, uint32. The bits are in the lower half, or in the upper half if ``UPPER``
            is true.
    """
    if AVAILABLE:
        ASM: tl.constexpr = _UPPER_DRAWS_BELOW if UPPER else _DRAWS_BELOW
        y = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r,r,r,r", [draw, x], dtype=tl.int32, is_pure=True, pack=4)
    else:
        below = draw >> 16 if UPPER else draw & 0xFFFF
        y = (x.to(tl.int8, bitcast=True).to(tl.int32) << 16) | below.to(tl.int32)
    return y


@triton.jit
def half_above(draw, selector):
    """Returns 2^8 k + 2^7 for numbers k of 16 bits: k + 1/2 in units of 2^-8.

    Args:
        draw: words that contain k, uint32.
        selector: one of the constants below, int32. It gives the bytes of k in the word, and whether k has a sign.
    """
    if AVAILABLE:
        y = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x80, $2;", "=r,r,r", [draw, selector], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        shift = (selector & 0x20) >> 1  # 16 for the upper half
        sign = selector & 0x8000  # the highest bit of k, if it is a sign
        k = ((draw >> shift.to(tl.uint32)) & 0xFFFF).to(tl.int32)
        y = ((k ^ sign) - sign) * 256 + 128
    return y


#: Selectors for `half_above`: k is in the lower or upper half of a word, without or with a sign.
LOWER_UNSIGNED = tl.constexpr(0x5104)
UPPER_UNSIGNED = tl.constexpr(0x5324)
LOWER_SIGNED = tl.constexpr(0x9104)
UPPER_SIGNED = tl.constexpr(0xB324)


@triton.jit
def sum_rounded_down(x, y, z):
    """Returns x y + z in fp32, rounded downwards."""
    return tl.inline_asm_elementwise(
        "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def one_unless_zero(x):
    """Returns 1 for fp32 numbers that are not zero, including NaN, and 0 for zero: int32."""
    return tl.inline_asm_elementwise(
        "add.u32 $0, $1, $1; min.u32 $0, $0, 1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def approximate_reciprocal(x):
    """Returns 1/x in fp32 for normal numbers whose reciprocal is normal. The last bit may be wrong."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def unknown(x):
    """Returns an int32 about which the compiler knows nothing, so that it does not replace logical operations by
    selections. For AMD's GPUs, the compiler knows it."""
    if AVAILABLE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return x
