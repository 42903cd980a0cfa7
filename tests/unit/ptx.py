"""The instructions of PTX that kernels have as text, computed by NumPy, so that Triton's interpreter can run them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


def _prmt(x: Words, y: Words, selector: Words) -> Words:
    """Four bytes of two words: each digit of the selector is the number of a byte, and with 8 added, the byte's sign
    repeated."""
    numbers = [(word >> np.uint32(8 * place)) & 0xFF for word in (x, y) for place in range(4)]
    out = np.zeros_like(x)
    for place in range(4):
        digit = np.broadcast_to((selector >> np.uint32(4 * place)) & 0xF, x.shape)
        byte = np.choose(digit & 7, numbers)
        sign = np.where(byte & 0x80, 0xFF, 0).astype(np.uint32)
        out |= np.where(digit & 8, sign, byte).astype(np.uint32) << np.uint32(8 * place)
    return out


def _fma_rm(x: Words, y: Words, z: Words) -> Words:
    """x y + z in fp32, rounded downwards. The product is exact in fp64, and the sum's error there says which way it was
    rounded."""
    product, addend = (x.view(np.float32).astype(np.float64) * y.view(np.float32)), z.view(np.float32)
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    rounded = total.astype(np.float32)
    is_above = (rounded > total) | ((rounded == total) & (error < 0))
    return np.where(is_above, np.nextafter(rounded, np.float32(-np.inf)), rounded).astype(np.float32).view(np.uint32)


def _reciprocal(x: Words) -> Words:
    """1/x in fp32, rounded correctly: what a GPU computes may differ from it in the last bit."""
    with np.errstate(divide="ignore"):
        return (np.float32(1) / x.view(np.float32)).view(np.uint32)


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda x: x,
    "and.b32": lambda x, y: x & y,
    "xor.b32": lambda x, y: x ^ y,
    "add.u32": lambda x, y: x + y,
    "min.u32": np.minimum,
    "shr.u32": lambda x, y: x >> y,
    "prmt.b32": _prmt,
    "fma.rm.f32": _fma_rm,
    "rcp.approx.ftz.f32": _reciprocal,
}


def run(text: str, inputs: Sequence[NDArray[Any]], outputs: Sequence[np.dtype[Any]], pack: int) -> list[NDArray[Any]]:
    """Returns the results of instructions for all elements of arrays of one shape.

    Args:
        text: the instructions.
        inputs: the arrays.
        outputs: the types of the results.
        pack: elements that one run of the instructions takes: as many words of each array, or, of an array of bytes, as
            many bytes in one word.
    """
    shape = inputs[0].shape
    registers: dict[str, Words] = {}
    taken = sum(_words(dtype, pack) for dtype in outputs)
    for array in inputs:
        flat = np.ascontiguousarray(array).reshape(-1, pack)
        for column in flat.view(np.uint32).T:
            registers[f"${taken}"] = column
            taken += 1
    for instruction in filter(None, (one.strip() for one in text.split(";"))):
        name, target, *operands = re.split(r"[ ,]+", instruction)
        values = [registers[one] if one in registers else np.uint32(int(one, 0)) for one in operands]
        registers[target] = _INSTRUCTIONS[name](*values)
    results, first = [], 0
    for dtype in outputs:
        end = first + _words(dtype, pack)
        columns = np.stack([registers[f"${number}"] for number in range(first, end)], axis=1).astype(np.uint32)
        results.append(np.ascontiguousarray(columns).view(dtype).reshape(shape))
        first = end
    return results


def _words(dtype: np.dtype[Any], pack: int) -> int:
    """Returns how many words the elements of one run take."""
    return pack * dtype.itemsize // 4
