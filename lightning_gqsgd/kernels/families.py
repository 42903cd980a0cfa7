"""The fast kernels of each family of codes.

A quantiser names its family's package in its kind (`protocol.Kind`), so nothing here depends on a family. The package
has two modules beside its codec:

* ``cpu``, with the parts of kernels that `cpu.stages` calls: ``constants(q, dtype, sources)``, the numbers of a
  quantiser, typed for kernels; and ``codec(q)``, the kernel that encodes, reduces and decodes
  (`cpu.blocks.codec_kernel`). Families whose codes can be added also have ``is_for_sums(q)``, whether the messages of a
  quantiser are added up; ``summed(q)``, the kernel that decodes sums; and, for sums of pairs, ``combine``.
* ``cuda``, with ``FAMILY``, a `protocol.CodecKernels`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from lightning_gqsgd.kernels.protocol import CodecKernels, Kind


def cpu_family(kind: Kind) -> ModuleType | None:
    """Returns the parts of a family's kernels for CPUs; None: the family has none."""
    return import_module(f"{kind.package}.cpu") if kind.package else None


@cache  # called at each launch
def cuda_family(kind: Kind) -> CodecKernels | None:
    """Returns a family's kernels for GPUs; None: the family has none."""
    return import_module(f"{kind.package}.cuda").FAMILY if kind.package else None
