"""experiment"""
import os
from numba import njit
_OPTIONS = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
def kernel(function):
    return njit(**_OPTIONS)(function)
_LL = dict(forceinline=True, no_cpython_wrapper=True)
_IR = dict(inline="always")
_M = dict(p.split("=") for p in os.environ.get("GQ", "loop=ll,mid=ir,top=ir,tiny=ir").split(","))
def _opt(k): return _LL if _M[k] == "ll" else _IR
def inlined(function):
    return njit(**_OPTIONS, **_opt("loop"))(function)
def inlined_mid(function):
    return njit(**_OPTIONS, **_opt("mid"))(function)
def inlined_top(function):
    return njit(**_OPTIONS, **_opt("top"))(function)
def inlined_tiny(function):
    return njit(**_OPTIONS, **_opt("tiny"))(function)
