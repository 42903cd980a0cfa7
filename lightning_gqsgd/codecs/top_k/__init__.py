"""The largest coordinates of each block, whole or at few bits: the codecs, and kernels for CPUs and GPUs."""

from __future__ import annotations

from lightning_gqsgd.kernels.families import register
from lightning_gqsgd.kernels.protocol import Kind

register(Kind.TOP_K, __name__)
