"""Random Hadamard rotations of blocks, see `kernels.rotation`, which is the readable form."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import float32, types
from numba.extending import intrinsic

from lightning_gqsgd.kernels.cpu.casts import part
from lightning_gqsgd.kernels.cpu.dither import FIRST, dither
from lightning_gqsgd.kernels.cpu.jit import inlined, kernel, loop
from lightning_gqsgd.kernels.cpu.scales import float_type
from lightning_gqsgd.kernels.layout import LENGTH, RAW, START
from lightning_gqsgd.kernels.wire import Key


class Turn(NamedTuple):
    """A rotation, typed for the kernels.

    Attributes:
        key: the two keys of the random signs, uint32 [2].
        roots: see `roots_of`.
    """

    key: np.ndarray
    roots: np.ndarray

    @classmethod
    def of(cls, key: Key, block_size: int, dtype: torch.dtype) -> Turn:
        """Returns the rotation with a key, for blocks of at most ``block_size`` coordinates of a gradient dtype."""
        return cls(np.array(key, dtype=np.uint32), roots_of(block_size, dtype))


def roots_of(block_size: int, dtype: torch.dtype) -> np.ndarray:
    """Returns 2^(-e/2) for each exponent e of a power of two up to ``block_size``, in the compute dtype of a gradient
    dtype."""
    return (2.0 ** (-0.5 * np.arange(block_size.bit_length()))).astype(float_type(dtype))


#: Values that one step of `_first_stages` transforms.
_WIDTH = 8


@intrinsic
def _transform_eight(typing_context, values, first):
    """Replace eight values, from number ``first`` on, by the butterflies of distance 1, 2 and 4.

    LLVM does not vectorise loops that short, so this function makes vectors itself. In a butterfly, the sum takes the
    place of the value on the left, and the difference takes that of the value on the right. Both are the other value
    of the pair, plus the value times 1 or -1.
    """

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        number = context.get_data_type(signature.args[0].dtype)
        vector = ir.VectorType(number, _WIDTH)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), vector.as_pointer())
        alignment = context.get_abi_sizeof(number)
        eight = builder.load(place, align=alignment)
        for distance in (1, 2, 4):
            lanes = [lane ^ distance for lane in range(_WIDTH)]
            order = ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), lanes)
            factors = ir.Constant(vector, [-1.0 if lane & distance else 1.0 for lane in range(_WIDTH)])
            others = builder.shuffle_vector(eight, eight, order)
            eight = builder.fadd(others, builder.fmul(eight, factors))
        builder.store(eight, place, align=alignment)
        return context.get_dummy_value()

    return types.void(values, types.intp), generate


@loop
def _first_stages(values):
    """Returns the butterflies of distance 1, 2 and 4 of a multiple of eight values."""
    for j in range(0, values.size, _WIDTH):
        _transform_eight(values, j)


@loop
def _butterflies(left, right):
    """Replace two arrays by their sum and their difference."""
    for j in range(left.size):
        x = left[j]
        y = right[j]
        left[j] = x + y
        right[j] = x - y


@inlined
def hadamard(values, root):
    """Replace a power of two of values by their Hadamard transform; ``root``: the factor that makes it orthonormal."""
    n = values.size
    half = 1
    if n >= 8:
        _first_stages(values)
        half = 8
    while half < n:
        for first in range(0, n, 2 * half):
            _butterflies(part(values, first, half), part(values, first + half, half))
        half *= 2
    for j in range(n):
        values[j] *= root


@loop
def _flip(values, u):
    """Change the sign of the values whose dither is below 1/2."""
    for j in range(values.size):
        values[j] = -values[j] if u[j] < float32(0.5) else values[j]


@inlined
def turn_block(values, block, turn, inverse, u):
    """Turn the coordinates of a block in place, or back.

    Args:
        values: the coordinates.
        block: the block's row of the table.
        turn: the rotation, a `Turn`.
        inverse: whether to turn back.
        u: scratch space for the dither, fp32.
    """
    dither(turn.key, block, values.size, FIRST, u)
    if not inverse:
        _flip(values, u)
    start = 0
    for exponent in range(turn.roots.size - 1, -1, -1):
        if values.size & (1 << exponent):
            hadamard(part(values, start, 1 << exponent), turn.roots[exponent])
            start += 1 << exponent
    if inverse:
        _flip(values, u)


@kernel("rotate")
def rotate_blocks(x, blocks, turn, inverse, u):
    """Turn the coordinates of all blocks that are compressed; the arguments are those of `turn_block`."""
    for k in range(blocks.shape[0]):
        block = blocks[k]
        if not block[RAW]:
            turn_block(part(x, block[START], block[LENGTH]), block, turn, inverse, u)
