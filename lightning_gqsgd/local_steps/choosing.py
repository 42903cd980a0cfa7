"""Builds the options and the compression of local steps from a preset and the arguments that override it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, did_you_mean
from lightning_gqsgd.local_steps.options import LocalOptions, checked_every
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, Preset, did_you_mean_preset, make_config


def make_local(
    preset: str | GQSGDConfig | None, given: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[LocalOptions, GQSGDConfig]:
    """Returns the options and the compression of a preset, with some of them replaced.

    Args:
        preset: name of a preset of local steps or of a compression, or a configuration; None means ``gqsgd_diloco``.
        given: fields of `LocalOptions`; None means the preset's value.
        fields: fields of `GQSGDConfig`, and further ones of `LocalOptions`.

    Raises:
        ConfigError: if a preset or field is unknown, or if values cannot work.
    """
    local = LocalOptions.field_names()
    known = (*local, *GQSGDConfig.field_names())
    for name in fields:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)} (fields: {', '.join(known)})")
    further = {name: value for name, value in fields.items() if name in local}
    options, compression = options_of(preset, {**further, **given})
    return options, make_config(compression, **{name: fields[name] for name in fields if name not in further})


def options_of(
    preset: str | GQSGDConfig | None, given: Mapping[str, Any]
) -> tuple[LocalOptions, str | GQSGDConfig | Preset]:
    """Returns the options of a preset, with some of them replaced, and its compression.

    Args:
        preset: see `make_local`.
        given: fields of `LocalOptions`; None means the preset's value.

    Raises:
        ConfigError: if the preset is unknown, or if values cannot work.
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


def pop_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of `LocalOptions` from arguments and return them; None if not given. In the arguments,
    ``every`` is called ``local_steps``.

    Raises:
        ConfigError: if ``local_steps`` has a value that cannot work. The message has that name, and not ``every``.
    """
    given = {name: arguments.pop(name, None) for name in LocalOptions.field_names() if name != "every"}
    every = arguments.pop("local_steps", None)
    return {**given, "every": None if every is None else checked_every("local_steps", every)}


def asks_for_local_steps(preset: object, given: Mapping[str, Any]) -> bool:
    """Returns whether arguments ask for local steps, by their number or by a preset.

    Args:
        preset: the argument, which may also be a preset of a compression alone.
        given: more arguments of local steps, by name; None if not given.

    Raises:
        ConfigError: if there are arguments for local steps, but none asks for local steps.
    """
    if given["every"] is not None or (isinstance(preset, str) and preset in LOCAL_PRESETS):
        return True
    alone = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if alone:
        raise ConfigError(f"{', '.join(alone)} is for local steps; give local_steps=32 as well, or leave it out")
    return False
