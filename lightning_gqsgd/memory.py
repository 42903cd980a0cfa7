"""What a rank remembers between steps, by parameter, and the numbers with which that is stable.

Nothing is keyed by bucket or piece: DDP rebuilds its buckets after the first step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs import codec_of
from lightning_gqsgd.codecs.variance import best_alpha, stability
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.layout import Run, stripe

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig


class StabilityWarning(UserWarning):
    """A memory that may amplify errors without bound; the message names the reason and the number that works."""


@dataclass(frozen=True)
class Memory:
    """What one direction of a reducer remembers, for each compressed coordinate.

    With the input x, the error memory e and the reference h (both zero at first), and Q the codec there and back:

        u = x + alpha e - h;   e <- beta e + (x - h - Q(u));   h <- h + rho Q(u);   the receiver takes Q(u) + h.

    A shared reference is side information: all ranks have the same h, whose state is one number for each coordinate.
    There is no error then, and with the reduced gradient m that all ranks end with:

        u = x - h;   h <- beta h + rho m;   the receiver takes Q(u) + h.

    Attributes:
        alpha: weight of remembered error in what is sent; None: 1/(1 + ω), the best one (ECQ-SGD, arXiv 1806.08054).
        beta: how much of the old error is kept, or of a shared reference.
        rho: step of the reference; None: 1/(2 (1 + ω)) (DIANA; Artemis, arXiv 2006.14591). 0: there is none.
        shared: whether the reference is one of all ranks, and not a rank's own.

    Raises:
        ConfigError: a number out of its range, or a shared reference beside an error.
    """

    alpha: float | None
    beta: float
    rho: float | None
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.shared, bool):
            raise ConfigError(f"memory shared={self.shared!r} must be True or False")
        if self.shared and self.alpha != 0:
            raise ConfigError(f"memory shared=True keeps no error; give alpha=0, not {self.alpha!r}")
        for name in ("alpha", "beta", "rho"):
            value = getattr(self, name)
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


#: A shared reference whose numbers are left out: a running mean of about 19 steps.
_SHARED = Memory(0.0, 0.9, 0.1, shared=True)

#: Names for usual memories: classic error feedback; ECQ-SGD; DIANA and Artemis; EF21, which is Markov compression; a
#: running mean of the reduced gradients.
MEMORIES: dict[str, Memory | None] = {
    "none": None,
    "ef": Memory(1.0, 1.0, 0.0),
    "ecq": Memory(None, 1.0, 0.0),
    "diana": Memory(0.0, 0.0, None),
    "ef21": Memory(0.0, 0.0, 1.0),
    "shared": _SHARED,
}


def parse(name: str, value: Any) -> str | Memory:
    """A memory as a configuration holds it: the value itself, or a `Memory` made of a dictionary.

    Raises:
        ConfigError: the value is no memory; ``name`` is the field's name in the message.
    """
    if isinstance(value, Memory) or value == "auto" or (isinstance(value, str) and value in MEMORIES):
        return value
    if value is None:
        return "none"
    if isinstance(value, Mapping) and set(value) <= {"alpha", "beta", "rho", "shared"}:
        usual = {"alpha": None, "beta": 1.0, "rho": 0.0}
        return Memory(**{**(asdict(_SHARED) if value.get("shared") else usual), **value})
    raise ConfigError(
        f"{name}={value!r} is not one of 'auto', {', '.join(map(repr, MEMORIES))}, a Memory, or its numbers by name, "
        "e.g. {'alpha': 0.2, 'beta': 1, 'rho': 0}"
    )


def plain(value: str | Memory) -> Any:
    """A memory as a plain value, which `parse` reads."""
    if isinstance(value, str):
        return value
    numbers = asdict(value)
    return numbers if value.shared else {name: numbers[name] for name in ("alpha", "beta", "rho")}


def named(value: str | Memory) -> Memory | None:
    """The memory that a name stands for; "auto" stands for none, see `check`."""
    if isinstance(value, Memory):
        return value
    return None if value == "auto" else MEMORIES[value]


def check(config: GQSGDConfig) -> None:
    """Check the memories of a configuration against its codec: a biased one needs them.

    Raises:
        ConfigError: a biased codec whose memory is left to "auto".
    """
    biased_by = codec_of(config).biased_by
    if biased_by and config.memory == "auto":
        raise ConfigError(
            f"{biased_by} is biased, so training needs a memory of what was lost: memory='ef', or 'ef21'; "
            "memory='none' if you mean to do without"
        )
    if config.down is not None and config.down.shared and config.down != config.up:
        raise ConfigError(
            f"memory_down={_described(config.down)} is the reference that ranks share on both ways, so it needs the "
            "same memory; leave memory_down out, and give memory='shared'"
        )


def described(memory: Memory) -> str:
    """The numbers of a memory in words; those that follow from the codec's ω are formulas until they are resolved."""
    numbers = {
        "alpha": "1/(1 + ω)" if memory.alpha is None else memory.alpha,
        "beta": memory.beta,
        "rho": "1/(2 (1 + ω))" if memory.rho is None else memory.rho,
    }
    said = [f"{name} {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in numbers.items() if value]
    return ", ".join(said) or "of no effect"


class Keeps(str, Enum):
    """The kinds of tensors that a rank keeps; the values are their names in checkpoints.

    UP_ERROR and UP_REFERENCE are this rank's e and h. UP_MEAN is the mean of all ranks' h, kept where messages are
    averaged. DOWN_ERROR is the e of the way back, kept there as well. DOWN_REFERENCE is the h of the way back, which is
    equal on all ranks. SHARED is the one h of both ways.
    """

    UP_ERROR = "up_error"
    UP_REFERENCE = "up_reference"
    UP_MEAN = "up_mean"
    DOWN_ERROR = "down_error"
    DOWN_REFERENCE = "down_reference"
    SHARED = "shared_reference"


#: What is kept where messages are averaged: by the owner of a shard, if each shard has one.
KEPT_BY_OWNERS = (Keeps.UP_MEAN, Keeps.DOWN_ERROR)


class Direction(NamedTuple):
    """One direction of a reducer, as far as its memory is concerned.

    Attributes:
        error: what a sender keeps of its errors.
        sent: the reference of a sender.
        received: the reference, or the mean of the references, where messages arrive. The way back has one sender,
            whose reference all receivers follow.
    """

    error: Keeps
    sent: Keeps
    received: Keeps

    def memory_of(self, config: GQSGDConfig) -> Memory | None:
        """The memory of this direction."""
        return config.up if self is UP else config.down

    def references(self, memory: Memory | None) -> tuple[Keeps, Keeps]:
        """Which reference a sender has, and which one is kept where messages arrive."""
        return (Keeps.SHARED, Keeps.SHARED) if memory is not None and memory.shared else (self.sent, self.received)

    def kinds(self, memory: Memory | None) -> list[Keeps]:
        """What is kept for a memory of this direction, in a fixed order."""
        if memory is None:
            return []
        kept = [self.error] if memory.keeps_error else []
        return [*kept, *dict.fromkeys(self.references(memory))] if memory.keeps_reference else kept


UP = Direction(Keeps.UP_ERROR, Keeps.UP_REFERENCE, Keeps.UP_MEAN)
DOWN = Direction(Keeps.DOWN_ERROR, Keeps.DOWN_REFERENCE, Keeps.DOWN_REFERENCE)


def kinds(config: GQSGDConfig) -> list[Keeps]:
    """What a configuration keeps, in a fixed order."""
    every = [kind for direction in (UP, DOWN) for kind in direction.kinds(direction.memory_of(config))]
    return list(dict.fromkeys(every))


class MemoryStore:
    """What one rank keeps: a flat tensor of each kind for each parameter, zero at first; none without a memory.

    Args:
        config: the configuration, with its reducer chosen.
        owners: number of ranks among which the blocks are divided, each of which averages the messages of its own, and
            keeps what belongs to that (see `layout.place_by_owner`); 1 where every rank averages all messages.
        sizes: number of coordinates of each compressed parameter, by parameter number.
        dtype: dtype of the gradients; memory is fp32, or fp64 for fp64 gradients.
        device: device of the gradients.
    """

    def __init__(
        self, config: GQSGDConfig, owners: int, sizes: Mapping[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kinds = kinds(config)
        self._sizes, self._dtype, self._device = dict(sizes), COMPUTE_DTYPES[dtype], device
        self._owners = owners
        #: Consecutive coordinates of each parameter with the same owner.
        self._stripes = {
            parameter: int(stripe(np.array(-(-size // config.block_size)), owners)) * config.block_size
            for parameter, size in sizes.items()
        }
        self._tensors: dict[tuple[Keeps, int], Tensor] = {}

    def load(self, kind: Keeps, runs: Sequence[Run], like: Tensor) -> Tensor:
        """What is kept of some runs, at their places in a tensor like ``like``; zero elsewhere."""
        values = torch.zeros_like(like)
        for run in runs:
            values[run.start : run.start + run.numel] = self._part(kind, run)
        return values

    def store(self, kind: Keeps, runs: Sequence[Run], values: Tensor) -> None:
        """Keep what a tensor has at the places of some runs."""
        for run in runs:
            self._part(kind, run).copy_(values[run.start : run.start + run.numel])

    def row(self, kind: Keeps, parameter: int) -> Tensor:
        """What this rank keeps of a parameter: zeros if there is nothing yet; of the same length on every rank."""
        key = (kind, parameter)
        if key not in self._tensors:
            size, owned = self._sizes[parameter], self._stripes[parameter]
            share = -(-size // (owned * self._owners_of(kind))) * owned
            with torch.inference_mode(False):  # a state may be saved there, and training changes the tensor later
                self._tensors[key] = torch.zeros(min(size, share), dtype=self._dtype, device=self._device)
        return self._tensors[key]

    def rows(self, parameter: int) -> dict[Keeps, Tensor]:
        """A copy of all that this rank keeps of a parameter, by kind."""
        return {kind: self.row(kind, parameter).clone() for kind in self.kinds}

    def forget(self) -> None:
        """Start empty again."""
        self._tensors.clear()

    def take(self, saved: Mapping[str, Mapping[int, Tensor]], rank: int) -> None:
        """Keep what was saved of all ranks, and forget everything else.

        Args:
            saved: tensors [ranks, numel] by kind and parameter number.
            rank: this rank.

        Raises:
            ConfigError: of other parameters, or of other sizes; nothing has been taken.
        """
        self.check(saved)
        for row in self._tensors.values():
            row.zero_()
        for kind, tensors in saved.items():
            for number, saved_rows in tensors.items():
                self.row(Keeps(kind), number).copy_(saved_rows[rank])

    def take_from(self, other: MemoryStore, numbers: Mapping[int, int]) -> None:
        """Keep what another store keeps, of the parameters that this one has, too.

        Args:
            other: a store of the same configuration and as many ranks.
            numbers: number of a parameter here, by its number there; of the same size.
        """
        for (kind, number), row in other._tensors.items():
            here = numbers.get(number)
            if here in self._sizes:
                self.row(kind, here).copy_(row)

    def check(self, saved: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Raise ConfigError for what `take` cannot keep."""
        for kind, tensors in saved.items():
            for number, saved_rows in tensors.items():
                row = self.row(Keeps(kind), number) if number in self._sizes else None
                if row is None or saved_rows.shape[1:] != row.shape:
                    here = 0 if row is None else row.numel()
                    raise ConfigError(
                        f"the checkpoint remembers {saved_rows.shape[-1]} values of parameter {number}, the model "
                        f"compresses {here}; resume with the model and the configuration that wrote it"
                    )

    def _owners_of(self, kind: Keeps) -> int:
        """Number of ranks among which a kind is divided."""
        return self._owners if kind in KEPT_BY_OWNERS else 1

    def _part(self, kind: Keeps, run: Run) -> Tensor:
        """Where a run is kept: the stripes of an owner lie side by side, and its runs within one stripe."""
        length = self._stripes[run.parameter]
        number, rest = divmod(run.offset, length)
        start = number // self._owners_of(kind) * length + rest
        return self.row(kind, run.parameter)[start : start + run.numel]


def resolve_memory(config: GQSGDConfig) -> GQSGDConfig:
    """The configuration with all numbers of its memories given: α = 1/(1 + ω), ρ = 1/(2 (1 + ω)) where they are None.

    Raises:
        ConfigError: the codec has no ω to compute them from.

    Warns:
        StabilityWarning: an error memory with λ >= 1, a reference with ρ (1 + ω) >= 2, or a shared reference with
            β² + ρ² ω >= 1, for the codec's bound ω.
    """
    given: dict[str, Any] = {}
    for name, memory in (("memory", config.up), ("memory_down", config.down)):
        uses = memory is not None and (memory.keeps_error or memory.keeps_reference)
        given[name] = _resolved(config, name, memory) if memory is not None and uses else "none"
    return replace(config, **given)


def _resolved(config: GQSGDConfig, name: str, memory: Memory) -> Memory:
    has_omega = not config.biased and config.scale_per == "block"
    if not has_omega:
        if memory.alpha is None or memory.rho is None:
            sizes = "with scale_per='parameter' it depends on the parameter"
            why = f"codec={config.codec!r} is biased" if config.biased else sizes
            raise ConfigError(
                f"{name}={_described(memory)} takes its numbers from the variance ω of an unbiased codec, but {why}; "
                "take 'ef' or 'ef21', or give the numbers"
            )
        return memory
    omega = codec_of(config).omega(config.block_size)
    alpha = 1 / (1 + omega) if memory.alpha is None else memory.alpha
    rho = 1 / (2 * (1 + omega)) if memory.rho is None else memory.rho
    factor = stability(alpha, memory.beta, omega)
    if alpha and factor >= 1:
        warnings.warn(
            f"{name} with alpha={alpha:g}, beta={memory.beta:g} may diverge: for this codec, ω is up to {omega:.3g}, "
            f"so λ = alpha² ω + (beta - alpha)² is up to {factor:.3g} >= 1, and errors are amplified rather than "
            f"corrected; alpha={best_alpha(memory.beta, omega):.3g} works (memory='ecq' takes the best one)",
            StabilityWarning,
            stacklevel=3,
        )
    if memory.shared and memory.beta**2 + rho**2 * omega >= 1:
        warnings.warn(
            f"{name} with beta={memory.beta:g}, rho={rho:g} may diverge: for this codec, ω is up to {omega:.3g}, so "
            f"beta² + rho² ω is up to {memory.beta**2 + rho**2 * omega:.3g} >= 1, and the shared reference amplifies "
            "its own noise; take a smaller rho, or more bits",
            StabilityWarning,
            stacklevel=3,
        )
    elif rho * (1 + omega) >= 2 and not memory.shared:
        warnings.warn(
            f"{name} with rho={rho:g} may diverge: for this codec, ω is up to {omega:.3g}, and from rho (1 + ω) = 2 on "
            f"the reference moves away from what it follows; rho={1 / (1 + omega):.3g} works ('diana' takes half)",
            StabilityWarning,
            stacklevel=3,
        )
    return replace(memory, alpha=alpha, rho=rho)


def _described(memory: Memory) -> str:
    shared = ", shared=True" if memory.shared else ""
    return f"(alpha={memory.alpha}, beta={memory.beta}, rho={memory.rho}{shared})"
