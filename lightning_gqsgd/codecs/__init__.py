"""Codecs: the maths of one direction, from coordinates to integer codes and back."""

from __future__ import annotations

from typing import Protocol

from lightning_gqsgd.codecs.exponential import ExponentialCodec
from lightning_gqsgd.codecs.linear import LinearCodec
from lightning_gqsgd.codecs.sign import SignCodec
from lightning_gqsgd.codecs.top_k import TopKCodec
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.wire import Quantiser

__all__ = ["Codec", "ExponentialCodec", "LinearCodec", "SignCodec", "TopKCodec", "codec_of"]


class Codec(Protocol):
    """Stateless, frozen and equal if its numbers are."""

    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """What the kernels need; ``summed``: codes are added over so many ranks, under scales that all ranks share."""
        ...

    def omega(self, dimension: int, summed: int = 1) -> float:
        """ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale; infinite if the codec is
        biased. ``summed``: of one rank's codes, where they are added over so many ranks."""
        ...

    def delta(self, dimension: int) -> float:
        """δ with E|C(x) - x|² <= (1-δ) |x|², for a biased codec C, or for C = Q/(1+ω)."""
        ...


def codec_of(config: GQSGDConfig) -> Codec:
    """The codec that a configuration names."""
    if config.codec == "exponential":
        return ExponentialCodec(config.bits, config.mantissa, config.levels)
    if config.codec == "sign":
        return SignCodec()
    if config.codec == "top_k":
        return TopKCodec(config.density)
    return LinearCodec(config.bits, config.dither, config.levels)
