"""The systems of the literature by name, each a configuration.

The table itself needs no torch: command lines check names against it before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_gqsgd._autoload import bits_of_name
from lightning_gqsgd.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig


@dataclass(frozen=True)
class Preset:
    """A named configuration.

    Attributes:
        fields: the fields of the configuration that are not at their defaults.
        paper: where the system comes from.
        what: the system in a few words.
        optimizer: what its paper trains with, if it matters; the configuration does not set it.
        fixed: the fields that the system's name stands for, which cannot be replaced by other values.
    """

    fields: Mapping[str, Any]
    paper: str
    what: str
    optimizer: str = "any"
    fixed: tuple[str, ...] = ()

    @property
    def config(self) -> GQSGDConfig:
        """The configuration."""
        from lightning_gqsgd.config import GQSGDConfig  # imports torch

        return GQSGDConfig(**self.fields)


def _stochastic(**fields: Any) -> dict[str, Any]:
    """Returns linear levels with stochastic rounding, as the literature has them."""
    return {"dither": "stochastic", **fields}


def _sign(**fields: Any) -> dict[str, Any]:
    return {"codec": "sign", **fields}


def _exponential(**fields: Any) -> dict[str, Any]:
    return {"codec": "exponential", **fields}


_QSGD = "Alistarh et al. 2017, arXiv 1610.02132"
_NATURAL = "Horváth et al. 2019, arXiv 1905.10988"
_EDEN = "Vargaftik et al. 2022, arXiv 2108.08842"
_GLOBAL = "Xin et al. 2023, arXiv 2305.18627"

#: DIANA's and Artemis' codec: l2 norm, levels -1, 0, 1.
_TERNARY = {"bits": 2, "levels": 1, "norm": "l2"}

PRESETS: dict[str, Preset] = {
    "gqsgd": Preset({}, _GLOBAL, "block scales, companded levels, subtractive dither, 8 bits"),
    "gqsgd_4bit": Preset({"bits": 4}, _GLOBAL, "the same at 4 bits"),
    "gqsgd_3bit": Preset({"bits": 3}, _GLOBAL, "the same at 3 bits"),
    "gqsgd_2bit": Preset({"codec": "eden", "bits": 2}, _EDEN, "turned coordinates at the best 2-bit levels"),
    "gqsgd_auto": Preset({"auto": True}, _GLOBAL, "32, 16, 8 or 4 bits, whichever makes steps shortest"),
    "gqsgd_sum": Preset({"reducer": "sum"}, _GLOBAL, "shared scales, codes summed by the allreduce"),
    "gqsgd_exponential": Preset(
        _exponential(mantissa=3), _GLOBAL, "exponential levels with 3 mantissa bits, exact sums", fixed=("codec",)
    ),
    "gqsgd_exponential_tree": Preset(
        _exponential(reducer="tree"), _GLOBAL, "powers of two, added in pairs along a tree", fixed=("codec",)
    ),
    "qsgd": Preset(_stochastic(bits=4, block_size=512, reducer="gather"), _QSGD, "stochastic levels, local scales"),
    "qsgd_elias": Preset(
        _stochastic(bits=4, block_size=512, norm="l2", reducer="gather", coder="elias"), _QSGD, "l2 norm, Elias codes"
    ),
    "terngrad": Preset(
        _stochastic(bits=2, clip=2.5, scale_per="parameter", scale="global", reducer="gather"),
        "Wen et al. 2017, arXiv 1705.07878",
        "three levels, shared scale per layer, clipped at 2.5 σ",
        fixed=("codec", "bits"),
    ),
    "natural_compression": Preset(
        _exponential(norm="power_of_two", reducer="two_shot"),
        _NATURAL,
        "sign and exponent, both ways",
        fixed=("codec", "mantissa"),
    ),
    "natural_dithering": Preset(
        _exponential(bits=5, levels=8, norm="l2", reducer="gather"),
        _NATURAL,
        "8 powers of two, l2 norm",
        fixed=("codec", "mantissa"),
    ),
    "ecq_sgd": Preset(
        _stochastic(bits=4, levels=4, norm="l2", reducer="gather", memory="ecq"),
        "Wu et al. 2018, arXiv 1806.08054",
        "4 levels, errors fed back with α = 1/(1+ω)",
        optimizer="SGD",
    ),
    "cd_adam": Preset(
        _sign(reducer="two_shot", memory="ef21", memory_down="ef21"),
        "Wang et al. 2021, arXiv 2111.00705",
        "signs of differences, both ways",
        optimizer="AMSGrad",
    ),
    "comp_ams": Preset(
        _sign(reducer="gather", memory="ef"), "Li et al. 2022, arXiv 2205.05632", "signs, errors fed back", "AMSGrad"
    ),
    "diana": Preset(
        _stochastic(**_TERNARY, reducer="gather", memory="diana"),
        "Mishchenko et al. 2019, arXiv 1901.09269",
        "differences to a learnt reference",
        optimizer="SGD",
    ),
    "artemis": Preset(
        _stochastic(**_TERNARY, reducer="two_shot", memory="diana"),
        "Philippenko, Dieuleveut 2020, arXiv 2006.14591",
        "DIANA with the way back compressed",
        optimizer="SGD",
    ),
    "dore": Preset(
        _stochastic(**_TERNARY, reducer="two_shot", memory="diana", memory_down="ecq"),
        "Liu et al. 2019, arXiv 1910.07561",
        "Artemis with errors fed back on the way back",
        optimizer="SGD",
    ),
    "wyner_ziv": Preset(
        {"bits": 3, "memory": "shared"},
        "Liang et al. 2021, arXiv 2111.08277",
        "differences to a running mean that all ranks share",
    ),
    "dq_psgd": Preset(
        _stochastic(bits=4, rotation=True),
        "Saha et al. 2021, arXiv 2103.07578",
        "a random Hadamard rotation first",
        optimizer="SGD",
    ),
    "drive": Preset(
        {"codec": "eden", "bits": 1, "block_size": 4096, "reducer": "gather"},
        "Vargaftik et al. 2021, arXiv 2105.08339",
        "signs of turned coordinates, a scale without bias",
        fixed=("codec", "bits"),
    ),
    "eden": Preset(
        {"codec": "eden", "bits": 2, "block_size": 4096, "reducer": "gather"},
        _EDEN,
        "turned coordinates at the best levels for Gaussian ones, a scale without bias",
        fixed=("codec",),
    ),
    "signsgd_ef": Preset(
        _sign(reducer="two_shot", memory="ef", memory_down="ef"),
        "Zheng et al. 2019, arXiv 1905.10936",
        "signs, errors fed back both ways",
        fixed=("codec",),
    ),
    "topk_ef": Preset(
        {"codec": "top_k", "density": 0.01, "block_size": 4096, "reducer": "gather", "memory": "ef"},
        "Stich et al. 2018, arXiv 1809.07599",
        "the largest 1 % of each block, errors fed back",
        fixed=("codec",),
    ),
}


#: Presets with one configuration for all steps, which do not need steps to be timed.
FIXED = {name: preset for name, preset in PRESETS.items() if not preset.fields.get("auto")}


def make_config(preset: str | GQSGDConfig | Preset | None = None, **fields: Any) -> GQSGDConfig:
    """Returns a preset, or a configuration, with some fields replaced.

    Args:
        preset: a preset or its name, or a configuration; None: the preset ``gqsgd``.
        **fields: fields of `GQSGDConfig` to replace.

    Raises:
        ConfigError: an unknown preset or field, a field that contradicts what the preset's name stands for, or a
            configuration that cannot work.
    """
    from lightning_gqsgd.config import GQSGDConfig  # imports torch

    GQSGDConfig.check_names(fields)
    if isinstance(preset, GQSGDConfig):
        return preset.replaced(**fields)
    if isinstance(preset, Preset):
        return GQSGDConfig(**{**preset.fields, **fields})
    name = "gqsgd" if preset is None else preset
    if not isinstance(name, str):
        raise ConfigError(
            f"preset={preset!r} is neither the name of a preset nor a GQSGDConfig; give fields by name, e.g. "
            f"{_as_fields(preset)}, or a preset ({', '.join(PRESETS)})"
        )
    if name not in PRESETS:
        from lightning_gqsgd._autoload import LOCAL_PRESETS

        if name in LOCAL_PRESETS:
            raise ConfigError(
                f"preset {name!r} is for local steps, which do without DistributedDataParallel: take "
                f"LocalSteps(model, optimizer, preset={name!r}), or Trainer(strategy={name!r})"
            )
        near = did_you_mean_preset(name, (*PRESETS, *LOCAL_PRESETS))
        raise ConfigError(f"unknown preset {name!r}{near} (presets: {', '.join(PRESETS)})")
    config = GQSGDConfig(**{**PRESETS[name].fields, **fields})
    if PRESETS[name].fixed:
        _check_fixed(name, config, fields)
    return config


def did_you_mean_preset(name: str, choices: Iterable[str]) -> str:
    """Returns the preset that an unknown name was perhaps meant for, as the end of a sentence; empty where none is
    near.

    A name such as ``gqsgd_8bit`` is not spelled wrong: it asks for a number of bits that has no preset of that name.
    """
    bits = bits_of_name(name)
    if bits is None:
        return did_you_mean(name, choices)
    return f"; did you mean 'gqsgd'{', which has 8 bits' if bits == 8 else f' with bits={bits}'}?"


def _check_fixed(name: str, config: GQSGDConfig, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for fields that contradict what the name of a preset stands for."""
    preset = PRESETS[name]
    usual = preset.config
    for field in preset.fixed:
        if field in fields and getattr(config, field) != getattr(usual, field):
            own = ", ".join(f"{key}={value!r}" for key, value in {**preset.fields, field: fields[field]}.items())
            raise ConfigError(
                f"preset={name!r} ({preset.what}) stands for {field}={getattr(usual, field)!r}, not "
                f"{field}={fields[field]!r}; leave {field} out, or give fields without the preset: {own}"
            )


def _as_fields(value: object) -> str:
    """Returns a hint at what a value in the place of a preset was perhaps meant to be."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={field!r}" for name, field in value.items()) or "bits=4"
    return f"bits={value}" if isinstance(value, int) and not isinstance(value, bool) else "bits=4"
