"""Instructions of NVIDIA's GPUs that Triton has no name for: bytes that change their places, and rounding downwards.

They are in PTX, which has the semantics. Triton's interpreter knows no PTX; `tests/unit/interpreter.py` computes it.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOWER_NIBBLES = tl.constexpr("and.b32 $0, $1, 0x0F0F0F0F;")
_UPPER_NIBBLES = tl.constexpr("shr.u32 $0, $1, 4; and.b32 $0, $0, 0x0F0F0F0F;")

# `prmt` makes a word of four bytes of two words; each digit of the selector is the number of a byte, and with 8 added,
# eight times that byte's sign. So the byte of a code above the 16 bits of a draw becomes one word with its sign.
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
    return tl.inline_asm_elementwise(_LOWER_NIBBLES, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def upper_nibbles(x):
    """Returns the upper four bits of bytes, uint8."""
    return tl.inline_asm_elementwise(_UPPER_NIBBLES, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def less_128(x):
    """Returns bytes less 128 in two's complement, uint8."""
    return tl.inline_asm_elementwise(_FLIPPED, "=r,r", [x], dtype=tl.uint8, is_pure=True, pack=4)


@triton.jit
def above_draws(x, draw, UPPER: tl.constexpr):
    """Returns 2^16 x + draw as int32.

    Args:
        x: numbers in two's complement, uint8.
        draw: words with 16 bits of each, uint32, in their lower half, or in the upper one if ``UPPER``.
    """
    ASM: tl.constexpr = _UPPER_DRAWS_BELOW if UPPER else _DRAWS_BELOW
    return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r,r,r,r", [draw, x], dtype=tl.int32, is_pure=True, pack=4)


@triton.jit
def half_above(draw, selector):
    """Returns 2^8 k + 2^7 for numbers k of 16 bits: k + 1/2 in units of 2^-8.

    Args:
        draw: words with k, uint32.
        selector: which bytes k has, and its sign if it has one: one of the constants below, int32.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0x80, $2;", "=r,r,r", [draw, selector], dtype=tl.int32, is_pure=True, pack=1
    )


#: Of `half_above`: k in the lower or upper half of a word, without or with a sign.
LOWER_UNSIGNED = tl.constexpr(0x5104)
UPPER_UNSIGNED = tl.constexpr(0x5324)
LOWER_SIGNED = tl.constexpr(0x9104)
UPPER_SIGNED = tl.constexpr(0xB324)


@triton.jit
def sum_rounded_down(x, y, z):
    """Returns x y + z, rounded downwards, in fp32."""
    return tl.inline_asm_elementwise(
        "fma.rm.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def one_unless_zero(x):
    """Returns 1 for fp32 numbers that are not zero, also for NaN, and 0 for zero, int32."""
    return tl.inline_asm_elementwise(
        "add.u32 $0, $1, $1; min.u32 $0, $0, 1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def approximate_reciprocal(x):
    """Returns 1/x in fp32, the last bit of which may be wrong, for normal numbers whose reciprocal is normal."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def unknown(x):
    """Returns an int32 of which the compiler knows nothing, so that it makes no choice of a logical operation."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
