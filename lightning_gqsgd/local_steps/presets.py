"""Ways of local steps by name: what is averaged how often, by which outer optimizer, and with how many bits.

Importing this loads no torch, so that recipes can list the names at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_gqsgd.presets import PRESETS, Preset


@dataclass(frozen=True)
class LocalPreset:
    """A named way of local steps.

    Attributes:
        options: the fields of `LocalOptions` that are not at their defaults.
        preset: name of the compression's preset.
        paper: where the system comes from.
        what: the system in a few words.
        fields: the fields of `GQSGDConfig` that are not those of ``preset``.
    """

    options: Mapping[str, Any]
    preset: str
    paper: str
    what: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def compression(self) -> Preset:
        """The compression, whose fields can be replaced by `make_config`."""
        return Preset({**PRESETS[self.preset].fields, **self.fields}, self.paper, self.what)


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
    "gqsgd_genqsgd": LocalPreset(
        {"every": 10, "outer": "sgd"},
        "gqsgd",
        "Li et al. 2021, arXiv 2111.13526",
        "changes of 10 steps and their mean at 8 stochastic levels of their l2 norm",
        {"reducer": "two_shot", "bits": 5, "levels": 8, "norm": "l2", "dither": "stochastic"},
    ),
    "gqsgd_sparseloco": LocalPreset(
        {"every": 30, "outer": "sgd"},
        "topk_ef",
        "Sarfi et al. 2025, arXiv 2508.15706",
        "the largest 1.6 % of changes of 30 steps at 2 bits, 0.95 of the errors fed back",
        {"bits": 2, "density": 1 / 64, "memory": {"alpha": 0.95, "beta": 0.95, "rho": 0}},
    ),
    "gqsgd_chb": LocalPreset(
        {"every": 1, "outer": "heavy_ball", "rule": "censored"},
        "gqsgd",
        "Chen, Blum, Sadler 2022, arXiv 2209.11944",
        "changes of each step, which a rank that changed little leaves out; heavy ball outside",
        {"bits": 32},
    ),
    "gqsgd_neolithic": LocalPreset(
        {"every": 1, "outer": "sgd", "rule": "multi_step"},
        "topk_ef",
        "Huang et al. 2022, arXiv 2206.03665",
        "changes of each step in 4 messages of the largest 5 % of what is left, both ways, errors fed back",
        {"density": 0.05, "reducer": "two_shot", "memory_down": "ef"},
    ),
    "gqsgd_mcm": LocalPreset(
        {"every": 1, "outer": "sgd"},
        "dore",
        "Philippenko, Dieuleveut 2021, arXiv 2102.12528",
        "changes of each step both ways; the owner of a shard keeps the true model as the error that is fed back",
    ),
    "gqsgd_predictive": LocalPreset(
        {"every": 10, "outer": "sgd", "rule": "predicted"},
        "qsgd_elias",
        "Yue et al. 2021, arXiv 2108.00918",
        "changes of 10 steps less what all ranks predict, at 3 levels in Elias codes",
        {"bits": 2, "levels": 1, "block_size": 4096},
    ),
}
