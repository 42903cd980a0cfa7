"""Decorators that compile functions, with the options of Numba that all kernels share.

Python calls kernels. All other compiled functions are parts of kernels. There are four kinds of parts:

* `inlined`: Numba copies the source of the part into its caller. The types of the part are inferred again in every
  caller. This kind is for parts that decide what happens to a block.
* `loop`: Numba compiles the part once, and LLVM copies the result into the caller. This kind is for loops over
  coordinates: their types are inferred once for all callers.
* `called`: the part stays a separate function. This kind is for long parts that are used in several places.
* `instruction`: a Python function generates the part's code in LLVM's language. This kind is for what Numba cannot say.

All of them use vectors of 512 bits if the processor gains by them. By default, LLVM uses 256 bits on all processors of
Intel, because the first ones with longer vectors lower their clock for them. Ice Lake and its successors do not.

Without inlining, LLVM could not move the checks for overlapping arrays out of the loop over blocks. This would cost a
factor of 6 on blocks of 64 coordinates.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import njit
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import PassManager, register_pass
from numba.core.funcdesc import FunctionDescriptor
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering
from numba.core.types import Type, void
from numba.core.typing import Signature
from numba.extending import intrinsic

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


class Code:
    """The code of a caller, to which an `instruction` adds its own. It has the methods of llvmlite's ``IRBuilder``.

    Attributes:
        context: Numba's context, which knows LLVM's types.
        types: Numba's types of the arguments.
        result: Numba's type of the result.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder, signature: Signature) -> None:
        self.context = context
        self.types = signature.args
        self.result = signature.return_type
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    @property
    def form(self) -> Any:
        """LLVM's type of the result."""
        return self.context.get_value_type(self.result)


def instruction(typed: Callable[..., Signature]) -> Callable[[Callable[..., Any]], Any]:
    """Decorator for a function that generates code in LLVM's language. It takes a `Code` and LLVM's values of the
    arguments, and returns LLVM's value of the result, or None.

    Args:
        typed: a function that takes Numba's types of the arguments, and returns the signature: ``lambda left, right:
            left(left, right)`` for a result of the first argument's type. Numba casts the arguments to the types in it.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def definition(typing_context: Any, *arguments: Type) -> tuple[Signature, Callable[..., Any]]:
            def generate(context: Any, builder: ir.IRBuilder, signature: Signature, values: Any) -> Any:
                result = function(Code(context, builder, signature), *values)
                return context.get_dummy_value() if signature.return_type == void else result

            return typed(*arguments), generate

        # Numba looks at the names of the arguments, and at how many there are. The first one is its own.
        definition.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return intrinsic(definition)

    return decorate
