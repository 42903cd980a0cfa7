"""What to compress and how: one frozen, validated value."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

CODECS = ("linear", "exponential", "sign", "top_k")
DITHERS = ("adaptive", "subtractive", "stochastic", "nearest")
SCALES = ("auto", "global", "local")
NORMS = ("max", "l2", "power_of_two")
SCALE_PER = ("block", "parameter")
CODERS = ("fixed", "elias")
REDUCERS = ("auto", "native", "sum", "two_shot", "gather", "tree", "hierarchical")

#: Which block scales each quantising reducer works with: sums of codes need one scale for all ranks.
REDUCER_SCALES = {
    "sum": ("global",),
    "tree": ("global",),
    "two_shot": ("local",),
    "gather": ("local", "global"),
}

#: The mantissa bits that an exponential code can have: with more, its levels are nearly linear.
MAX_MANTISSA = 3


class ConfigError(ValueError):
    """A configuration that cannot work: the message names the value, the limit and the remedy."""


@dataclass(frozen=True)
class Memory:
    """What one direction of a reducer remembers, for each compressed coordinate.

    With the input x, the error memory e and the reference h (both zero at first), and Q the codec there and back:

        u = x + alpha e - h;   e <- beta e + (x - h - Q(u));   h <- h + rho Q(u);   the receiver takes Q(u) + h.

    Attributes:
        alpha: weight of remembered error in what is sent; None: 1/(1 + ω), the best one (ECQ-SGD, arXiv 1806.08054).
        beta: how much of the old error is kept.
        rho: step of the reference; None: 1/(2 (1 + ω)) (DIANA; Artemis, arXiv 2006.14591). 0: there is none.
    """

    alpha: float | None
    beta: float
    rho: float | None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is None and name != "beta":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ConfigError(f"memory {name}={value!r} is out of range: 0 to 1")

    @property
    def keeps_error(self) -> bool:
        """Whether there is an error memory."""
        return self.alpha != 0

    @property
    def keeps_reference(self) -> bool:
        """Whether there is a reference."""
        return self.rho != 0


#: Names for usual memories: classic error feedback; ECQ-SGD; DIANA and Artemis; EF21, which is Markov compression.
MEMORIES: dict[str, Memory | None] = {
    "none": None,
    "ef": Memory(1.0, 1.0, 0.0),
    "ecq": Memory(None, 1.0, 0.0),
    "diana": Memory(0.0, 0.0, None),
    "ef21": Memory(0.0, 0.0, 1.0),
}


@dataclass(frozen=True, kw_only=True)
class GQSGDConfig:
    """Compression of a gradient allreduce.

    Attributes:
        codec: ``"linear"``, uniform levels with dither (QSGD, arXiv 1610.02132; Global-QSGD, arXiv 2305.18627);
            ``"exponential"``, powers of two with ``mantissa`` bits in between (natural compression, arXiv 1905.10988);
            ``"sign"``, one bit and the block's mean magnitude; ``"top_k"``, the largest coordinates of each block. The
            last two are biased, so they need a memory.
        bits: bits per coordinate on the wire, 1 to 8, whatever the number of ranks. 1 excludes stochastic rounding; an
            exponential code has at least 2; sign has 1; top_k sends what it keeps whole, which is written as 32.
        levels: number of non-zero magnitudes (s of the papers) of a stochastic linear or an exponential code; None: as
            many as fit.
        mantissa: bits between two powers of two of an exponential code, 0 to 3.
        density: share of coordinates that top_k keeps, of each block rounded up.
        block_size: coordinates of one parameter that share a scale; a multiple of 8 from 16 to 65536.
        norm: what the scale is: ``"max"``, the largest magnitude; ``"l2"``; ``"power_of_two"``, the largest magnitude
            rounded up to one.
        clip: the scale is at most so many standard deviations, and what is larger is clipped (TernGrad, arXiv
            1705.07878), which is a bias; 0: no limit.
        scale: ``"global"`` (the maximum over ranks), ``"local"`` (each rank its own) or ``"auto"`` (what the reducer
            uses).
        scale_per: ``"block"`` or ``"parameter"``: what a norm is computed of.
        dither: ``"subtractive"`` (the receiver takes the dither off again: error variance Δ²/12), ``"stochastic"``
            (stochastic rounding: Δ²/6 on average, zeros stay zeros), ``"adaptive"`` (in each block the one with the
            smaller error: stochastic where more than about half is zero; with the reducer ``"sum"``, subtractive; with
            other codecs than linear, what they have) or ``"nearest"`` (no dither: biased, so it needs a memory).
        rotation: turn each block by a random Hadamard matrix first, which spreads large coordinates over all.
        coder: ``"fixed"`` width, or ``"elias"``: Elias omega codes (QSGD), for the reducer ``"gather"`` on the CPU.
        reducer: ``"sum"``, ``"two_shot"``, ``"gather"``, ``"tree"`` (exponential codes are added in pairs),
            ``"hierarchical"`` (native inside each node; between nodes, what "auto" is for so many ranks), ``"native"``
            (no compression) or ``"auto"`` (least predicted error).
        node_size: consecutive ranks on each node, for the reducer ``"hierarchical"``; 0: LOCAL_WORLD_SIZE, which
            torchrun sets.
        memory: of what a rank sends: ``"none"``, ``"ef"``, ``"ecq"``, ``"diana"``, ``"ef21"``, a `Memory` or its three
            numbers by name; ``"auto"``: none, where the codec is unbiased.
        memory_down: of what the owner of a shard sends back, with the reducer ``"two_shot"``.
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
    levels: int | None = None
    mantissa: int = 0
    density: float = 0.01
    block_size: int = 256
    norm: str = "max"
    clip: float = 0.0
    scale: str = "auto"
    scale_per: str = "block"
    dither: str = "adaptive"
    rotation: bool = False
    coder: str = "fixed"
    reducer: str = "auto"
    node_size: int = 0
    memory: str | Memory = "auto"
    memory_down: str | Memory = "auto"
    min_numel: int = 1024
    exclude: tuple[str, ...] = ()
    warmup_steps: int = 0
    seed: int = 0
    sample_every: int = 100

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _one_of(name, getattr(self, name), allowed)
        for name, (low, high) in _RANGES.items():
            _in_range(name, getattr(self, name), low, high)
        if self.block_size % 8:
            raise ConfigError(f"block_size={self.block_size} is not a multiple of 8; take e.g. 256")
        if self.levels is not None:
            _in_range("levels", self.levels, 1, 2**63 - 1)
        if not isinstance(self.rotation, bool):
            raise ConfigError(f"rotation={self.rotation!r} must be True or False")
        _number_in_range("density", self.density, 0, 1)
        _number_in_range("clip", self.clip, 0, 1e6)
        if isinstance(self.exclude, str) or not all(isinstance(pattern, str) for pattern in self.exclude):
            raise ConfigError(f"exclude={self.exclude!r} must be a sequence of patterns, e.g. ('*.bias',)")
        object.__setattr__(self, "exclude", tuple(self.exclude))
        for name in ("memory", "memory_down"):
            object.__setattr__(self, name, _memory(name, getattr(self, name)))
        _check_codec(self)
        _check_scales(self)
        _check_memory(self)

    @property
    def biased(self) -> bool:
        """Whether the codec's mean is not its input, so that it needs a memory. (Clipping is a bias that is meant.)"""
        return self.codec in ("sign", "top_k") or self.dither == "nearest"

    @property
    def up(self) -> Memory | None:
        """The memory of what a rank sends."""
        return _named_memory(self.memory)

    @property
    def down(self) -> Memory | None:
        """The memory of what the owner of a shard sends back."""
        return _named_memory(self.memory_down)

    @property
    def remembers(self) -> bool:
        """Whether there is a memory, in either direction."""
        return self.up is not None or self.down is not None

    def describe(self) -> str:
        """Bits per coordinate and what they are, e.g. ``8 bits (linear, adaptive dither, blocks of 256)``."""
        bits, what = f"{self.bits}", [self.codec]
        if self.codec == "linear":
            what.append(f"{self.dither} dither" if self.dither != "nearest" else "nearest level")
        elif self.codec == "exponential":
            what.append(f"{self.mantissa} mantissa bits")
        elif self.codec == "top_k":
            bits, what = f"{self.density * (32 + 16):.3g}", [f"top_k, {self.density:.3g} of all coordinates"]
        what += ["rotated"] if self.rotation else []
        what += ["Elias codes"] if self.coder == "elias" else []
        what.append(f"blocks of {self.block_size}" if self.scale_per == "block" else "one scale per parameter")
        for way, memory in (("", self.up), (" on the way back", self.down)):
            if memory is not None:
                numbers = ", ".join(f"{name} {value:.3g}" for name, value in asdict(memory).items() if value)
                what.append(f"memory{way}: {numbers}")
        return f"{bits} bits ({', '.join(what)})"

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all fields, in order."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def check_names(cls, names: Any) -> None:
        """Raise ConfigError for a name that is no field, with the nearest one that is."""
        for name in names:
            if name not in cls.field_names():
                hint = did_you_mean(name, cls.field_names())
                raise ConfigError(f"unknown field {name!r}{hint} (fields: {', '.join(cls.field_names())})")

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, safe in checkpoints and messages."""
        return {**asdict(self), "exclude": list(self.exclude)}

    def dither_key(self, step: int, stream: int) -> tuple[int, int]:
        """Two 32-bit keys of the dither of one step and one stream (see `reducers.base.StepKeys`).

        blake2b over (seed, step, stream): streams of neighbouring steps and ranks share no structure.
        """
        text = b"".join(value.to_bytes(8, "little") for value in (self.seed, step, stream))
        digest = hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name nearest to an unknown one, as the end of a sentence; empty where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def describe_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The entries in which two flat dictionaries differ, as ``name: mine != theirs``."""
    names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    return ", ".join(f"{name}: {json.dumps(mine.get(name))} != {json.dumps(theirs.get(name))}" for name in names)


def _check_codec(config: GQSGDConfig) -> None:
    codec, bits = config.codec, config.bits
    whole = {"sign": 1, "top_k": 32}
    if codec in whole and bits != whole[codec]:
        raise ConfigError(f"codec={codec!r} has bits={whole[codec]}, not {bits}")
    if codec not in whole:
        _in_range("bits", bits, 1, 8)
    if codec == "exponential" and bits < 2:
        raise ConfigError("codec='exponential' needs a bit for the sign and one for the magnitude; take bits=2 or more")
    if codec != "linear" and config.dither not in ("adaptive", "stochastic"):
        raise ConfigError(f"dither={config.dither!r} is for codec='linear'; leave it out with codec={codec!r}")
    if bits == 1 and config.dither == "stochastic" and codec == "linear":
        raise ConfigError(
            "bits=1 cannot hold the three levels (-1, 0, 1) of stochastic rounding; take bits=2 or dither='subtractive'"
        )
    if config.mantissa and codec != "exponential":
        raise ConfigError(f"mantissa={config.mantissa} is for codec='exponential', not {codec!r}")
    if codec == "top_k" and not config.density:
        raise ConfigError("density=0 keeps nothing; take e.g. density=0.01")
    if config.rotation and codec == "top_k":
        raise ConfigError("rotation=True leaves no large coordinates for codec='top_k' to keep; take rotation=False")
    if config.rotation and config.block_size & (config.block_size - 1):
        raise ConfigError(f"rotation=True needs a block_size that is a power of two, not {config.block_size}")
    if config.levels is not None:
        _check_levels(config)


def _check_levels(config: GQSGDConfig) -> None:
    if config.codec in ("sign", "top_k") or (config.codec == "linear" and config.dither != "stochastic"):
        raise ConfigError(
            f"levels={config.levels} is for codec='exponential', or 'linear' with dither='stochastic'; leave it out"
        )
    limit = 2 ** (config.bits - 1) - 1
    if config.levels is not None and config.levels > limit:
        raise ConfigError(f"levels={config.levels} do not fit bits={config.bits}, which holds {limit}; take more bits")


def _check_scales(config: GQSGDConfig) -> None:
    codec, reducer, scale = config.codec, config.reducer, config.scale
    if codec in ("sign", "top_k"):
        for name, usual in (("norm", "max"), ("clip", 0.0), ("scale_per", "block")):
            if getattr(config, name) != usual:
                raise ConfigError(
                    f"{name}={getattr(config, name)!r} is not for codec={codec!r}, which has no such scale"
                )
    if codec in ("sign", "top_k") and (scale == "global" or reducer == "sum"):
        raise ConfigError(f"codec={codec!r} has no scale that ranks could share; take reducer='two_shot' or 'gather'")
    if reducer == "sum" and codec == "exponential":
        raise ConfigError("reducer='sum' cannot add exponential codes; take reducer='tree' or 'two_shot'")
    if reducer == "tree" and (codec != "exponential" or config.mantissa):
        raise ConfigError("reducer='tree' adds powers of two: it needs codec='exponential' with mantissa=0")
    if config.bits == 1 and (reducer == "sum" or scale == "global"):
        raise ConfigError("bits=1 leaves no room to sum the codes of two ranks; take bits=2 or reducer='two_shot'")
    if config.coder == "elias" and (reducer != "gather" or codec != "linear" or config.dither != "stochastic"):
        raise ConfigError("coder='elias' is for codec='linear' with dither='stochastic' and reducer='gather'")
    if config.node_size and reducer != "hierarchical":
        raise ConfigError(f"node_size={config.node_size} is for reducer='hierarchical', not {reducer!r}; leave it out")
    if reducer == "hierarchical" and config.scale_per == "parameter":
        raise ConfigError(
            "reducer='hierarchical' divides parameters among the ranks of a node, so they cannot have one scale each: "
            "take scale_per='block'"
        )
    fitting = REDUCER_SCALES.get(reducer)
    if fitting and scale not in ("auto", *fitting):
        others = [name for name, scales in REDUCER_SCALES.items() if scale in scales]
        raise ConfigError(
            f"scale={scale!r} does not fit reducer={reducer!r}, which needs {fitting[0]} scales; "
            f"take scale='auto' or one of the reducers {', '.join(others)}"
        )


def _check_memory(config: GQSGDConfig) -> None:
    reducer = config.reducer
    if config.biased and config.memory == "auto":
        what = f"codec={config.codec!r}" if config.codec != "linear" else f"dither={config.dither!r}"
        raise ConfigError(
            f"{what} is biased, so training needs a memory of what was lost: memory='ef', or 'ef21'; "
            "memory='none' if you mean to do without"
        )
    if config.biased and config.memory_down == "auto" and reducer == "two_shot":
        raise ConfigError(
            "a biased codec loses on the way back, too: give memory_down='ef' or 'ef21' ('none' if you mean to do "
            "without), or reducer='gather', which has no way back"
        )
    if config.down is not None and reducer not in ("two_shot", "auto"):
        raise ConfigError(f"memory_down needs a way back that is encoded: reducer='two_shot', not {reducer!r}")
    if config.up is not None and reducer in ("tree", "native", "hierarchical"):
        raise ConfigError(f"memory goes with the reducers sum, two_shot and gather, not {reducer!r}")


def _memory(name: str, value: Any) -> str | Memory:
    """A memory as it is written in a configuration: checked, and a dictionary made a `Memory`."""
    if isinstance(value, Memory) or value == "auto" or (isinstance(value, str) and value in MEMORIES):
        return value
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) <= {"alpha", "beta", "rho"}:
        return Memory(**{"alpha": None, "beta": 1.0, "rho": 0.0, **value})
    raise ConfigError(
        f"{name}={value!r} is not one of 'auto', {', '.join(map(repr, MEMORIES))}, a Memory, or its numbers by name, "
        "e.g. {'alpha': 0.2, 'beta': 1, 'rho': 0}"
    )


def _named_memory(value: str | Memory) -> Memory | None:
    if isinstance(value, Memory):
        return value
    return None if value == "auto" else MEMORIES[value]


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def _in_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: {low} to {high}")


def _number_in_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} must be a number from {low} to {high}")
    if not low <= value <= high:
        raise ConfigError(f"{name}={value} is out of range: {low} to {high}")


_CHOICES = {
    "codec": CODECS,
    "norm": NORMS,
    "scale": SCALES,
    "scale_per": SCALE_PER,
    "dither": DITHERS,
    "coder": CODERS,
    "reducer": REDUCERS,
}
_LARGEST = 2**63 - 1
_RANGES = {
    "mantissa": (0, MAX_MANTISSA),
    "block_size": (16, 65536),
    "min_numel": (0, _LARGEST),
    "warmup_steps": (0, _LARGEST),
    "node_size": (0, 2**20),
    "sample_every": (0, _LARGEST),
    "seed": (0, _LARGEST),
}
