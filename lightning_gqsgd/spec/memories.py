"""`Memory`: the numbers that define a memory, and the names of common memories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_gqsgd.errors import ConfigError


@dataclass(frozen=True)
class Memory:
    """Memory of one direction of a reducer, with numbers for each compressed coordinate.

    Let x be the input, e the error memory and h the reference (both are zero at first), and let Q encode and decode.
    Then

        u = x + alpha e - h;   e <- beta e + (x - h - Q(u));   h <- h + rho Q(u);   the receiver takes Q(u) + h.

    A shared reference is side information: all ranks have the same h, which is one number for each coordinate. There is
    no error memory then. Let m be the reduced gradient, which is the same on all ranks:

        u = x - h;   h <- beta h + rho m;   the receiver takes Q(u) + h.

    Attributes:
        alpha: weight of the remembered error in a message. None: 1/(1 + ω), the best value (ECQ-SGD, arXiv 1806.08054).
        beta: share of the old error, or of the shared reference, that is kept.
        rho: step size of the reference. None: 1/(2 (1 + ω)) (DIANA; Artemis, arXiv 2006.14591). 0: there is no
            reference.
        shared: whether all ranks share one reference, instead of a reference for each rank.

    Raises:
        ConfigError: if a number is out of its range, or if a shared reference is combined with an error memory.
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
        """True if there is an error memory."""
        return self.alpha != 0

    @property
    def keeps_reference(self) -> bool:
        """True if there is a reference."""
        return self.rho != 0


#: The default of a shared reference: a running mean of about 19 steps.
_SHARED = Memory(0.0, 0.9, 0.1, shared=True)

#: Memories by name: "ef" is classic error feedback, "ecq" is ECQ-SGD, "diana" is DIANA and Artemis, "ef21" is EF21
#: (Markov compression), and "shared" is a running mean of the reduced gradients.
MEMORIES: dict[str, Memory | None] = {
    "none": None,
    "ef": Memory(1.0, 1.0, 0.0),
    "ecq": Memory(None, 1.0, 0.0),
    "diana": Memory(0.0, 0.0, None),
    "ef21": Memory(0.0, 0.0, 1.0),
    "shared": _SHARED,
}


def parse(name: str, value: Any) -> str | Memory:
    """Returns a memory in the form of a configuration: a name, or a `Memory`, which is built if ``value`` is a
    dictionary.

    Args:
        name: the field's name, for the error message.
        value: a name, a `Memory`, a dictionary of its numbers, or None, which becomes "none".

    Raises:
        ConfigError: if the value is not a memory.
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
    """Returns a memory as a plain value that `parse` accepts."""
    if isinstance(value, str):
        return value
    numbers = asdict(value)
    return numbers if value.shared else {name: numbers[name] for name in ("alpha", "beta", "rho")}


def named(value: str | Memory) -> Memory | None:
    """Returns the memory of a name, or None for no memory. "auto" gives None; `config` refuses "auto" if a codec needs
    a memory."""
    if isinstance(value, Memory):
        return value
    return None if value == "auto" else MEMORIES[value]


def described(memory: Memory) -> str:
    """Returns the numbers of a memory as text for error messages."""
    shared = ", shared=True" if memory.shared else ""
    return f"(alpha={memory.alpha}, beta={memory.beta}, rho={memory.rho}{shared})"


def numbers_in_words(memory: Memory) -> str:
    """Returns the numbers of a memory as text. A number that depends on the codec's ω is a formula until it is
    resolved."""
    numbers = {
        "alpha": "1/(1 + ω)" if memory.alpha is None else memory.alpha,
        "beta": memory.beta,
        "rho": "1/(2 (1 + ω))" if memory.rho is None else memory.rho,
    }
    said = [f"{name} {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in numbers.items() if value]
    return ", ".join(said) or "of no effect"
