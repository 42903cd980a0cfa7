"""Kernels, the inner loops: `reference` (PyTorch, any device), `cpu` (Numba) and `cuda` (Triton).

All have the same functions, and `reference` defines the right results. The functions of `meta` compute nothing and
record the work that there would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch

from lightning_gqsgd.errors import ConfigError

#: The oldest Triton that supports attributes of constants, which the kernels use.
MIN_TRITON = (3, 4)

_readable: ContextVar[bool] = ContextVar("readable", default=False)


@contextmanager
def readable_kernels() -> Iterator[None]:
    """Context manager in which `kernels_for` returns `reference` for every device, to compare other kernels with."""
    token = _readable.set(True)
    try:
        yield
    finally:
        _readable.reset(token)


def kernels_for(device: torch.device) -> ModuleType:
    """Returns the fastest module whose functions take tensors on ``device``.

    Raises:
        ConfigError: if the device is a GPU and Triton is missing or too old, or a CPU and Numba must not compile.
    """
    if device.type == "cpu" and not _readable.get():
        _check_numba()
        return import_module(f"{__name__}.cpu")
    if device.type == "cuda" and not _readable.get():
        _check_triton()
        return import_module(f"{__name__}.cuda")
    if device.type == "meta":
        return import_module(f"{__name__}.meta")
    return import_module(f"{__name__}.reference")


@lru_cache(maxsize=1)
def _check_numba() -> None:
    if import_module("numba").config.DISABLE_JIT:
        raise ConfigError(
            "the environment variable NUMBA_DISABLE_JIT=1 keeps Numba from compiling the kernels for CPUs, which "
            "Python cannot run; unset it, or keep this model on plain DDP"
        )


@lru_cache(maxsize=1)
def _check_triton() -> None:
    version = triton_version()
    if version is None or tuple(int(part) for part in version.split(".")[:2]) < MIN_TRITON:
        wanted = ".".join(map(str, MIN_TRITON))
        raise ConfigError(
            f"gradients on a GPU need Triton {wanted} or newer, found {version or 'none'}: it comes with PyTorch 2.8 "
            "and newer for Linux; upgrade torch, or keep this model on plain DDP"
        )


def triton_version() -> str | None:
    """Returns the version of Triton, whose package has another name for AMD's GPUs; None if it is not installed."""
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return None
