"""Overrides that no configuration has, explained in one line each; Hydra's own answers are long, and advise ``+``.

Nothing heavy is imported here: a mistake is answered before torch is.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from lightning_gqsgd.errors import did_you_mean
from recipes.configuration import compose_configuration, without_hydra
from recipes.errors import RecipeError, typed
from recipes.own_folders import SEARCH_PATH, folders_of
from recipes.strategies.choices import CONF, GROUP, TARGET, check_strategies, choices_of
from recipes.unread import check_read

#: Settings that are numbers by default and take other values, too: lists of devices, ``auto``.
FREE = ("trainer.devices", "hardware.devices", "strategy.bits")
#: Settings that are null by default and take a number otherwise, each with an example.
NUMBERS: dict[str, int | float] = {
    **{"threads": 1, "workers": 1, "resize": 256},
    **{"train_samples": 1000, "test_samples": 1000, "val_samples": 1000, "valid_samples": 1000, "max_rows": 1000},
    **{"limit_train_batches": 0.5, "limit_val_batches": 0.5, "limit_test_batches": 0.5},
    **{"gradient_clip_val": 0.5, "val_check_interval": 0.5},
}
#: What is wrong where a value is taken from a key that another group does not have.
MISFIT = "the chosen data, model and task do not fit each other; +exp=NAME chooses three that do"
#: What further entries of a node are, for a key that the node does not list.
OPEN_NODES = {"trainer": "arguments of lightning.pytorch.Trainer", "hardware.env": "environment variables"}


def composed(overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    """The configuration that a command line makes.

    Raises:
        RecipeError: an override has no place in the configuration, or a value of another type than the default, or
            the command line has another problem; every message is one line.
    """
    parsed = parse(overrides)
    check_strategies(overrides)
    folders = folders_of(overrides)
    _check_choices(parsed, folders)
    try:
        cfg = compose_configuration(overrides, with_hydra=with_hydra)
        _check_nodes(cfg, folders)
        # Interpolations are resolved here, so that a value that none of them can use is found now.
        OmegaConf.to_container(without_hydra(cfg), resolve=True)
    except Exception as error:  # Hydra and OmegaConf raise several families of errors
        for override in parsed:
            _check_key(override, overrides)
        hint = "; " + MISFIT if isinstance(error, InterpolationResolutionError) else ""
        raise RecipeError(_one_line(error) + hint) from error
    for override in parsed:
        _check_type(override, overrides)
    check_read(cfg)
    return cfg


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra reads them."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except Exception as error:  # Hydra's parser raises ANTLR's errors beside Hydra's
            raise RecipeError(_unreadable(text)) from error
    return parsed


def combinations(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """The product of all comma lists, as command lines."""
    columns = []
    for override in overrides:
        if not override.is_sweep_override():
            columns.append([str(override.input_line)])
            continue
        key = str(override.get_key_element())
        columns.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return list(itertools.product(*columns))


def first_combination(overrides: Sequence[Override]) -> tuple[str, ...]:
    """The first job of a sweep, as a command line; of an interval that a search draws from, its lower end."""
    words = []
    for override in overrides:
        value = override.value()
        if isinstance(value, IntervalSweep):
            words.append(f"{override.get_key_element()}={value.start}")
        elif override.is_sweep_override():
            first = next(iter(override.sweep_string_iterator()), None)
            if first is None:
                raise RecipeError(f"{override.input_line} has no value, e.g. a range that ends before it starts")
            words.append(f"{override.get_key_element()}={first}")
        else:
            words.append(str(override.input_line))
    return tuple(words)


def _unreadable(text: str) -> str:
    if text.startswith("-"):
        return f"unknown option {text}; settings are written key=value, e.g. trainer.max_epochs=3"
    if "=" not in text:
        return f"{text!r} has no value; settings are written key=value, e.g. trainer.max_epochs=3"
    return f"cannot read {text!r}: brackets and quotes have to be closed, and spaces and commas need quotes"


# --- choices of groups ------------------------------------------------------------------------------------------------


#: Groups that are not in the list of defaults.
ADDED = ("exp", "debug")
#: Groups of which every run needs a choice; presets of `strategy` are no files.
NEEDED = ("data", "model", "task", "optimizer", "hardware", "trainer", "logger", "paths")


def _check_choices(overrides: Sequence[Override], folders: Sequence[Path]) -> None:
    """Refuse a name that is no choice of a group, e.g. of ``model=``."""
    for override in overrides:
        group = override.key_or_group
        if group == GROUP or group.startswith("hydra") or not (CONF / group).is_dir() or override.is_delete():
            continue
        names = choices_of(group, folders)
        if override.is_add() and group not in ADDED and override.package is None:
            raise RecipeError(
                f"{override.input_line}: {group} is chosen without the plus, {str(override.input_line).lstrip('+')}; "
                f"its choices are {', '.join(names)}"
            )
        if group == "exp" and not override.is_add():
            raise RecipeError(f"{override.input_line}: an experiment is added, write +{override.input_line}")
        values = override.sweep_string_iterator() if override.is_sweep_override() else _listed(override.value())
        for value in values:
            if value not in names:
                near = did_you_mean(value, names) if isinstance(value, str) else ""
                raise RecipeError(f"{group}={typed(value)} is not one of {', '.join(names)}{near}")


def _check_nodes(cfg: DictConfig, folders: Sequence[Path]) -> None:
    """Refuse a configuration in which a group that a run needs has no choice, as with ``~model`` or ``model=[]``."""
    for group in NEEDED:
        if cfg.get(group) is None:
            names = choices_of(group, folders)
            raise RecipeError(
                f"{group} is not chosen, and a run needs it: take {group}=NAME, one of {', '.join(names)}"
            )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# --- keys -------------------------------------------------------------------------------------------------------------


@lru_cache
def _defaults(groups: tuple[str, ...]) -> DictConfig:
    """The configuration without any value of the command line: chosen groups with their defaults."""
    return compose_configuration(groups)


def _base(overrides: Sequence[str]) -> DictConfig:
    return _defaults(tuple(text for text in overrides if _chooses(parse([text])[0].key_or_group)))


def _chooses(key: str) -> bool:
    """Whether an override with this key says which files are read."""
    return (CONF / key).is_dir() or key == SEARCH_PATH


def _check_key(override: Override, overrides: Sequence[str]) -> None:
    """Refuse a key that the configuration does not have."""
    key = override.key_or_group
    if (CONF / key).is_dir() or key.startswith("hydra") or override.is_add() or override.is_force_add():
        return
    base = _base(overrides)
    if _has(base, key):
        return
    node, _, leaf = key.rpartition(".")
    settings = [name for name in _settings(base, node) if name != "_target_"]
    near = difflib.get_close_matches(leaf, settings, n=1, cutoff=0.7)
    if near:
        meant = f"{node}.{near[0]}" if node else near[0]
        raise RecipeError(f"{override.input_line}: there is no {key}; did you mean {meant}?")
    raise RecipeError(f"{override.input_line}: {_no_such_key(override, base, settings)}")


def _no_such_key(override: Override, base: DictConfig, settings: Sequence[str]) -> str:
    key = override.key_or_group
    node, _, leaf = key.rpartition(".")
    elsewhere = [name for name in _other_keys(base, key) if name.rpartition(".")[2] == leaf]
    if node == GROUP:
        chosen = base[GROUP]
        if chosen.get("_target_") == TARGET:
            return (
                f"strategy={chosen.name} does not list {leaf}; a field of GQSGDConfig, or an argument of DDPStrategy, "
                f"is added with +{override.input_line}"
            )
        bits = f"; take e.g. strategy=gqsgd strategy.bits={override.value()}" if leaf in ("bit", "bits") else ""
        return f"strategy={chosen.name} has no {leaf} (it has {', '.join(settings)}){bits}"
    if elsewhere:
        return f"there is no {key}; did you mean {elsewhere[0]}?"
    if node in OPEN_NODES and _has(base, node):
        return f"{node} does not list {leaf}; further {OPEN_NODES[node]} are added with +{override.input_line}"
    parent = node if node and _has(base, node) else ""
    near = _near(leaf if parent else key, key, base)
    if near:
        return f"there is no {key}; did you mean {near}?"
    names = settings if parent else [str(name) for name in base]
    return f"there is no {key}; {parent or 'a configuration'} has {', '.join(names)}"


def _near(word: str, key: str, base: DictConfig) -> str | None:
    """The key of a configuration that is nearest to a word, if one is near.

    The word is the whole key, or its last part where the node before it exists: two keys of one node are not alike
    because their nodes are.
    """
    keys = {name if word == key else name.rpartition(".")[2]: name for name in _other_keys(base, key)}
    found = difflib.get_close_matches(word, keys, n=1, cutoff=0.6 if word == key else 0.75)
    return keys[found[0]] if found else None


def _has(cfg: DictConfig, key: str) -> bool:
    """Whether a configuration has a key, whatever its value."""
    node: Any = cfg
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            return isinstance(node, ListConfig) and part.isdecimal() and int(part) < len(node)
        node = node._get_node(part)
        if isinstance(node, DictConfig | ListConfig) and (node._is_interpolation() or node._is_none()):
            return False
    return True


def _settings(cfg: DictConfig, node: str) -> list[str]:
    """Names in a node; empty if there is no such node."""
    if node and not _has(cfg, node):
        return []
    found = OmegaConf.select(cfg, node) if node else cfg
    return [str(name) for name in found] if isinstance(found, DictConfig) else []


def _all_keys(cfg: DictConfig) -> list[str]:
    """All keys of a configuration, with dots."""
    keys: list[str] = []

    def walk(node: DictConfig, prefix: str) -> None:
        for name in node:
            child = node._get_node(name)
            keys.append(prefix + str(name))
            if isinstance(child, DictConfig) and not child._is_none() and not child._is_interpolation():
                walk(child, f"{keys[-1]}.")

    walk(cfg, "")
    return [key for key in keys if not key.endswith("_target_")]


def _other_keys(cfg: DictConfig, key: str) -> list[str]:
    """All keys of a configuration but the nodes in which a key would be."""
    return [name for name in _all_keys(cfg) if not key.startswith(f"{name}.")]


# --- types ------------------------------------------------------------------------------------------------------------


def _check_type(override: Override, overrides: Sequence[str]) -> None:
    """Refuse a value of another type than the default, where the default is a number, a list, or true or false."""
    key = override.key_or_group
    if override.is_add() or override.is_delete() or override.is_force_add() or override.is_sweep_override():
        return
    if key in FREE or (CONF / key).is_dir() or key.startswith("hydra"):
        return
    value = override.value()
    if value is None or isinstance(value, str) and "${" in value:
        return
    base = _base(overrides)
    default = OmegaConf.select(base, key) if _has(base, key) else None
    leaf = key.rpartition(".")[2]
    if default is None and leaf in NUMBERS:
        default = NUMBERS[leaf]
    wanted = _wanted(default, value)
    if wanted:
        raise RecipeError(f"{override.input_line}: {key} is {wanted}, e.g. {key}={typed(default)}")


def _wanted(default: Any, value: Any) -> str | None:
    """What a value should be, or None if it is of the right type."""
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if isinstance(value, int) and not isinstance(value, bool) else "an integer"
    if isinstance(default, float):
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    if isinstance(default, ListConfig):
        return None if isinstance(value, list) else "a list"
    return None


def _one_line(error: Exception) -> str:
    """The message of Hydra or OmegaConf without the lines that repeat it."""
    if isinstance(error, RecipeError):
        return str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = itertools.takewhile(lambda line: not re.match(r"(full_key|object_type|See https|Available)", line), lines)
    return "; ".join(kept) or type(error).__name__
