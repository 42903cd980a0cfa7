"""Checks of names and options that ``gqsgd`` makes before it imports slow modules such as torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, bits_of_name, did_you_mean_preset
from lightning_gqsgd.research.systems import SYSTEMS

#: The most ranks for which ``gqsgd presets`` computes facts: each owns a shard, which takes memory and time.
MOST_RANKS = 4096


def check_name(name: str) -> None:
    """Raise ConfigError for a name that is no preset, no system of local steps, and no other system."""
    if name not in (*PRESETS, *LOCAL_PRESETS, *SYSTEMS):
        raise unknown(name)


def refuse_without_effect(name: str, given: Mapping[str, object]) -> None:
    """Raise ConfigError for an option that the figures of a system do not depend on."""
    for option, value in given.items():
        if value is not None:
            raise ConfigError(f"{option} {value} has no effect on {name}; leave it out")


def check_system(name: str) -> None:
    """Raise ConfigError for a name of which ``gqsgd systems check`` has no experiment, other than "all"."""
    if name == "all":
        return
    check_name(name)
    if PRESETS.get(name) is not None and PRESETS[name].fields.get("auto"):
        raise ConfigError(
            f"{name!r} chooses bits by the length of steps, which no experiment in one process has; "
            "gqsgd bench training times steps"
        )


def unknown(name: str) -> ConfigError:
    """Returns the error for a name that is no preset, with the names that may be meant."""
    known = (*PRESETS, *LOCAL_PRESETS, *SYSTEMS)
    if bits_of_name(name) is not None:
        hint = did_you_mean_preset(name, ())
    else:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ConfigError(f"unknown preset {name!r}{hint} (presets: {', '.join(known)})")


def check_network(probe: Path | None, link: str | None) -> None:
    """Raise ConfigError if no option of ``gqsgd advise`` describes a network."""
    if probe is None and link is None:
        raise ConfigError(
            "nothing is known of the network; give --link, e.g. 10gbit, with --model and --backward, or --probe FILE "
            "of `gqsgd probe`"
        )
