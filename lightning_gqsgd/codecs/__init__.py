"""Codecs: the maths of quantisation, from coordinates to integer codes and back.

Each family of codes has a folder with two classes. The codec has the numbers of the paper: the number of levels, ω, and
what the codec can be combined with. The quantiser has the numbers that kernels need, and encodes and decodes in
readable PyTorch. To add a family, add a folder and a line in `_ALL`; docs/extending.md has a complete example. Fast
kernels can follow later (see `kernels.protocol.Kind`).
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
