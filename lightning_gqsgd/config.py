"""What to compress and how: one frozen, validated value."""

from __future__ import annotations

import difflib
import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

CODECS = ("linear",)
DITHERS = ("adaptive", "subtractive", "stochastic")
SCALES = ("auto", "global", "local")
REDUCERS = ("auto", "native", "sum", "two_shot", "gather")

#: Which block scales each quantising reducer works with: sums of integers need one scale for all ranks.
REDUCER_SCALE = {"sum": "global", "two_shot": "local", "gather": "local"}


class ConfigError(ValueError):
    """A configuration that cannot work: the message names the value, the limit and the remedy."""


@dataclass(frozen=True, kw_only=True)
class GQSGDConfig:
    """Compression of a gradient allreduce.

    Attributes:
        codec: ``"linear"``, uniform levels with dither (QSGD, arXiv 1610.02132; Global-QSGD, arXiv 2305.18627).
        bits: bits per coordinate on the wire, 1 to 8, whatever the number of ranks. 1 excludes stochastic rounding.
        block_size: coordinates of one parameter that share a scale; a multiple of 8 from 16 to 65536.
        scale: ``"global"`` (the maximum over ranks), ``"local"`` (each rank its own) or ``"auto"`` (what the reducer
            uses).
        dither: ``"subtractive"`` (the receiver takes the dither off again: error variance Δ²/12), ``"stochastic"``
            (stochastic rounding: Δ²/6 on average, zeros stay zeros) or ``"adaptive"`` (in each block the one with the
            smaller error: stochastic where more than about half is zero; with the reducer ``"sum"``, subtractive).
        reducer: ``"sum"``, ``"two_shot"``, ``"gather"``, ``"native"`` (no compression) or ``"auto"`` (least predicted
            error).
        min_numel: parameters with fewer elements travel uncompressed inside the same messages.
        exclude: shell-style patterns of parameter names that travel uncompressed, e.g. ``("*.embedding.*",)``.
        warmup_steps: number of first steps in which everything travels uncompressed.
        seed: key of the counter-based dither; equal on all ranks.
        sample_every: measure the relative error on a sample of coordinates every this many steps; 0 switches it off.

    Raises:
        ConfigError: a value out of its range, or a combination that cannot work.
    """

    codec: str = "linear"
    bits: int = 8
    block_size: int = 256
    scale: str = "auto"
    dither: str = "adaptive"
    reducer: str = "auto"
    min_numel: int = 1024
    exclude: tuple[str, ...] = ()
    warmup_steps: int = 0
    seed: int = 0
    sample_every: int = 100

    def __post_init__(self) -> None:
        _one_of("codec", self.codec, CODECS)
        _one_of("scale", self.scale, SCALES)
        _one_of("dither", self.dither, DITHERS)
        _one_of("reducer", self.reducer, REDUCERS)
        _in_range("bits", self.bits, 1, 8)
        _in_range("block_size", self.block_size, 16, 65536)
        if self.block_size % 8:
            raise ConfigError(f"block_size={self.block_size} is not a multiple of 8; take e.g. 256")
        _in_range("min_numel", self.min_numel, 0, 2**63 - 1)
        _in_range("warmup_steps", self.warmup_steps, 0, 2**63 - 1)
        _in_range("sample_every", self.sample_every, 0, 2**63 - 1)
        _in_range("seed", self.seed, 0, 2**63 - 1)
        if isinstance(self.exclude, str) or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigError(f"exclude={self.exclude!r} must be a sequence of patterns, e.g. ('*.bias',)")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.bits == 1 and self.dither == "stochastic":
            raise ConfigError(
                "bits=1 cannot hold the three levels (-1, 0, 1) of stochastic rounding; "
                "take bits=2 or dither='subtractive'"
            )
        if self.bits == 1 and (self.reducer == "sum" or self.scale == "global"):
            raise ConfigError("bits=1 leaves no room to sum the codes of two ranks; take bits=2 or reducer='two_shot'")
        needed = REDUCER_SCALE.get(self.reducer)
        if needed and self.scale not in ("auto", needed):
            fitting = [name for name, scale in REDUCER_SCALE.items() if scale == self.scale]
            raise ConfigError(
                f"scale={self.scale!r} does not fit reducer={self.reducer!r}, which needs {needed} scales; "
                f"take scale='auto' or one of the reducers {', '.join(fitting)}"
            )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all fields, in order."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def check_names(cls, names: Any) -> None:
        """Raise ConfigError for a name that is no field, with the nearest one that is."""
        for name in names:
            if name not in cls.field_names():
                near = difflib.get_close_matches(name, cls.field_names(), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown field {name!r}{hint} (fields: {', '.join(cls.field_names())})")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, safe in checkpoints and messages."""
        return {**asdict(self), "exclude": list(self.exclude)}

    def dither_key(self, step: int, stream: int) -> tuple[int, int]:
        """Two 32-bit keys of the dither of one step and one stream (rank + 1 upwards, 0 for the mean on its way back).

        blake2b over (seed, step, stream): streams of neighbouring steps and ranks share no structure.
        """
        text = b"".join(value.to_bytes(8, "little") for value in (self.seed, step, stream))
        digest = hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def describe_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The entries in which two flat dictionaries differ, as ``name: mine != theirs``."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name}: {json.dumps(mine.get(name))} != {json.dumps(theirs.get(name))}" for name in names)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _in_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: {low} to {high}")
