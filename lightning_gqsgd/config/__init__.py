"""Configurations, and the checks that a configuration can work.

`GQSGDConfig` checks its fields when it is built, each by itself and in `combinations`. `resolving` chooses the reducer
and the numbers that depend on the number of ranks, and builds a `Setting`, so that nothing below this room depends on a
configuration.
"""

from __future__ import annotations

from lightning_gqsgd.config.configuration import MAX_SLOWDOWN, GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.spec.memories import Memory

__all__ = ["MAX_SLOWDOWN", "ConfigError", "GQSGDConfig", "Memory"]
