"""Codecs: the maths of one direction, from coordinates to integer codes and back.

A family is one file with two classes. The codec has what follows from a configuration: how many levels, which ω, what
it can be combined with. Its quantiser has the numbers that kernels need, and the readable encoding and decoding. A new
family is a file, and a line in `CODECS`; fast kernels for it can follow (see `kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_gqsgd.codecs.base import Codec
from lightning_gqsgd.codecs.companded.codec import CompandedCodec
from lightning_gqsgd.codecs.eden.codec import EdenCodec
from lightning_gqsgd.codecs.exponential.codec import ExponentialCodec
from lightning_gqsgd.codecs.floats.codec import FloatCodec
from lightning_gqsgd.codecs.linear.codec import LinearCodec
from lightning_gqsgd.codecs.sign.codec import SignCodec
from lightning_gqsgd.codecs.top_k.codec import TopKCodec

if TYPE_CHECKING:
    from lightning_gqsgd.spec.fields import Fields

__all__ = [
    "CODECS",
    "Codec",
    "CompandedCodec",
    "EdenCodec",
    "ExponentialCodec",
    "FloatCodec",
    "LinearCodec",
    "SignCodec",
    "TopKCodec",
    "codec_of",
]

CODECS: dict[str, type[Codec]] = {
    "linear": LinearCodec,
    "companded": CompandedCodec,
    "eden": EdenCodec,
    "exponential": ExponentialCodec,
    "sign": SignCodec,
    "top_k": TopKCodec,
    "float": FloatCodec,
}


def codec_of(config: Fields) -> Codec:
    """The codec that a configuration names.

    Raises:
        ConfigError: see `Codec.of`.
    """
    return CODECS[config.codec].of(config)
