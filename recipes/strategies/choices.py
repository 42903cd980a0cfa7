"""The choices of ``strategy=``: the files in conf/strategy, and every preset of the package.

A preset has no file. `register_presets` puts an entry for each preset into Hydra's ConfigStore, beside the files, so
that a new preset is a choice as soon as it is in `lightning_gqsgd.presets`. ``gqsgd_elastic`` is DiLoCo's preset by the
clock, with processes that may leave and join.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.membership.door import lighthouse_address
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, did_you_mean_preset
from lightning_gqsgd.spec.decisions import WIDTHS, WIDTHS_IN_WORDS
from lightning_gqsgd.spec.quantities import TIMES, quantity
from recipes.errors import RecipeError

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUP = "strategy"
TARGET = "lightning_gqsgd.GQSGDStrategy"

#: Bits of the package's own codec where a preset names no number.
DEFAULT_BITS = 8

#: Local steps by the clock, with processes that may leave and join, each of which is a run of its own.
ELASTIC = "gqsgd_elastic"

#: What ``strategy=all`` of compare.py stands for: every preset, and the baselines that run on every device.
ALL = ("ddp", "ddp_bf16", *PRESETS)


#: Some strategies for a message that says that a name is none.
EXAMPLES = "ddp, ddp_bf16, gqsgd, gqsgd_4bit or gqsgd_diloco"
#: Where all strategies are listed.
EVERYWHERE = "python recipes/run.py --help"


def choices_of(group: str, folders: Iterable[Path] = ()) -> list[str]:
    """Names of the choices of a group that have a file in conf/, or in folders of the user's own."""
    return sorted({file.stem for folder in (CONF, *folders) for file in (folder / group).glob("*.yaml")})


def baselines() -> list[str]:
    """Names of the strategies that have a file: torch's own."""
    return choices_of(GROUP)


def strategies() -> list[str]:
    """Names of all strategies: the baselines, then the presets in the order of the package, then those of local
    steps, and the elastic one."""
    return [*baselines(), *PRESETS, *LOCAL_PRESETS, ELASTIC]


def register_presets() -> None:
    """Make every preset a choice of ``strategy=``; to be called before Hydra composes a configuration."""
    store = ConfigStore.instance()
    # A command composes several configurations, and storing all presets is a tenth of the time of each.
    stored = store.repo.get(GROUP, {})
    if all(f"{name}.yaml" in stored for name in (*PRESETS, *LOCAL_PRESETS, ELASTIC)):
        return
    for name in PRESETS:
        store.store(group=GROUP, name=name, node=preset_node(name), provider="lightning_gqsgd.presets")
    for name, local in LOCAL_PRESETS.items():
        node = {"name": name, "_target_": TARGET, "preset": name, "local_steps": local.options["every"]}
        store.store(group=GROUP, name=name, node=node, provider="lightning_gqsgd.presets")
    rounds = {"local_steps": "20s", "delay": 1, "elastic": True, "validate_at": "anchor"}
    node = {"name": ELASTIC, "_target_": TARGET, "preset": "gqsgd_diloco", **rounds}
    store.store(group=GROUP, name=ELASTIC, node=node, provider="recipes.strategies.choices")


def preset_node(name: str) -> dict[str, Any]:
    """The configuration of a preset's strategy."""
    node = {"name": name, "_target_": TARGET, "preset": name}
    preset = PRESETS[name]
    # A key that is listed is changed by strategy.bits=2, another one is added by +strategy.bits=2. The package's own
    # codec is used at different numbers of bits; the systems of the literature have theirs.
    return {**node, "bits": preset.fields.get("bits", DEFAULT_BITS)} if set(preset.fields) <= {"bits"} else node


def check_strategies(arguments: Sequence[str]) -> None:
    """Refuse a misspelt name in one line; Hydra's own error has two dozen.

    Args:
        arguments: a command line of overrides; values may be comma lists. Names are not checked where the command line
            adds folders to Hydra's search path, which may hold further strategies.

    Raises:
        RecipeError: a name is no choice of ``strategy=``.
    """
    if any(re.match(r"(--config-dir|-cd|\+*hydra\.searchpath=)", argument) for argument in arguments):
        return
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key != GROUP or not re.fullmatch(r"[\w,]*", value):
            continue  # another group, or a value in Hydra's grammar of sweeps
        for name in value.split(","):
            _check(name)


def check_light(strategy: Mapping[str, Any]) -> None:
    """Refuse what can be told of a strategy without torch: a timeout, a number of bits.

    Raises:
        RecipeError: the strategy cannot work as asked, or the timeout is no time.
    """
    timeout_for(strategy)
    bits = strategy.get("bits")
    if strategy["_target_"] != TARGET or bits is None or isinstance(bits, Mapping) or bits == "auto":
        return
    if type(bits) is not int or bits not in WIDTHS:  # `check_settings` knows those of each codec
        raise RecipeError(f"strategy.bits={bits} is out of range: {WIDTHS_IN_WORDS}, or auto, e.g. strategy.bits=4")


def timeout_for(strategy: Mapping[str, Any]) -> dict[str, timedelta]:
    """Returns the argument ``timeout`` of a strategy whose node has the entry; empty if it has none.

    Raises:
        RecipeError: the entry is no time.
    """
    value = strategy.get("timeout")
    if value is None:
        return {}
    seconds = quantity(value, TIMES) if isinstance(value, str) else None
    if not seconds:
        raise RecipeError(f"strategy.timeout={value} is not a time: a number and a unit, e.g. +strategy.timeout=5min")
    return {"timeout": timedelta(seconds=seconds)}


def check_elastic(config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse an elastic run of several processes, or without the address of a lighthouse."""
    if not config["strategy"].get("elastic"):
        return
    trainer, name = config["trainer"], config["strategy"]["name"]
    if trainer["num_nodes"] != 1 or str(trainer["devices"]) != "1":
        raise RecipeError(
            f"strategy={name} has one process, and this run asks for trainer.devices={trainer['devices']} on "
            f"{counted(trainer['num_nodes'], 'node')}; add trainer.devices=1, and start a run with another seed for "
            "each process"
        )
    try:
        lighthouse_address(environment)
    except ConfigError as error:
        raise RecipeError(f"strategy={name}: {error}") from error


def check_settings(node: Mapping[str, Any]) -> None:
    """Refuse a configuration of gqsgd that cannot work, before Lightning is imported; this imports torch.

    Raises:
        ConfigError: the fields of the node make no configuration of gqsgd.
    """
    if node["_target_"] != TARGET:
        return
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.presets import make_config

    plain: Any = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else dict(node)
    # Other entries are arguments of Lightning's strategy.
    fields = {name: value for name, value in plain.items() if name in GQSGDConfig.field_names()}
    if plain.get("preset") in LOCAL_PRESETS or plain.get("local_steps") is not None:
        from lightning_gqsgd.local_steps.choosing import make_local, pop_options

        make_local(plain.get("preset"), pop_options(plain), fields)
        return
    make_config(plain.get("preset"), **fields)


def steps_of_round(node: Mapping[str, Any]) -> int:
    """Number of steps from one average to the next: 1, unless a strategy has local steps."""
    steps = node.get("local_steps")
    return steps if isinstance(steps, int) else 1


def _check(name: str) -> None:
    names = strategies()
    if name == "all":
        raise RecipeError("strategy=all is a comparison of strategies: take python recipes/compare.py")
    if not name:
        raise RecipeError(f"strategy= names no strategy; take e.g. {EXAMPLES} (all: {EVERYWHERE})")
    if name not in names:
        hint = did_you_mean_preset(name, names) or f"; take e.g. {EXAMPLES}"
        raise RecipeError(f"strategy={name} is not a strategy{hint} (all: {EVERYWHERE})")
