"""Triton's interpreter as the tests of kernels use it: rounding as a GPU does, with the instructions that are PTX, and
without work that is done twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit import ptx


class _NothingToRestore:
    def restore(self) -> None:
        """Leave the language as it is."""


@pytest.fixture
def rounds_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to the nearest bf16 number, where the interpreter cuts the mantissa off; and run PTX, which it refuses."""
    interpreter, tl = _modules()
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _ptx(interpreter, tl))
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    if not hasattr(interpreter._interpreter, "fma_fp32"):  # Triton before 3.9
        _mend(interpreter, monkeypatch)


@pytest.fixture
def without_ptx(rounds_like_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as for AMD's GPUs, and refuse PTX."""
    interpreter, tl = _modules()
    from lightning_gqsgd.kernels.cuda import ptx as instructions

    monkeypatch.setattr(instructions, "AVAILABLE", tl.constexpr(False))
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_inline_asm")


def _mend(interpreter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round x y + z once in float32, where the interpreter rounds twice; know the complement of unsigned numbers."""
    handle = interpreter.TensorHandle
    twice = interpreter.InterpreterBuilder.create_fma
    ones = interpreter.InterpreterBuilder.get_all_ones_value

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return twice(self, x, y, z)
        return handle(fma_32(x.data, y.data, z.data), z.dtype.scalar)

    def all_ones(self: Any, kind: Any) -> Any:
        numbers = np.dtype(interpreter._get_np_dtype(kind))
        if numbers.kind != "u":
            return ones(self, kind)
        return handle(np.full(1, np.iinfo(numbers).max, numbers), kind.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "get_all_ones_value", all_ones)


def fma_32(x: Any, y: Any, z: Any) -> Any:
    """Returns x y + z of float32 arrays, rounded once.

    The product is exact in float64. The sum is rounded to an odd last bit there, so that rounding it again to float32
    makes no further error (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums").
    """
    with np.errstate(all="ignore"):  # infinities
        product = np.multiply(x, y, dtype=np.float64)
        other = np.asarray(z, np.float64)
        total = product + other
        part = total - product
        error = (product - (total - part)) + (other - part)
        is_odd = (np.ascontiguousarray(total).view(np.int64) & 1).reshape(total.shape) == 1
        beside = np.nextafter(total, np.copysign(np.inf, error))
        inexact = np.isfinite(total) & (error != 0) & ~is_odd
        return np.where(inexact, beside, total).astype(np.float32)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels run about three times as fast, with the same results.

    The interpreter replaces all functions of the language at each call of a function, although they stay replaced until
    the kernel ends; and it computes each sum of integers once more in 64 bits, to see overflows, which hashes want.
    """
    interpreter, tl = _modules()
    monkeypatch.setattr(interpreter, "_patch_lang", _once(interpreter._patch_lang, (tl, tl.core)))
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow"):
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


class _Results:
    """What the interpreter makes of instructions."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get_result(self, number: int) -> Any:
        """Returns one result."""
        return self._results[number]


def _ptx(interpreter: Any, tl: Any) -> Any:
    """What takes the place of the interpreter's method."""

    def create(self: Any, text: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int) -> _Results:
        # Bytes have no sign in kernels; the type that is asked for here says nothing of it.
        kinds = [tl.uint8 if one.scalar == tl.int8 else one.scalar for one in types]
        outputs = [np.dtype(interpreter._get_np_dtype(kind)) for kind in kinds]
        arrays = ptx.run(text, [value.data for value in values], outputs, pack)
        return _Results([interpreter.TensorHandle(*one) for one in zip(arrays, kinds, strict=True)])

    return create


def _once(patch: Callable[[Any], Any], languages: tuple[Any, ...]) -> Callable[[Any], Any]:
    """A form of the interpreter's function that does nothing where all modules that a function uses are replaced."""

    @cache
    def used_by(function: Any) -> list[Any]:
        return [language for language in languages if any(value is language for value in function.__globals__.values())]

    def patch_once(function: Any) -> Any:
        if any(languages[1].is_builtin(language.load) for language in used_by(function)):
            return patch(function)
        return _NothingToRestore()

    return patch_once


def _modules() -> tuple[Any, Any]:
    """The interpreter, and the language."""
    return pytest.importorskip("triton.runtime.interpreter"), pytest.importorskip("triton.language")
