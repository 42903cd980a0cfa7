"""Ways of local steps by name: what is averaged how often, by which outer optimizer, and with how many bits.

Importing this loads no torch, so that recipes can list the names at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
