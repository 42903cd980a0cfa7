"""Ways of local steps by name: what is averaged how often, by which outer optimizer, and with how many bits.

The table itself needs no torch: command lines check names against it before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_gqsgd.errors import ConfigError, did_you_mean
from lightning_gqsgd.presets import PRESETS, make_config

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.local_steps.options import LocalOptions


@dataclass(frozen=True)
class LocalPreset:
    """A named way of local steps.

    Attributes:
        options: the fields of `LocalOptions` that are not at their defaults.
        preset: name of the compression's preset.
        paper: where the system comes from.
        what: the system in a few words.
    """

    options: Mapping[str, Any]
    preset: str
    paper: str
    what: str


LOCAL_PRESETS: dict[str, LocalPreset] = {
    "gqsgd_diloco": LocalPreset(
        {"every": 32, "outer": "nesterov"},
        "gqsgd_4bit",
        "Douillard et al. 2023, arXiv 2311.08105",
        "changes of 32 steps at 4 bits, Nesterov momentum outside",
    ),
    "gqsgd_fedpaq": LocalPreset(
        {"every": 10, "outer": "sgd"},
        "gqsgd_4bit",
        "Reisizadeh et al. 2019, arXiv 1909.13014",
        "changes of 10 steps at 4 bits, their plain mean",
    ),
}


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
    from lightning_gqsgd.config import GQSGDConfig  # imports torch
    from lightning_gqsgd.local_steps.options import LocalOptions

    known = (*LocalOptions.field_names(), *GQSGDConfig.field_names())
    for name in fields:
        if name not in known:
            raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)} (fields: {', '.join(known)})")
    options, compression = options_of(preset, given)
    return options, make_config(compression, **fields)


def options_of(
    preset: str | GQSGDConfig | None, given: Mapping[str, Any]
) -> tuple[LocalOptions, str | GQSGDConfig | None]:
    """Options of a preset, with some of them replaced; and the preset of its compression.

    Args:
        preset: see `make_local`.
        given: fields of `LocalOptions`; None stands for the preset's value.

    Raises:
        ConfigError: an unknown preset, or values that cannot work.
    """
    from lightning_gqsgd.local_steps.options import LocalOptions  # imports torch

    preset = "gqsgd_diloco" if preset is None else preset
    if isinstance(preset, str) and preset not in LOCAL_PRESETS and preset not in PRESETS:
        names = (*LOCAL_PRESETS, *PRESETS)
        raise ConfigError(f"unknown preset {preset!r}{did_you_mean(preset, names)} (presets: {', '.join(names)})")
    chosen = {name: value for name, value in given.items() if value is not None}
    if isinstance(preset, str) and preset in LOCAL_PRESETS:
        chosen = {**LOCAL_PRESETS[preset].options, **chosen}
        return LocalOptions(**chosen), LOCAL_PRESETS[preset].preset
    return LocalOptions(**chosen), preset


def split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of `LocalOptions`, and the others."""
    from lightning_gqsgd.local_steps.options import LocalOptions  # imports torch

    names = LocalOptions.field_names()
    own = {name: value for name, value in fields.items() if name in names}
    return own, {name: value for name, value in fields.items() if name not in names}
