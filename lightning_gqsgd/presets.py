"""Named configurations."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from lightning_gqsgd.config import ConfigError, GQSGDConfig

PRESETS: dict[str, GQSGDConfig] = {
    "gqsgd": GQSGDConfig(),
    "gqsgd_4bit": GQSGDConfig(bits=4),
}


def make_config(preset: str | None = None, **fields: Any) -> GQSGDConfig:
    """A preset (default: ``gqsgd``) with some fields replaced.

    Raises:
        ConfigError: an unknown preset or field, or a configuration that cannot work.
    """
    name = preset or "gqsgd"
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown preset {name!r}{hint} (presets: {', '.join(PRESETS)})")
    GQSGDConfig.check_names(fields)
    return dataclasses.replace(PRESETS[name], **fields)
