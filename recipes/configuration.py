"""Composing configurations outside of `run.py`, with the same choices."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from recipes.for_hydra import for_hydra
from recipes.strategies.choices import CONF, register_presets


def without_hydra(cfg: DictConfig) -> DictConfig:
    """A configuration without the node ``hydra``."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def compose_configuration(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration that a command line of `run.py` makes.

    Args:
        overrides: the command line, without the name of the script.
        with_hydra: whether the node ``hydra`` is part of the result.
    """
    register_presets()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=for_hydra(overrides), return_hydra_config=with_hydra)
