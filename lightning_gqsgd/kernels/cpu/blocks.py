"""The loops over blocks. They call a family's functions for one block.

Encoding, averaging and decoding are one kernel, because averaging a shard needs the code of the other two, and every
copy of this code takes seconds to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import int64

from lightning_gqsgd.kernels.cpu.casts import numbers, part
from lightning_gqsgd.kernels.cpu.jit import inlined, kernel
from lightning_gqsgd.kernels.cpu.loops import add_scaled, clamp, copy, divide, fetch_ahead, fill, is_finite
from lightning_gqsgd.kernels.cpu.rotation import rotate_block
from lightning_gqsgd.kernels.cpu.scales import Form
from lightning_gqsgd.kernels.layout import CODES, LENGTH, RAW, START

#: The largest number of blocks that a family handles together, and the largest length of such blocks. Each step of a
#: short block has to wait for the step before it. With several blocks, the processor runs a step of one block while
#: another block waits. Longer blocks would not fit into the fastest cache together.
TOGETHER = 4
LONGEST_TOGETHER = 512


class Constants(NamedTuple):
    """The constants of a kernel.

    Attributes:
        form: number formats.
        bits: bits of a code.
        each, rest: see `kernels.wire.Share`; in the compute dtype.
        roots: see `rotation.roots_of`. None: the codec does not rotate by itself.
        family: the constants of the family, a named tuple that the family's file defines, or None.
    """

    form: Form
    bits: int
    each: np.floating
    rest: np.floating
    roots: np.ndarray | None
    family: Any


class Received(NamedTuple):
    """Messages to decode, typed for the kernels.

    Attributes:
        memory: the messages, one after the other, uint8 [bytes].
        stride: bytes of a message.
        keys: dither keys of each source, see `dither.block_keys`. If there are no sources, nothing is decoded.
        own: number of the source whose coordinates are given, so that its message is not decoded; -1: no source.
    """

    memory: np.ndarray
    stride: int
    keys: np.ndarray
    own: int


class Sent(NamedTuple):
    """A message to write, typed for the kernels.

    Attributes:
        memory: the message, uint8 [bytes]. If it is empty, nothing is written.
        key: dither keys, see `dither.block_keys`.
        scales: bits of the scales to use, as integers as wide as the compute dtype, [number of blocks]. If it is empty,
            the scale of every block is its largest magnitude.
    """

    memory: np.ndarray
    key: np.ndarray
    scales: np.ndarray


class Scratch(NamedTuple):
    """Scratch space for the blocks that are handled together. Dither is computed in pairs, so there is space for one
    more coordinate.

    Attributes:
        u: dither, fp32.
        other: dither of another rank, fp32.
        codes: codes, uint8.
        mean: coordinates, in the compute dtype.
        own: coordinates of this rank, in the compute dtype.
        rotated: rotated coordinates, in the compute dtype.
        largest: bits of the largest magnitude of each block, int64.
        factors: a number for each block, in the compute dtype.
        flags: a truth value for each block.
    """

    u: np.ndarray
    other: np.ndarray
    codes: np.ndarray
    mean: np.ndarray
    own: np.ndarray
    rotated: np.ndarray
    largest: np.ndarray
    factors: np.ndarray
    flags: np.ndarray


def codec_kernel(name: str, write: Callable[..., Any], read: Callable[..., Any]) -> Any:
    """Returns the kernel that encodes, reduces and decodes the blocks of a family of codes, one after the other.

    Args:
        name: name of the kernel.
        write: compiled function ``write(values, given, block, key, c, s, wire)``. It writes a block's record. The bits
            of the block's scale are ``given``, or follow from the values if ``given`` is negative.
        read: compiled function ``read(wire, at, block, key, c, s, add, out)``. It writes a block's coordinates times
            ``c.each`` into ``out``, or adds them to ``out`` if ``add`` is true. The message starts at byte ``at`` of
            ``wire``.
    """

    @inlined
    def write_one(values, given, blocks, k, number, key, c, s, wire):
        write(values, given, blocks[k], key, c, s, wire)

    @inlined
    def read_one(wire, at, blocks, k, number, key, c, s, add, out):
        read(wire, at, blocks[k], key, c, s, add, out)

    return group_kernel(name, write_one, read_one, together=1)


def group_kernel(name: str, write: Callable[..., Any], read: Callable[..., Any], *, together: int = TOGETHER) -> Any:
    """Returns the kernel that encodes, reduces and decodes the blocks of a family of codes, several blocks together.

    The functions are like those of `codec_kernel`. But instead of a block, they get the block table, the number ``k``
    of the first block, and the number of blocks. These blocks have the same length and are contiguous in the gradient.
    Families that take more than one block do not support ``rotation``.

    Args:
        name: name of the kernel.
        write: compiled function ``write(values, given, blocks, k, number, key, c, s, wire)``.
        read: compiled function ``read(wire, at, blocks, k, number, key, c, s, add, out)``.
        together: the largest number of blocks that the functions take.
    """

    @inlined
    def number_together(blocks, k):
        """Returns the number of blocks from number ``k`` on that are handled together."""
        length = blocks[k, LENGTH]
        number = 1
        while number < together and k + number < blocks.shape[0] and length <= LONGEST_TOGETHER:
            goes_on = blocks[k + number, START] == blocks[k, START] + number * length
            is_alike = blocks[k + number, LENGTH] == length and blocks[k + number, RAW] == blocks[k, RAW] == 0
            if not (goes_on and is_alike):
                break
            number += 1
        return number

    @inlined
    def add_up(received, blocks, k, number, c, s, out):
        """Write the sum of blocks over the messages to decode, times ``c.each``. Messages are added in order."""
        block = blocks[k]
        add = False
        for source in range(received.keys.shape[0]):
            at = source * received.stride
            if block[RAW]:
                add_scaled(numbers(received.memory, at + block[CODES], out.size, c.form.zero), c.each, add, out)
                add = True
            elif source != received.own:
                read(received.memory, at, blocks, k, number, received.keys[source], c, s, add, out)
                add = True
        if not add:  # there is no message except for this rank's own
            fill(out, 0)

    @inlined
    def average(x, received, rotation, encodes, blocks, k, number, c, s, out):
        """Write the mean of blocks over all sources.

        If the mean is encoded again, it stays rotated, and this rank's coordinates are rotated, too. Otherwise, the
        decoded sum is rotated back.
        """
        add_up(received, blocks, k, number, c, s, out)
        block = blocks[k]
        has_own = received.own >= 0 and not block[RAW]
        own = part(x, block[START], out.size)
        if has_own and rotation is not None:
            copy(own, part(s.own, 0, out.size))
            own = part(s.own, 0, out.size)
        if not has_own and c.rest != 1:
            divide(out, c.rest)
        if rotation is not None and not block[RAW] and (has_own or not encodes):
            rotate_block(own if encodes else out, block, rotation, not encodes, s.u)
        if has_own:
            for i in range(number):
                own_block = part(own, i * block[LENGTH], block[LENGTH])
                out_block = part(out, i * block[LENGTH], block[LENGTH])
                if is_finite(own_block, c.form):
                    add_scaled(own_block, c.each, True, out_block)
                else:
                    fill(out_block, np.nan)
            if c.rest != 1:
                divide(out, c.rest)

    @kernel(name)
    def run(x, blocks, received, sent, rotation, c, s):
        """Decode messages into their mean, or encode coordinates or the mean.

        Args:
            x: coordinates in the compute dtype. They are read if nothing was received or if ``received.own`` is not -1,
                and written if nothing is sent.
            blocks: block table.
            received: the messages to decode, `Received`. None: the kernel is compiled without the code for decoding.
            sent: the message to write, `Sent`.
            rotation: the rotation, `Rotation`. None: no rotation.
            c: `Constants`.
            s: `Scratch`.

        Returns:
            The number of blocks of ``x`` that are not finite after decoding.
        """
        not_finite = 0
        writes = sent.memory.size > 0
        k = 0
        while k < blocks.shape[0]:
            number = number_together(blocks, k)
            for i in range(number):
                fetch_ahead(x, blocks, k + i)
            block = blocks[k]
            n = number * block[LENGTH]
            values = part(x, block[START], n)
            decodes = received is not None and received.keys.shape[0] > 0
            if received is not None and decodes:
                # This rank's coordinates have to stay until they are added.
                mean = part(s.mean, 0, n) if writes or received.own >= 0 else values
                average(x, received, rotation, writes, blocks, k, number, c, s, mean)
                if writes:
                    values = mean
                else:
                    if received.own >= 0:
                        copy(mean, values)
                    if block[RAW] or rotation is not None:  # such a block is handled alone
                        not_finite += not is_finite(values, c.form)
                    else:
                        # Without a rotation, a decoded block is NaN everywhere or nowhere, so its first number is
                        # enough. A call of `is_finite` for it would take a tenth of the time of a short block.
                        for i in range(number):
                            first = values[i * block[LENGTH]]
                            not_finite += first - first != 0
                    if c.form.limit < c.form.largest and not block[RAW]:
                        clamp(values, c.form.limit)
            if writes:
                if block[RAW]:
                    copy(values, numbers(sent.memory, block[CODES], n, c.form.zero))
                else:
                    if rotation is not None and not decodes:
                        copy(values, part(s.mean, 0, n))
                        values = part(s.mean, 0, n)
                        rotate_block(values, block, rotation, False, s.u)
                    given = int64(sent.scales[k]) if sent.scales.size else int64(-1)
                    write(values, given, blocks, k, number, sent.key, c, s, sent.memory)
            k += number
        return not_finite

    return run


def sum_kernel(name: str, read_sum: Callable[..., Any]) -> Any:
    """Returns the kernel that decodes sums of codes.

    Args:
        name: name of the kernel.
        read_sum: compiled function ``read_sum(wire, scale_bits, block, keys, c, s, out)``. It decodes a block's summed
            codes, and writes the mean into ``out``.
    """

    @kernel(name)
    def decode_sum(wire, scales, blocks, x, keys, c, s):
        """Write the mean of all blocks into ``x``. Returns the number of blocks that are not finite.

        Args:
            wire: the message of summed codes, uint8 [bytes].
            scales: bits of the scales, [number of blocks].
            blocks: block table.
            x: coordinates in the compute dtype.
            keys: dither keys of each rank, see `dither.block_keys`.
            c: `Constants`.
            s: `Scratch`.
        """
        not_finite = 0
        for k in range(blocks.shape[0]):
            fetch_ahead(x, blocks, k)
            block = blocks[k]
            mean = part(x, block[START], block[LENGTH])
            read_sum(wire, int64(scales[k]), block, keys, c, s, mean)
            not_finite += not is_finite(part(mean, 0, 1), c.form)
            if c.form.limit < c.form.largest:
                clamp(mean, c.form.limit)
        return not_finite

    return decode_sum
