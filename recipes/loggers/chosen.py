"""The loggers that a configuration chooses: one, or several below the names of their choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WANDB = "wandb"


def chosen_loggers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The nodes of all chosen loggers, by the keys at which they stand, e.g. ``logger`` or ``logger.wandb``."""
    node = config["logger"]
    if "_target_" in node or not any(isinstance(entry, Mapping) for entry in node.values()):
        return {"logger": node}
    return {f"logger.{name}": entry for name, entry in node.items() if isinstance(entry, Mapping)}


def wandb_settings(config: Mapping[str, Any]) -> Any:
    """The node of the W&B logger; None if a configuration has none."""
    return next((node for node in chosen_loggers(config).values() if node.get("name") == WANDB), None)
