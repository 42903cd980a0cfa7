"""The table of fast kernels by family of codes.

A family is a package that registers itself when it is imported, so that nothing here depends on it. It has up to two
modules beside its codec:

* ``cpu``, with the parts of kernels that `cpu.stages` calls: ``constants(q, dtype, sources)``, the numbers of a
  quantiser, typed for kernels; ``codec(q)``, the kernel that encodes, reduces and decodes (`cpu.blocks.codec_kernel`);
  ``is_for_sums(q)``, whether messages are added up; and, where codes can be added, ``summed(q)`` and ``combine``.
* ``cuda``, with ``FAMILY``, a `protocol.CodecKernels`.

A family that is not registered has the kernels of `reference`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lightning_gqsgd.kernels.protocol import CodecKernels, Kind

_PACKAGES: dict[Kind, str] = {}


def register(kind: Kind, package: str) -> None:
    """Say which package has a family's kernels."""
    _PACKAGES[kind] = package


def cpu_family(kind: Kind) -> ModuleType | None:
    """Returns the parts of a family's kernels for CPUs; None: the family has none."""
    package = _PACKAGES.get(kind)
    return None if package is None else import_module(f"{package}.cpu")


def cuda_family(kind: Kind) -> CodecKernels | None:
    """Returns a family's kernels for GPUs; None: the family has none."""
    package = _PACKAGES.get(kind)
    return None if package is None else import_module(f"{package}.cuda").FAMILY
