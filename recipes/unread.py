"""Entries of a configuration that nothing reads: a training would go on as if they were not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipes.configuration import without_hydra
from recipes.errors import RecipeError
from recipes.strategies.choices import CONF, choices_of

#: Everything that a run reads at the top of a configuration; a test compares it with conf/config.yaml.
READ = (
    *("data", "model", "task", "optimizer", "hardware", "trainer", "strategy", "logger", "callbacks", "paths"),
    *("title", "seed", "threads", "test", "checkpoint", "resume", "ckpt_path", "run_root", "hydra"),
)
#: Nodes whose entries have names of the user's own.
_OPEN = ("hardware.env", "hardware.sbatch")


def check_read(cfg: DictConfig) -> None:
    """Check that something reads every entry at the top, and of ``hardware``, ``paths`` and ``callbacks``.

    The entries of other nodes are arguments, which `recipes.arguments` and the calls themselves check. An entry that
    another one takes its value from, as ``${width}``, is read.
    """
    plain = OmegaConf.to_container(without_hydra(cfg))
    assert isinstance(plain, dict)
    used = set(_references(plain))
    for key in plain:
        _check(str(key), READ, used, plain[key])
    for node in ("hardware", "paths"):
        for key, value in plain[node].items():
            if f"{node}.{key}" not in _OPEN:
                _check(f"{node}.{key}", tuple(f"{node}.{name}" for name in _known(node)), used, value)
    for name, entry in (plain.get("callbacks") or {}).items():
        if entry is not None and not (isinstance(entry, Mapping) and "_target_" in entry):
            names = ", ".join(choices_of("callbacks"))
            raise RecipeError(
                f"callbacks.{name} has no _target_, so that there is no callback: choose callbacks={name} if there is "
                f"such a file ({names}; several: callbacks=[...]), and change its settings then"
            )


def _check(key: str, known: tuple[str, ...], used: set[str], value: Any) -> None:
    if key in known or any(name == key or name.startswith(f"{key}.") for name in used):
        return
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7)
    remedy = f"did you mean {near[0]}?" if near else "leave it out"
    shown = "..." if isinstance(value, dict) else value
    raise RecipeError(f"{key}={shown}: nothing reads {key}; {remedy}")


@lru_cache
def _known(node: str) -> tuple[str, ...]:
    """Names that any file of a group gives the node of this name."""
    names: dict[str, None] = {}
    for file in sorted((CONF / node).glob("*.yaml")):
        loaded: Any = OmegaConf.to_container(OmegaConf.load(file))
        # A file that is packed at the top of the configuration has the node inside.
        names.update(dict.fromkeys(map(str, loaded.get(node, loaded) if "defaults" in loaded else loaded)))
    return tuple(names)


def _references(node: Any) -> Iterator[str]:
    """Keys that interpolations name."""
    if isinstance(node, dict):
        for entry in node.values():
            yield from _references(entry)
    elif isinstance(node, list):
        for entry in node:
            yield from _references(entry)
    elif isinstance(node, str):
        yield from re.findall(r"\$\{([\w.]+)\}", node)
