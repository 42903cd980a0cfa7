"""From a command line to the runs that it asks for."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from lightning_gqsgd.presets import PRESETS
from recipes.tasks.building import target_of
from recipes.tasks.metrics import Metric

CONF = Path(__file__).resolve().parents[2] / "conf"
CELL_FILE = "cell.json"
RESULT_FILE = "result.json"

LAUNCHERS = ("lightning", "netlab")
DEFAULT_STRATEGIES = "strategy=ddp,gqsgd"

#: What ``strategy=all`` stands for: every preset, and the baselines that run on every device (powersgd needs CUDA).
ALL_STRATEGIES = ("ddp", "ddp_bf16", *PRESETS)


class PlanError(ValueError):
    """A comparison that cannot be made as asked; the message names the remedy."""


@dataclass(frozen=True)
class Settings:
    """What `compare.py` reads itself, written like overrides.

    Attributes:
        launcher: ``"lightning"`` (each run starts its processes) or ``"netlab"`` (hosts with shaped links, all on this
            machine).
        hosts, rate: of netlab, one process per host, e.g. 2 and "1gbit".
        target: value of the task's metric whose time is reported; None: what all runs reach, less 1 %.
        output: folder of all comparisons.
    """

    launcher: str = "lightning"
    hosts: int = 2
    rate: str = "1gbit"
    target: float | None = None
    output: str = "outputs/compare"

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise PlanError(f"launcher={self.launcher!r} is not one of {', '.join(LAUNCHERS)}")
        if self.hosts < 2:
            raise PlanError(f"hosts={self.hosts} must be at least 2")


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        variant: what tables and plots call all seeds of these settings.
        overrides: command line of ``run.py``.
        config: the complete configuration that they make, with the launcher.
        folder: where the run writes.
    """

    variant: str
    seed: int
    overrides: tuple[str, ...]
    config: dict[str, Any]
    folder: Path

    def is_finished(self) -> bool:
        """Whether the folder holds the result of exactly this configuration."""
        try:
            recorded = json.loads((self.folder / CELL_FILE).read_text())
        except (OSError, ValueError):
            return False
        return recorded == self.config and (self.folder / RESULT_FILE).is_file()


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, in their order: seed by seed, so that slow changes of the machine meet all variants."""

    settings: Settings
    experiment: str
    folder: Path
    cells: tuple[Cell, ...]


def make_plan(arguments: Sequence[str]) -> Plan:
    """Parse overrides, whose comma lists are the sweep, and compose every configuration, so that mistakes come up now.

    Raises:
        PlanError: no experiment, a malformed setting, or a configuration that cannot be composed.
    """
    arguments = [_without_all(argument) for argument in arguments]
    try:
        overrides = OverridesParser.create().parse_overrides(arguments)
    except Exception as error:  # Hydra's parser raises ANTLR's errors as well as its own
        raise PlanError(f"cannot read {' '.join(arguments)!r}: {error}") from error
    own = [field.name for field in fields(Settings)]
    settings = _settings([override for override in overrides if override.key_or_group in own])
    passed = [override for override in overrides if override.key_or_group not in own]
    experiment = _experiment(passed)
    if not any(override.key_or_group == "strategy" for override in passed):
        passed += OverridesParser.create().parse_overrides([DEFAULT_STRATEGIES])
    shaped = settings.launcher == "netlab"
    fixed = [f"trainer.num_nodes={settings.hosts}", "trainer.devices=1"] if shaped else []
    name = f"{experiment}-netlab-{settings.rate}" if shaped else experiment
    folder = Path(settings.output).absolute() / _slug(name)
    launch = {"launcher": settings.launcher, **({"hosts": settings.hosts, "rate": settings.rate} if shaped else {})}
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cells = [
            _cell([*choice, *fixed], _swept(passed), launch, folder / "cells", group=f"compare-{folder.name}")
            for choice in _choices(passed)
        ]
    _check_distinct(cells)
    _check_target(settings.target, target_of(cells[0].config["task"]).metric)
    first = {variant: place for place, variant in reversed(list(enumerate(cell.variant for cell in cells)))}
    cells.sort(key=lambda cell: (cell.seed, first[cell.variant]))
    return Plan(settings, experiment, folder, tuple(cells))


def _without_all(argument: str) -> str:
    """The argument, with the names of all strategies in place of "all"."""
    key, _, value = argument.partition("=")
    if key != "strategy" or "all" not in value.split(","):
        return argument
    if value != "all":
        raise PlanError(f"{argument}: 'all' includes the others; take strategy=all, or a list of names")
    return f"strategy={','.join(ALL_STRATEGIES)}"


def _settings(overrides: Sequence[Override]) -> Settings:
    values: dict[str, Any] = {override.key_or_group: override.value() for override in overrides}
    for name, kind in (("hosts", int), ("target", (int, float)), ("rate", str), ("launcher", str), ("output", str)):
        if name in values and (isinstance(values[name], bool) or not isinstance(values[name], kind)):
            raise PlanError(f"{name}={values[name]!r} cannot be read; examples: hosts=2 rate=1gbit target=0.9")
    return Settings(**values)


def _experiment(overrides: Sequence[Override]) -> str:
    for override in overrides:
        if override.key_or_group == "exp" and isinstance(override.value(), str):
            return str(override.value())
    known = ", ".join(sorted(file.stem for file in (CONF / "exp").glob("*.yaml")))
    raise PlanError(f"name one experiment: +exp=NAME, one of {known}")


def _swept(overrides: Sequence[Override]) -> list[str]:
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def _choices(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """The product of all comma lists, as command lines."""
    columns = []
    for override in overrides:
        if not override.is_sweep_override():
            columns.append([str(override.input_line)])
            continue
        key = str(override.get_key_element())
        columns.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    return list(itertools.product(*columns))


def _cell(overrides: Sequence[str], swept: Sequence[str], launch: dict[str, Any], folder: Path, group: str) -> Cell:
    try:
        composed = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    except Exception as error:  # Hydra and OmegaConf have several families of errors; all of them name the key
        raise PlanError(f"{' '.join(overrides)}: {error}") from error
    assert isinstance(composed, dict)
    config = {str(key): value for key, value in composed.items()}
    if "group" in config["logger"] and config["logger"]["group"] is None:
        config["logger"]["group"] = group
        overrides = [*overrides, f"logger.group={group}"]
    seed, name = config["seed"], config["strategy"]["name"]
    details = [_last_part(override) for override in overrides if _key(override) in swept]
    variant = " ".join([name, *(detail for detail in details if detail)])
    return Cell(variant, seed, tuple(overrides), {**config, "compare": launch}, folder / f"{_slug(variant)}-seed{seed}")


def _last_part(override: str) -> str:
    """``bits=4`` of ``strategy.bits=4``; nothing for what the variant's name or the seed says already."""
    key, _, value = override.partition("=")
    if _key(override) in ("strategy", "strategy.name", "seed"):
        return ""
    return f"{key.lstrip('+').split('.')[-1]}={value}"


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _check_distinct(cells: Sequence[Cell]) -> None:
    folders = [cell.folder for cell in cells]
    for cell in cells:
        if folders.count(cell.folder) > 1:
            raise PlanError(f"several runs are called {cell.folder.name}; list every strategy and seed once")


def _check_target(target: float | None, metric: Metric) -> None:
    if target is not None and not metric.is_possible(target):
        limits = "above 0 to 1, e.g. target=0.9" if metric.higher_is_better else "above 0, e.g. target=100"
        raise PlanError(f"target={target} is out of range for {metric.label}: {limits}")


def _slug(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-")
