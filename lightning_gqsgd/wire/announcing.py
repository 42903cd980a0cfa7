"""Reports messages to the user during a training: at level INFO, or on stderr if no logging was set up."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lightning_gqsgd.kernels.cpu.cache import Compilation

logger = logging.getLogger(__name__)

#: Seconds after which a line says that a GPU's kernels are being compiled. Loading kernels from Triton's cache is
#: faster.
_SILENT_S = 3.0


def say(text: str) -> None:
    """Log a line at level INFO, or print it to stderr if no logging was set up.

    Use it for messages that should be seen by default, such as decisions that change the results of a training. Python
    drops messages at level INFO if no logging was set up.
    """
    if logger.hasHandlers():
        logger.info("%s", text)
    else:
        print_to_stderr(text)


def print_to_stderr(text: str) -> None:
    """Print a line to stderr. If stderr is closed, nothing is printed. Nothing is raised, because that should not end a
    training."""
    if sys.stderr is None:  # closed before Python started: `print` would take stdout, which may be read by a program
        return
    with suppress(OSError, ValueError):  # closed at its other end, or at this one
        print(text, file=sys.stderr, flush=True)


@contextmanager
def compilation_is_announced(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Say once that kernels are being compiled, if they are while this context lasts.

    On a CPU, the first kernel that is not in the cache is announced, as a warning if it cannot be kept for the next
    process. The process that compiles it prints the line: the other processes of the machine wait, and the first one
    may be among them. Triton does not tell which kernels are in its cache, so for a GPU the elapsed time decides.
    There, all processes of a machine compile, and only the first one prints the line.
    """
    if device.type == "cpu":
        from lightning_gqsgd.kernels.cpu.cache import watching  # Numba takes a second to import

        with watching(_Announcement(dtype)):
            yield
        return
    timer = threading.Timer(_SILENT_S, _say_of_a_gpu, [dtype])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say_of_a_gpu(dtype: torch.dtype) -> None:
    # Launchers number the processes of a machine; without a launcher, each process prints its own line.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _say_once(f"gqsgd: compiling GPU kernels for {dtype}, which takes up to a minute once")


@cache
def _say_once(text: str) -> None:
    """Say a line that several configurations would otherwise repeat at a start."""
    say(text)


class _Announcement:
    """Announces the first compilation for a CPU, and the first failure to keep compiled kernels."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._has_told = self._has_warned = False

    def __call__(self, compilation: Compilation) -> None:
        """Announce a compilation, unless a similar one was announced."""
        from lightning_gqsgd.kernels.cpu.cache import REMEDY

        if compilation.folder is None and not self._has_warned:
            self._has_told = self._has_warned = True
            logger.warning(
                "gqsgd: CPU kernels for %s are compiled, which takes some seconds, and every process will have to "
                "compile them again: %s. Remedy: %s.",
                self._dtype,
                compilation.reason,
                REMEDY,
            )
        elif not self._has_told:
            self._has_told = True
            _say_once(
                f"gqsgd: compiling CPU kernels for {self._dtype}, which takes some seconds once: {compilation.reason}. "
                f"They will be kept in {compilation.folder}."
            )
