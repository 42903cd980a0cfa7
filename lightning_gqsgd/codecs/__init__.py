"""Codecs: the maths of one direction, from coordinates to integer codes and back.

A family is a folder. Its codec has the numbers of the paper: how many levels, which ω, what it can be combined with.
Its quantiser has the numbers that kernels need, and the readable encoding and decoding. A new family is a folder and a
line in `_ALL`, and docs/extending.md has a whole one. Fast kernels can follow (see `kernels.families`).
"""

from __future__ import annotations

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.companded.codec import CompandedCodec
from lightning_gqsgd.codecs.dct_top_k.codec import DctTopKCodec
from lightning_gqsgd.codecs.eden.codec import EdenCodec
from lightning_gqsgd.codecs.exponential.codec import ExponentialCodec
from lightning_gqsgd.codecs.floats.codec import FloatCodec
from lightning_gqsgd.codecs.linear.codec import LinearCodec
from lightning_gqsgd.codecs.sign.codec import SignCodec
from lightning_gqsgd.codecs.top_k.codec import TopKCodec
from lightning_gqsgd.codecs.trellis.codec import TrellisCodec

__all__ = [
    "CODECS",
    "Codec",
    "CompandedCodec",
    "DctTopKCodec",
    "EdenCodec",
    "ExponentialCodec",
    "FloatCodec",
    "LinearCodec",
    "SignCodec",
    "TopKCodec",
    "TrellisCodec",
]

_ALL: tuple[type[Codec], ...] = (
    LinearCodec,
    CompandedCodec,
    EdenCodec,
    TrellisCodec,
    ExponentialCodec,
    SignCodec,
    TopKCodec,
    DctTopKCodec,
    FloatCodec,
)
CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in _ALL}
