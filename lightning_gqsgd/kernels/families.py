"""Finds the fast kernels of each family of codes.

The kind of a quantiser (`protocol.Kind`) names the package of its family, so nothing here depends on a family. The
package has two modules beside its codec:

* ``cpu`` has the functions that `cpu.stages` calls: ``numbers_of(q, dtype, sources)`` returns the family's
  constants for a quantiser, typed for kernels, and ``codec(q)`` returns the kernel that encodes, reduces and decodes
  (`cpu.blocks.codec_kernel`). Families whose codes can be added also have ``is_for_sums(q)``, which returns whether the
  messages of a quantiser are added, ``summed(q)``, which returns the kernel that decodes sums, and, for sums of pairs,
  ``combine``.
* ``cuda`` has ``FAMILY``, a `protocol.CodecKernels`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

from lightning_gqsgd.kernels.protocol import CodecKernels, Kind


def cpu_family(kind: Kind) -> ModuleType | None:
    """Returns the module ``cpu`` of a family, or None if the family has no kernels for CPUs."""
    return import_module(f"{kind.package}.cpu") if kind.package else None


@cache  # called at each launch
def cuda_family(kind: Kind) -> CodecKernels | None:
    """Returns a family's kernels for GPUs, or None if the family has no kernels for GPUs."""
    return import_module(f"{kind.package}.cuda").FAMILY if kind.package else None
