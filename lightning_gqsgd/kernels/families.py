"""The fast kernels of each family of codes.

A quantiser names its family's package in its kind (`protocol.Kind`), so nothing here depends on a family. The package
has two modules beside its codec:

* ``cpu``, with the parts of kernels that `cpu.stages` calls: ``constants(q, dtype, sources)``, the numbers of a
  quantiser, typed for kernels; ``codec(q)``, the kernel that encodes, reduces and decodes (`cpu.blocks.codec_kernel`);
  ``is_for_sums(q)``, whether messages are added up; and, where codes can be added, ``summed(q)`` and ``combine``.
* ``cuda``, with ``FAMILY``, a `protocol.CodecKernels`.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from lightning_gqsgd.kernels.protocol import CodecKernels, Kind


def cpu_family(kind: Kind) -> ModuleType | None:
    """Returns the parts of a family's kernels for CPUs; None: the family has none."""
    return import_module(f"{kind.package}.cpu") if kind.package else None


def cuda_family(kind: Kind) -> CodecKernels | None:
    """Returns a family's kernels for GPUs; None: the family has none."""
    return import_module(f"{kind.package}.cuda").FAMILY if kind.package else None
