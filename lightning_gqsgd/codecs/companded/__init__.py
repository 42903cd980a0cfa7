"""Levels that lie denser near zero: the codec, and its kernels for CPUs and GPUs."""

from __future__ import annotations

from lightning_gqsgd.kernels.families import register
from lightning_gqsgd.kernels.protocol import Kind

register(Kind.COMPANDED, __name__)
