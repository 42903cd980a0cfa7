"""The timeout of a strategy: text in a configuration, and a timedelta for the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning_gqsgd.spec.quantities import TIMES, quantity
from recipes.errors import OverrideError


def timeout_for(strategy: Mapping[str, Any]) -> dict[str, timedelta]:
    """Returns the argument ``timeout`` of a strategy whose node has the entry; empty if it has none.

    Args:
        strategy: the node of the strategy.

    Raises:
        OverrideError: the entry is no time.
    """
    value = strategy.get("timeout")
    if value is None:
        return {}
    seconds = quantity(value, TIMES) if isinstance(value, str) else None
    if not seconds:
        raise OverrideError(f"strategy.timeout={value} is no time: a number and a unit, e.g. +strategy.timeout=5min")
    return {"timeout": timedelta(seconds=seconds)}
