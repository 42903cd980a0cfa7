"""A decision of `auto` in the place of ``auto=True``: another run keeps the decided bits, and tries nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.spec.decisions import Decision

_REMEDY = "give a row of state.decisions, or its to_dict()"


def pinned_bits(value: Any, bits: Any, max_slowdown: float | None, allow: Sequence[int], usual: Sequence[int]) -> int:
    """Returns the bits of a decision that was given as ``auto``.

    Args:
        value: the decision, or its dictionary.
        bits: those of the same configuration, which has to leave them out.
        max_slowdown: that of the same configuration, which has to leave it out.
        allow: the bits that the configuration allows.
        usual: those of a configuration that leaves ``allow`` out, under which a decision may have any bits.

    Raises:
        ConfigError: the value is no decision, or the configuration says something else.
    """
    decided = _decision(value).bits
    for name, other in (("bits", bits), ("max_slowdown", max_slowdown)):
        if other is not None:
            raise ConfigError(f"{name}={other!r} with a decision for {decided} bits as auto; leave {name} or auto out")
    listed = isinstance(allow, Sequence) and not isinstance(allow, str)
    if listed and set(allow) != set(usual) and decided not in allow:
        raise ConfigError(
            f"the decision that auto has is for {decided} bits, and allow={tuple(allow)} has others; leave allow out, "
            f"or give auto=True to decide anew"
        )
    return decided


def _decision(value: Any) -> Decision:
    if isinstance(value, Decision):
        value = value.to_dict()
    elif not isinstance(value, Mapping):
        raise ConfigError(f"auto={value!r:.100} must be True or False, or a decision; {_REMEDY}")
    try:
        return Decision.from_dict(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"auto={value!r:.100} is no decision ({type(error).__name__}: {error}); {_REMEDY}") from None
