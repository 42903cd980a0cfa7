"""The systems of the literature by name, each a configuration."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_gqsgd.config import ConfigError, GQSGDConfig, did_you_mean


@dataclass(frozen=True)
class Preset:
    """A named configuration.

    Attributes:
        config: the configuration.
        paper: where the system comes from.
        what: the system in a few words.
        optimizer: what its paper trains with, if it matters; the configuration does not set it.
    """

    config: GQSGDConfig
    paper: str
    what: str
    optimizer: str = "any"


def _stochastic(**fields: Any) -> GQSGDConfig:
    """Linear levels with stochastic rounding, as the literature has them."""
    return GQSGDConfig(dither="stochastic", **fields)


def _sign(**fields: Any) -> GQSGDConfig:
    return GQSGDConfig(codec="sign", bits=1, **fields)


_QSGD = "Alistarh et al. 2017, arXiv 1610.02132"
_NATURAL = "Horváth et al. 2019, arXiv 1905.10988"
_GLOBAL = "Xin et al. 2023, arXiv 2305.18627"

#: DIANA's and Artemis' codec: l2 norm, levels -1, 0, 1.
_TERNARY = {"bits": 2, "levels": 1, "norm": "l2"}

PRESETS: dict[str, Preset] = {
    "gqsgd": Preset(GQSGDConfig(), _GLOBAL, "block scales, subtractive dither, 8 bits"),
    "gqsgd_4bit": Preset(GQSGDConfig(bits=4), _GLOBAL, "the same at 4 bits"),
    "gqsgd_sum": Preset(GQSGDConfig(reducer="sum"), _GLOBAL, "shared scales, codes summed by the allreduce"),
    "gqsgd_exponential": Preset(
        GQSGDConfig(codec="exponential", mantissa=3), _GLOBAL, "exponential levels with 3 mantissa bits, exact sums"
    ),
    "gqsgd_exponential_tree": Preset(
        GQSGDConfig(codec="exponential", reducer="tree"), _GLOBAL, "powers of two, added in pairs along a tree"
    ),
    "qsgd": Preset(_stochastic(bits=4, block_size=512, reducer="gather"), _QSGD, "stochastic levels, local scales"),
    "qsgd_elias": Preset(
        _stochastic(bits=4, block_size=512, norm="l2", reducer="gather", coder="elias"), _QSGD, "l2 norm, Elias codes"
    ),
    "terngrad": Preset(
        _stochastic(bits=2, clip=2.5, scale_per="parameter", scale="global", reducer="gather"),
        "Wen et al. 2017, arXiv 1705.07878",
        "three levels, shared scale per layer, clipped at 2.5 σ",
    ),
    "natural_compression": Preset(
        GQSGDConfig(codec="exponential", norm="power_of_two", reducer="two_shot"),
        _NATURAL,
        "sign and exponent, both ways",
    ),
    "natural_dithering": Preset(
        GQSGDConfig(codec="exponential", bits=5, levels=8, norm="l2", reducer="gather"),
        _NATURAL,
        "8 powers of two, l2 norm",
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
    "dq_psgd": Preset(
        _stochastic(bits=4, rotation=True),
        "Saha et al. 2021, arXiv 2103.07578",
        "a random Hadamard rotation first",
        optimizer="SGD",
    ),
    "signsgd_ef": Preset(
        _sign(reducer="two_shot", memory="ef", memory_down="ef"),
        "Zheng et al. 2019, arXiv 1905.10936",
        "signs, errors fed back both ways",
    ),
    "topk_ef": Preset(
        GQSGDConfig(codec="top_k", bits=32, density=0.01, block_size=4096, reducer="gather", memory="ef"),
        "Stich et al. 2018, arXiv 1809.07599",
        "the largest 1 % of each block, errors fed back",
    ),
}


def make_config(preset: str | None = None, **fields: Any) -> GQSGDConfig:
    """A preset (default: ``gqsgd``) with some fields replaced.

    Raises:
        ConfigError: an unknown preset or field, or a configuration that cannot work.
    """
    name = preset or "gqsgd"
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)} (presets: {', '.join(PRESETS)})")
    GQSGDConfig.check_names(fields)
    return dataclasses.replace(PRESETS[name].config, **fields)
