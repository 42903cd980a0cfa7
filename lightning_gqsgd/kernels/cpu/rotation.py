"""Random Hadamard rotations of blocks on CPUs, in Numba; `kernels.rotation` has the readable form.

A transform takes few passes over a block. Each pass takes four vectors together, so it computes two or more stages of
butterflies with one load and one store. The first pass also computes the stages within a vector. Operations before the
first stage and after the last stage are part of these passes, see `transform`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import uint32

from lightning_gqsgd.kernels.cpu.casts import numbers, part
from lightning_gqsgd.kernels.cpu.dither import hashes
from lightning_gqsgd.kernels.cpu.jit import called, inlined, kernel, loop
from lightning_gqsgd.kernels.cpu.vectors import butterflies, filled, lanes, load, store
from lightning_gqsgd.kernels.layout import LENGTH, RAW, START
from lightning_gqsgd.kernels.wire import float_type


class Rotation(NamedTuple):
    """A rotation, typed for the kernels.

    Attributes:
        key: the key of the random signs, see `dither.block_keys`.
        roots: see `roots_of`.
    """

    key: np.ndarray
    roots: np.ndarray


def roots_of(block_size: int, dtype: torch.dtype) -> np.ndarray:
    """Returns 2^(-e/2) for each exponent e of a power of two up to ``block_size``, in the compute dtype of a gradient
    dtype."""
    return (2.0 ** (-0.5 * np.arange(block_size.bit_length()))).astype(float_type(dtype))


#: The smallest number of vectors of a block for `transform`.
FEWEST_VECTORS = 8


@inlined
def _two_stages(a, b, c, d):
    """Returns the vectors after butterflies of the pairs (a, b) and (c, d), and then of (a, c) and (b, d)."""
    e = a + b
    f = a - b
    g = c + d
    h = c - d
    return e + g, f + h, e - g, f - h


def transform(read: Callable[..., Any], write: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the compiled function ``run(source, z, n, root, target)``, which transforms blocks of n coordinates.

    Arguments of the function: ``source``, the argument for ``read``; ``z``, the coordinates of one or more blocks, one
    after the other, which are overwritten; ``n``, a power of two of at least `FEWEST_VECTORS` vectors; ``root``, the
    factor that makes the transform orthonormal; ``target``, the argument for ``write``.

    Args:
        read: compiled function ``read(source, n, i, j)``. It returns the four vectors of the coordinates of block i
            from number j on.
        write: compiled function ``write(z, n, i, j, a, b, c, d, target)``. It gets the vectors of the transformed
            coordinates of block i from numbers j, j + n/4, j + n/2 and j + 3n/4 on. It may write to these places of
            ``z``.
    """

    @loop
    def run(source, z, n, root, target):
        width = lanes(z)
        exponent = 0
        while width << exponent < n:
            exponent += 1
        # The other passes take two stages each, so the first pass takes one stage or two.
        in_pairs = exponent % 2 == 0
        for i in range(z.size // n):
            for j in range(0, n, 4 * width):
                a, b, c, d = read(source, n, i, j)
                a = butterflies(a)
                b = butterflies(b)
                c = butterflies(c)
                d = butterflies(d)
                if in_pairs:
                    a, b, c, d = _two_stages(a, b, c, d)
                else:
                    a, b, c, d = a + b, a - b, c + d, c - d
                first = i * n + j
                store(z, first, a)
                store(z, first + width, b)
                store(z, first + 2 * width, c)
                store(z, first + 3 * width, d)
        quarter = n // 4
        half = 4 * width if in_pairs else 2 * width
        if half < quarter:
            _middle_stages(z, n, half)
        factor = filled(root, load(z, 0))
        for i in range(z.size // n):
            for j in range(0, quarter, width):
                a, b, c, d = load_quarters(z, n, i, j)
                a, b, c, d = _two_stages(a, b, c, d)
                write(z, n, i, j, a * factor, b * factor, c * factor, d * factor, target)

    return run


@called
def _middle_stages(z, n, half):
    """Compute the butterflies of all distances from ``half`` on, except for the last two."""
    width = lanes(z)
    while 4 * half < n:
        for start in range(0, z.size, 4 * half):
            for j in range(start, start + half, width):
                a, b, c, d = _two_stages(load(z, j), load(z, j + half), load(z, j + 2 * half), load(z, j + 3 * half))
                store(z, j, a)
                store(z, j + half, b)
                store(z, j + 2 * half, c)
                store(z, j + 3 * half, d)
        half *= 4


@inlined
def load_in_a_row(z, n, i, j):
    """Returns four vectors of block i from number j on. This is a ``read`` function of `transform`."""
    first = i * n + j
    width = lanes(z)
    return load(z, first), load(z, first + width), load(z, first + 2 * width), load(z, first + 3 * width)


@inlined
def load_quarters(z, n, i, j):
    """Returns the vectors of block i from numbers j, j + n/4, j + n/2 and j + 3n/4 on."""
    first = i * n + j
    quarter = n // 4
    return load(z, first), load(z, first + quarter), load(z, first + 2 * quarter), load(z, first + 3 * quarter)


@inlined
def store_quarters(z, n, i, j, a, b, c, d, target):
    """Write the transformed vectors into ``target``. This is a ``write`` function of `transform`."""
    first = i * n + j
    quarter = n // 4
    store(target, first, a)
    store(target, first + quarter, b)
    store(target, first + 2 * quarter, c)
    store(target, first + 3 * quarter, d)


_transform = transform(load_in_a_row, store_quarters)


@loop
def _butterflies(left, right):
    """Replace two arrays by their sum and their difference."""
    for j in range(left.size):
        x = left[j]
        y = right[j]
        left[j] = x + y
        right[j] = x - y


@called
def _short_transform(values, root):
    """Replace values by their Hadamard transform. Their number is a power of two, and is too small for `transform`."""
    n = values.size
    half = 1
    if n >= lanes(values):
        half = lanes(values)
        for j in range(0, n, half):
            store(values, j, butterflies(load(values, j)))
    while half < n:
        for first in range(0, n, 2 * half):
            _butterflies(part(values, first, half), part(values, first + half, half))
        half *= 2
    for j in range(n):
        values[j] *= root


@called
def hadamard(values, root):
    """Replace values by their Hadamard transform. Their number is a power of two. ``root`` is the factor that makes the
    transform orthonormal."""
    if values.size >= FEWEST_VECTORS * lanes(values):
        _transform(values, values, values.size, root, values)
    else:
        _short_transform(values, root)


@loop
def _flip(values, words):
    """Change the sign of the values whose dither is below 1/2. ``words`` has the hashes, see `dither.hashes`."""
    half = (values.size + 1) // 2
    first = part(values, 0, half)
    second = part(values, half, values.size - half)
    for j in range(first.size):
        first[j] = first[j] if words[j] & uint32(1 << 15) else -first[j]
    for j in range(second.size):
        second[j] = second[j] if words[j] & uint32(1 << 31) else -second[j]


@inlined
def rotate_block(values, block, rotation, inverse, u):
    """Rotate the coordinates of a block in place, or back.

    Args:
        values: the coordinates.
        block: the block's row of the table.
        rotation: the rotation, a `Rotation`.
        inverse: whether to rotate back.
        u: scratch space, one 32-bit number for each coordinate.
    """
    words = numbers(u, 0, (values.size + 1) // 2, uint32(0))
    hashes(rotation.key, block, words)
    if not inverse:
        _flip(values, words)
    start = 0
    for exponent in range(rotation.roots.size - 1, -1, -1):
        if values.size & (1 << exponent):
            hadamard(part(values, start, 1 << exponent), rotation.roots[exponent])
            start += 1 << exponent
    if inverse:
        _flip(values, words)


@kernel("rotate")
def rotate_blocks(x, blocks, rotation, inverse, u):
    """Rotate the coordinates of all compressed blocks. ``rotation``, ``inverse`` and ``u``: see `rotate_block`."""
    for k in range(blocks.shape[0]):
        block = blocks[k]
        if not block[RAW]:
            rotate_block(part(x, block[START], block[LENGTH]), block, rotation, inverse, u)
