"""Decorators that compile functions, with the options of Numba that all kernels share.

Python calls kernels. All other compiled functions are parts of kernels. There are three kinds of parts:

* `inlined`: Numba copies the source of the part into its caller. The types of the part are inferred again in every
  caller. This kind is for parts that decide what happens to a block.
* `loop`: Numba compiles the part once, and LLVM copies the result into the caller. This kind is for loops over
  coordinates: their types are inferred once for all callers.
* `called`: the part stays a separate function. This kind is for long parts that are used in several places.

All of them use vectors of 512 bits if the processor gains by them. By default, LLVM uses 256 bits on all processors of
Intel, because the first ones with longer vectors lower their clock for them. Ice Lake and its successors do not.

Without inlining, LLVM could not move the checks for overlapping arrays out of the loop over blocks. This would cost a
factor of 6 on blocks of 64 coordinates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding
from numba import njit
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.funcdesc import FunctionDescriptor
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

from lightning_gqsgd.kernels.cpu.cache import KernelCache

#: An instruction set that was introduced with Ice Lake.
_SINCE_ICE_LAKE = "avx512vbmi2"
_LONG_VECTORS = '"prefer-vector-width"="512"'


def _gains_by_long_vectors() -> bool:
    return bool(binding.get_host_cpu_features().get(_SINCE_ICE_LAKE))


class _Lower(Lower):
    """Lowers a function to LLVM's language, with an attribute that allows long vectors."""

    def setup_function(self, fndesc: FunctionDescriptor) -> None:
        super().setup_function(fndesc)
        if _gains_by_long_vectors():
            set.add(self.function.attributes, _LONG_VECTORS)  # llvmlite's method accepts only attributes without values


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    """Numba's lowering step with the class `_Lower`."""

    _name = "native_lowering_of_gqsgd"

    @property
    def lowering_class(self) -> type[Lower]:
        return _Lower


class _Compiler(CompilerBase):
    """Numba's compiler with the step `_Lowering`."""

    def define_pipelines(self) -> list[PassManager]:
        steps = DefaultPassBuilder.define_nopython_pipeline(self.state)
        steps.passes = [(_Lowering if step is NativeLowering else step, name) for step, name in steps.passes]
        steps.finalize()
        return [steps]


#: Kernels do not count references, because counting takes longer than the arithmetic of a block. Nothing is allocated
#: inside of a kernel. Kernels run without the GIL. Divisions by zero give infinity or NaN, as in NumPy.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "_nrt": False,
    "no_cfunc_wrapper": True,
    "pipeline_class": _Compiler,
}
#: Parts are not called from Python.
_PART: dict[str, Any] = {**_OPTIONS, "no_cpython_wrapper": True}


def kernel(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that Python calls. Its machine code is kept on disk.

    Args:
        name: name of the kernel. It must be unique in the package, because it is part of the file's name in the cache.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ = name
        compiled = njit(**_OPTIONS)(function)
        compiled._cache = KernelCache(name)
        return compiled

    return decorate


def loop(function: Callable[..., Any]) -> Any:
    """Decorator for a part that LLVM inlines."""
    return njit(**_PART, forceinline=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorator for a part that Numba inlines."""
    return njit(**_PART, inline="always")(function)


def called(function: Callable[..., Any]) -> Any:
    """Decorator for a part that stays a separate function."""
    return njit(**_PART)(function)
