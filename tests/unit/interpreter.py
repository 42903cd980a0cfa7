"""Triton's interpreter as the tests of kernels use it: rounding as a GPU does, and without work that is done twice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch


class _NothingToRestore:
    def restore(self) -> None:
        """Leave the language as it is."""


@pytest.fixture
def rounds_like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to the nearest bf16 number; the interpreter cuts the mantissa off."""
    interpreter, tl = _modules()
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return values.to(torch.bfloat16).view(torch.int16).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


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
