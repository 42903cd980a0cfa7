"""Presets: the systems of the literature by name. Each is a configuration; those of local steps (`LOCAL_PRESETS`) also
have options.

The tables do not import torch: the command line checks names against them before anything heavy is imported, and
`_autoload` derives the names of strategies from them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_gqsgd.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig


@dataclass(frozen=True)
class Preset:
    """A named configuration.

    Attributes:
        fields: the fields of the configuration that are not at their defaults.
        paper: where the system comes from.
        what: a short description of the system.
        optimizer: the optimizer that its paper uses, if it matters. The configuration does not set it.
        fixed: the fields that define the system. They cannot be changed under this name.
        left_out: parts of its paper that are not implemented, and why. Empty if nothing essential is missing.
    """

    fields: Mapping[str, Any]
    paper: str
    what: str
    optimizer: str = "any"
    fixed: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def config(self) -> GQSGDConfig:
        """The configuration."""
        from lightning_gqsgd.config import GQSGDConfig  # imports torch

        return GQSGDConfig(**self.fields)


@dataclass(frozen=True)
class LocalPreset:
    """A named configuration of local steps.

    Attributes:
        options: the fields of `LocalOptions` that are not at their defaults.
        preset: name of the preset for the compression.
        paper: where the system comes from.
        what: a short description of the system.
        fields: the fields of `GQSGDConfig` that differ from those of ``preset``.
        left_out: parts of its paper that are not implemented, and why. Empty if nothing essential is missing.
        optimizer: the inner optimizer that its paper uses, if it matters. The preset does not set it.
    """

    options: Mapping[str, Any]
    preset: str
    paper: str
    what: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: str = ""
    optimizer: str = "any"

    @property
    def compression(self) -> Preset:
        """The configuration of the compression. `make_config` can replace its fields."""
        return Preset({**PRESETS[self.preset].fields, **self.fields}, self.paper, self.what)


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

#: Of systems in which a part of the workers takes part in a round.
_ALL_TAKE_PART = (
    "partial participation: a collective has all ranks of its process group, so a rank that stays away would stop it; "
)
#: Of error feedback whose papers remember errors of the optimizer's steps.
_ERRORS_OF_GRADIENTS = (
    "the learning rate in the memory: the paper remembers errors of steps, and a hook, which does not know the "
    "learning rate, those of gradients; the two are equal while it is constant (docs/method.md, Memory)"
)
#: Global-QSGD's scale, the largest magnitude in the bucket of any rank, and its 8 bits; nothing travels uncompressed.
_ONE_SCALE = {"bits": 8, "scale_per": "bucket", "min_numel": 0}
#: DIANA's and Artemis' codec: l2 norm, levels -1, 0, 1.
_TERNARY = {"bits": 2, "levels": 1, "norm": "l2"}

PRESETS: dict[str, Preset] = {
    "gqsgd": Preset({}, _GLOBAL, "block scales, companded levels, subtractive dither, 8 bits"),
    "gqsgd_4bit": Preset({"bits": 4}, _GLOBAL, "the same at 4 bits"),
    "gqsgd_3bit": Preset({"bits": 3}, _GLOBAL, "the same at 3 bits"),
    "gqsgd_2bit": Preset({"codec": "eden", "bits": 2}, _EDEN, "rotated coordinates at the best 2-bit levels"),
    "gqsgd_trellis": Preset(
        {"codec": "trellis", "bits": 2},
        "Marcellin, Fischer 1990, IEEE Trans. Commun. 38",
        "rotated coordinates at 2-bit levels along a trellis: the smallest error at 2 bits",
        fixed=("codec",),
    ),
    "gqsgd_auto": Preset({"auto": True}, _GLOBAL, "32, 16, 8 or 4 bits, whichever makes steps shortest"),
    "gqsgd_sum": Preset({"reducer": "sum"}, _GLOBAL, "shared scales, codes summed by the all-reduce"),
    "gqsgd_exponential": Preset(
        _exponential(mantissa=3), _GLOBAL, "exponential levels with 3 mantissa bits, exact sums", fixed=("codec",)
    ),
    "gqsgd_exponential_tree": Preset(
        _exponential(reducer="tree"), _GLOBAL, "powers of two, added in pairs along a tree", fixed=("codec",)
    ),
    "global_qsgd_linear": Preset(
        _stochastic(**_ONE_SCALE, reducer="sum"),
        _GLOBAL,
        "the paper's standard dithering: one scale of all ranks per bucket, codes summed by the all-reduce",
        fixed=("codec", "dither", "reducer", "scale_per"),
    ),
    "global_qsgd_exponential": Preset(
        _exponential(**_ONE_SCALE, reducer="tree"),
        _GLOBAL,
        "the paper's exponential dithering: one scale of all ranks per bucket, powers of two added along a tree",
        fixed=("codec", "mantissa", "reducer", "scale_per"),
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
        optimizer="SGD, or lightning_gqsgd.research.optim.ProximalSGD",
    ),
    "artemis": Preset(
        _stochastic(**_TERNARY, reducer="two_shot", memory="diana"),
        "Philippenko, Dieuleveut 2020, arXiv 2006.14591",
        "DIANA with the way back compressed",
        optimizer="SGD",
        left_out=_ALL_TAKE_PART + "local steps have it in simulations",
    ),
    "dore": Preset(
        _stochastic(**_TERNARY, reducer="two_shot", memory="diana", memory_down="ecq"),
        "Liu et al. 2019, arXiv 1910.07561",
        "Artemis with errors fed back on the way back",
        optimizer="SGD",
        left_out="the free weights β and η of the way back, because ω gives a stable weight: a message has 1/(1 + ω) "
        "of the error, and all that it leaves out is kept, where the paper forgets 1 - η of the error; and the "
        "proximal step, because a penalty keeps the mean gradient away from zero, and the way back would go on "
        "rounding it; diana has it",
    ),
    "wyner_ziv": Preset(
        {"bits": 3, "memory": "shared"},
        "Liang et al. 2021, arXiv 2111.08277",
        "differences to a running mean that all ranks share",
        left_out="the modulo, because a sender that knows the reference needs none, and a reference of each rank's own "
        "history, which has the noise of one gradient and not of n; docs/theory.md, Side information, has the figures",
    ),
    "dq_psgd": Preset(
        _stochastic(bits=4, rotation=True),
        "Saha et al. 2021, arXiv 2103.07578",
        "a random Hadamard rotation first",
        optimizer="SGD",
        left_out="budgets below one bit per coordinate between processes, because a code has a bit at least and top_k "
        "sends less; simulations have them, research.simulation.subspaces; the mean of iterates is "
        "torch.optim.swa_utils.AveragedModel",
    ),
    "drive": Preset(
        {"codec": "eden", "bits": 1, "block_size": 4096, "reducer": "gather"},
        "Vargaftik et al. 2021, arXiv 2105.08339",
        "signs of rotated coordinates, a scale without bias",
        fixed=("codec", "bits"),
    ),
    "eden": Preset(
        {"codec": "eden", "bits": 2, "block_size": 4096, "reducer": "gather"},
        _EDEN,
        "rotated coordinates at the best levels for Gaussian numbers, a scale without bias",
        fixed=("codec",),
    ),
    "signsgd_ef": Preset(
        _sign(reducer="two_shot", memory="ef", memory_down="ef"),
        "Zheng et al. 2019, arXiv 1905.10936",
        "signs, errors fed back both ways",
        fixed=("codec",),
        left_out=_ERRORS_OF_GRADIENTS,
    ),
    "topk_ef": Preset(
        {"codec": "top_k", "density": 0.01, "block_size": 4096, "reducer": "gather", "memory": "ef"},
        "Stich et al. 2018, arXiv 1809.07599",
        "the largest 1 % of each block, errors fed back",
        fixed=("codec",),
        left_out=_ERRORS_OF_GRADIENTS,
    ),
}


#: Local steps: what is averaged how often, by which outer optimizer, and with how many bits.
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
        left_out=_ALL_TAKE_PART + "simulate(participation=...) has it, and with elastic=True ranks come and go",
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
    "gqsgd_muloco": LocalPreset(
        {"every": 30, "outer": "nesterov"},
        "gqsgd_2bit",
        "Thérien et al. 2025, arXiv 2505.23725",
        "changes of 30 steps of Muon at 2 bits, errors fed back, Nesterov momentum outside",
        {"memory": "ef", "memory_down": "ef"},
        optimizer="lightning_gqsgd.research.optim.MuonAdamW",
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
        left_out="the loop over R batches at one point, because gradients are the caller's, and all loops accumulate "
        "already: Trainer(accumulate_grad_batches=4) for its 4 messages, or step() after every fourth backward(); and "
        "the wait of the server for all messages of a change, because each exchange has both ways: an owner answers "
        "each message at once, so that more is left out on the way back",
    ),
    "gqsgd_mcm": LocalPreset(
        {"every": 1, "outer": "sgd"},
        "dore",
        "Philippenko, Dieuleveut 2021, arXiv 2102.12528",
        "changes of each step both ways; the owner of a shard keeps the true model as the error that is fed back",
        left_out="the learnt reference of the way back: in its place, each message has 1/(1 + ω) of the distance "
        "between the ranks' model and the true one. Its square is 3/4 of that with the reference if steps have zero "
        "mean",
    ),
    "gqsgd_predictive": LocalPreset(
        {"every": 10, "outer": "sgd", "rule": "predicted"},
        "qsgd_elias",
        "Yue et al. 2021, arXiv 2108.00918",
        "changes of 10 steps less what all ranks predict, at 3 levels in Elias codes",
        {"bits": 2, "levels": 1, "block_size": 4096},
        left_out="the autoregression and the second quantiser, between which rate and distortion choose: the nearest "
        "of three predictions is taken, under one quantiser, so that a message needs one more number only",
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
        ConfigError: for an unknown preset or field, a field that contradicts the preset's fixed fields, or a
            configuration that cannot work.
    """
    from lightning_gqsgd.config import GQSGDConfig  # imports torch

    GQSGDConfig.check_names(fields)
    if isinstance(preset, GQSGDConfig):
        return preset.replaced(**fields)
    # An entry of the table means the same as its name, which also fixes fields.
    preset = next((name for name, known in PRESETS.items() if known is preset), preset)
    if isinstance(preset, Preset):
        usual = dict(preset.fields)
        if fields.get("auto") or fields.get("max_slowdown") is not None:
            usual.pop("bits", None)  # the user has not given them, so no error may speak of them
        return GQSGDConfig(**{**usual, **fields})
    name = "gqsgd" if preset is None else preset
    if not isinstance(name, str):
        raise ConfigError(
            f"preset={preset!r} is neither the name of a preset nor a GQSGDConfig; give fields by name, e.g. "
            f"{_as_fields(preset)}, or a preset ({', '.join(PRESETS)})"
        )
    if name not in PRESETS:
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


def bits_of_name(name: str) -> int | None:
    """Returns the number of bits that a name such as ``gqsgd_8bit`` or ``gqsgd16`` asks for.

    None if the name has no number of bits, or is itself the name of a preset.
    """
    matched = re.fullmatch(r"gqsgd[-_]?(1|2|3|4|5|6|7|8|16|32)[-_]?(?:bits?)?", name)
    if matched is None or f"gqsgd_{matched[1]}bit" in PRESETS:
        return None
    return int(matched[1])


def did_you_mean_preset(name: str, choices: Iterable[str]) -> str:
    """Returns a suggestion for an unknown preset name, as the end of a sentence; empty if no preset has a similar name.

    A name such as ``gqsgd_8bit`` is not a misspelling: it asks for a number of bits for which there is no preset of
    that name.
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
    """Returns a hint for a wrong value of ``preset``: what it was perhaps meant to be."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={field!r}" for name, field in value.items()) or "bits=4"
    return f"bits={value}" if isinstance(value, int) and not isinstance(value, bool) else "bits=4"
