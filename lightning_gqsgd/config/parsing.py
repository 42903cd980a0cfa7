"""Builds the codec that the fields of a configuration describe."""

from __future__ import annotations

from lightning_gqsgd.codecs import CODECS, Codec
from lightning_gqsgd.spec.fields import Fields


def codec_of(config: Fields) -> Codec:
    """Returns the codec that a configuration names.

    Raises:
        ConfigError: see `Codec.of`.
    """
    kind = CODECS[config.codec]
    return kind.of(config.num_bits, **{name: getattr(config, name) for name in kind.fields})
