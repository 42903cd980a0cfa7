"""Builds the options and the compression of local steps from a preset and the arguments that override it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, did_you_mean
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, Preset, did_you_mean_preset, make_config


def make_local(
    preset: str | GQSGDConfig | None, given: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[LocalOptions, GQSGDConfig]:
    """Options and compression of a preset, with some of them replaced.

    Args:
        preset: name of a way of local steps, or of a compression's preset, or a configuration; None: ``gqsgd_diloco``.
        given: fields of `LocalOptions`; None stands for the preset's value.
        fields: fields of `GQSGDConfig`.

    Raises:
        ConfigError: an unknown preset or field, or values that cannot work.
    """
    known = (*LocalOptions.field_names(), *GQSGDConfig.field_names())
    for name in fields:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)} (fields: {', '.join(known)})")
    options, compression = options_of(preset, given)
    return options, make_config(compression, **fields)


def options_of(
    preset: str | GQSGDConfig | None, given: Mapping[str, Any]
) -> tuple[LocalOptions, str | GQSGDConfig | Preset]:
    """Options of a preset, with some of them replaced; and its compression.

    Args:
        preset: see `make_local`.
        given: fields of `LocalOptions`; None stands for the preset's value.

    Raises:
        ConfigError: an unknown preset, or values that cannot work.
    """
    preset = "gqsgd_diloco" if preset is None else preset
    if isinstance(preset, str) and preset not in LOCAL_PRESETS and preset not in PRESETS:
        names = (*LOCAL_PRESETS, *PRESETS)
        raise ConfigError(
            f"unknown preset {preset!r}{did_you_mean_preset(preset, names)} (presets: {', '.join(names)})"
        )
    chosen = {name: value for name, value in given.items() if value is not None}
    if isinstance(preset, str) and preset in LOCAL_PRESETS:
        chosen = {**LOCAL_PRESETS[preset].options, **chosen}
        return LocalOptions(**chosen), LOCAL_PRESETS[preset].compression
    return LocalOptions(**chosen), preset


def split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `LocalOptions`, and the others."""
    names = LocalOptions.field_names()
    own = {name: value for name, value in fields.items() if name in names}
    return own, {name: value for name, value in fields.items() if name not in names}


def pop_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the fields of `LocalOptions` out of arguments, which call ``every`` ``local_steps``; None: not given."""
    given = {name: arguments.pop(name, None) for name in LocalOptions.field_names() if name != "every"}
    return {**given, "every": arguments.pop("local_steps", None)}


def asks_for_local_steps(preset: object, *given: Mapping[str, Any]) -> bool:
    """Whether arguments ask for local steps: by their number, or by a preset.

    Args:
        preset: the argument, which may name a compression only.
        *given: further arguments of local steps, by name; None: not given.

    Raises:
        ConfigError: arguments that are for local steps, which nothing asks for.
    """
    together = {name: value for arguments in given for name, value in arguments.items()}
    if together["every"] is not None or (isinstance(preset, str) and preset in LOCAL_PRESETS):
        return True
    alone = [f"{name}={value!r}" for name, value in together.items() if value is not None]
    if alone:
        raise ConfigError(f"{', '.join(alone)} is for local steps; give local_steps=32 as well, or leave it out")
    return False
