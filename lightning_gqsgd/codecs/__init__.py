"""Codecs: the maths of one direction, from coordinates to integer codes and back."""

from lightning_gqsgd.codecs.linear import LinearCodec

__all__ = ["LinearCodec"]
