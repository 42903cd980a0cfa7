"""Configurations: the words that Hydra composes them from, also outside of `run.py`, and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.arguments import check_arguments
from recipes.data.named_files import check_named, check_stand_in
from recipes.launch.environment import check_threads
from recipes.launch.hardware import check_profile
from recipes.limits import check_limits
from recipes.strategies.choices import CONF, check_elastic, check_light, register_presets

#: The group whose choices go over everything else: Hydra lets the last entry of the list of defaults win.
DEBUG = "debug"
#: Always written, and no entry of its own.
CSV = "csv"


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A configuration without the node ``hydra``."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def for_hydra(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra has to get them. What has been changed already stays as it is.

    ``debug=NAME`` comes last, so that it goes over ``+exp=NAME`` as well. ``logger=[wandb,tensorboard]`` gives each
    logger a node of its own, ``logger.wandb`` and ``logger.tensorboard``; Hydra would merge the files into one.
    """
    made: list[str] = []
    debug: list[str] = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key.lstrip("+") == DEBUG:
            debug.append(f"+{DEBUG}={value}")
        elif key == "logger" and value.startswith("[") and value.endswith("]"):
            made += _nested(value[1:-1].replace(" ", "").split(","))
        else:
            made.append(word)
    return made + debug


def _nested(names: Sequence[str]) -> list[str]:
    """Overrides that choose several loggers."""
    others = [name for name in dict.fromkeys(names) if name and name != CSV]
    if not others:
        return [f"logger={CSV}"]
    return ["~logger", *(f"+logger@logger.{name}={name}" for name in others)]


def compose_configuration(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration that a command line of `run.py` makes."""
    register_presets()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=for_hydra(overrides), return_hydra_config=with_hydra)


def check_configuration(config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Check what does not depend on the machine: settings, arguments, names of files, the profile and the strategy.

    Raises:
        RecipeError, NetLabError: the run cannot be made as asked.
    """
    check_limits(config)
    check_threads(environment)
    check_arguments(config)
    check_profile(config)
    check_light(config["strategy"])
    check_elastic(config, environment)
    check_named(config["data"])
    check_stand_in(config["data"], config["trainer"]["accelerator"])
