"""From a command line to the runs that the command line asks for."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from netlab.lab import NetLabError, parse_rate
from recipes.configuration import check_configuration
from recipes.data.sizes import check_known_samples
from recipes.errors import RecipeError, typed
from recipes.files import RESULT_FILE, metrics_bytes, read_json
from recipes.launch.hardware import MULTI_NODE, NETLAB, check_devices
from recipes.launch.processes import local_processes
from recipes.loggers.chosen import chosen_loggers
from recipes.measuring.metrics import METRICS, Metric
from recipes.overrides import combinations, composed, parse
from recipes.strategies.choices import ALL, check_strategies, choices_of, steps_of_round

CELL_FILE = "cell.json"

#: Fewest steps of a probe. The first step compiles kernels, and DDP builds its buckets anew after it: the median has to
#: be that of later steps.
LEAST_PROBE = 8
#: Fewest rounds of a probe with local steps, for the same reason.
LEAST_ROUNDS = 3
#: Settings that a probe leaves out, because it chooses another logger and no callback.
_OF_TRAININGS = ("logger.", "callbacks.")
DEFAULT_STRATEGIES = "strategy=ddp,gqsgd"
#: Where single runs are written.
_PLACES_OF_RUNS = ("paths.log_dir", "run_root", "hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")


@dataclass(frozen=True)
class Settings:
    """The settings that `compare.py` reads itself; they are written like overrides.

    Attributes:
        target: value of the task's metric whose time is reported; None: the value that all runs reach, less 1 %.
        output: folder of all comparisons.
        links: rates of netlab's links. Each training is made once, without a limit, and a probe measures the training's
            step on each link.
        probe_steps: number of steps of a probe, at least `LEAST_PROBE`. With local steps, a probe has at least
            `LEAST_ROUNDS` rounds.

    Raises:
        RecipeError: a value is out of range.
    """

    target: float | None = None
    output: str = "outputs/compare"
    links: tuple[str, ...] = ()
    probe_steps: int = 30

    def __post_init__(self) -> None:
        if self.probe_steps < LEAST_PROBE:
            raise RecipeError(f"probe_steps={self.probe_steps} is out of range: {LEAST_PROBE} or more")
        given: dict[int | None, str] = {}
        for rate in self.links:
            number = _checked_rate(rate)
            if number in given:
                both = rate if rate == given[number] else f"{given[number]} and {rate}"
                raise RecipeError(f"links={','.join(self.links)} names one rate twice ({both}); list every rate once")
            given[number] = rate


@dataclass(frozen=True)
class Cell:
    """One run of a comparison.

    Attributes:
        variant: name of these settings in tables and plots, the same for all seeds.
        seed: seed of the run.
        overrides: command line of ``run.py``.
        config: the complete configuration that the overrides make.
        folder: where the run writes.
        link: rate of the link on which this run measures steps; None for trainings.
    """

    variant: str
    seed: int
    overrides: tuple[str, ...]
    config: dict[str, Any]
    folder: Path
    link: str | None = None

    def is_finished(self) -> bool:
        """Whether the folder holds the result of exactly this configuration, with all of its curves."""
        facts = read_json(self.folder / RESULT_FILE)
        there = read_json(self.folder / CELL_FILE) == self.config and isinstance(facts, dict)
        return there and metrics_bytes(self.folder) >= facts.get("metrics_bytes", 0) and self.divergence() is None

    def divergence(self) -> str | None:
        """What was not finite at the end of this run; None if all was, or if there is no result."""
        found = (read_json(self.folder / RESULT_FILE) or {}).get("diverged")
        return None if found is None else str(found)


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison, in the order in which they are made.

    The order is seed by seed, so that slow changes of the machine meet all variants alike.

    Attributes:
        settings: settings of the comparison itself.
        experiment: name of the experiment.
        folder: folder of the comparison.
        cells: the trainings.
        probes: the short runs that measure steps on links.
    """

    settings: Settings
    experiment: str
    folder: Path
    cells: tuple[Cell, ...]
    probes: tuple[Cell, ...] = ()


def settings_of(arguments: Sequence[str]) -> Settings:
    """The settings of a comparison of finished runs.

    Raises:
        RecipeError: an argument is another one than ``target`` and ``output``, or is out of range.
    """
    overrides = parse(arguments)
    for override in overrides:
        if override.key_or_group not in ("target", "output"):
            raise RecipeError(
                f"{override.input_line}: the runs that --from names have their settings already; beside --from, there "
                "are target= and output="
            )
    return _settings(overrides)


def check_target(target: float | None, metric: Metric) -> None:
    """Refuse a target that a metric cannot reach."""
    if target is not None and not metric.is_possible(target):
        limits = "above 0 to 1, e.g. target=0.9" if metric.higher_is_better else "above 0, e.g. target=100"
        raise RecipeError(f"target={target} is out of range for {metric.label}: {limits}")


def make_plan(arguments: Sequence[str]) -> Plan:
    """Parse overrides, whose comma lists are the sweep, and compose every configuration before anything runs.

    Raises:
        RecipeError, NetLabError: no experiment, a malformed setting, or a configuration that cannot be composed.
    """
    arguments = [_without_all(argument) for argument in arguments]
    check_strategies(arguments)
    overrides = parse(arguments)
    own = [field.name for field in fields(Settings)]
    settings = _settings([override for override in overrides if override.key_or_group in own])
    passed = [override for override in overrides if override.key_or_group not in own]
    for override in passed:
        if override.key_or_group in _PLACES_OF_RUNS:
            raise RecipeError(f"{override.input_line}: a comparison writes below its own folder; take output=FOLDER")
    experiment = _experiment(passed)
    if not any(override.key_or_group == "strategy" for override in passed):
        passed += OverridesParser.create().parse_overrides([DEFAULT_STRATEGIES])
    swept = _swept(passed)
    if settings.links:
        passed += _on_unlimited_links(passed, settings.links)
    choices = [(choice, _composed(choice)) for choice in combinations(passed)]
    folder = Path(settings.output).absolute() / slug(
        "-".join([experiment, *_hardware([config for _, config in choices])])
    )
    cells = [_cell(choice, config, swept, folder) for choice, config in choices]
    _check_distinct(cells)
    metric = METRICS.get(cells[0].config["task"].get("metric"))
    if metric is not None:  # one of the user's own is known when a run has built its task
        check_target(settings.target, metric)
    first = {variant: place for place, variant in reversed(list(enumerate(cell.variant for cell in cells)))}
    cells.sort(key=lambda cell: (cell.seed, first[cell.variant]))
    return Plan(settings, experiment, folder, tuple(cells), _probes(cells, settings))


def _on_unlimited_links(overrides: Sequence[Override], links: Sequence[str]) -> list[Override]:
    given = {override.key_or_group: override for override in overrides}
    if "hardware" not in given or given["hardware"].value() != NETLAB:
        raise RecipeError(f"links={','.join(links)} needs hardware=netlab, which has links to be limited")
    if "hardware.rate" in given:
        raise RecipeError("links and hardware.rate are two ways to say the same; leave hardware.rate out")
    return list(OverridesParser.create().parse_overrides(["hardware.rate=none"]))


def _probes(cells: Sequence[Cell], settings: Settings) -> tuple[Cell, ...]:
    """A short run of each variant on each link, link by link, with the variant's first seed."""
    first = {cell.variant: cell for cell in reversed(cells)}
    short = {
        "trainer.limit_val_batches": 0,
        # Callbacks watch what a probe does not have, as early stopping does the loss of a validation.
        **{"test": "false", "checkpoint": "false", "logger": "csv", "callbacks": "[]"},
    }
    probes = []
    for link, cell in itertools.product(settings.links, reversed(first.values())):
        steps = max(settings.probe_steps, LEAST_ROUNDS * steps_of_round(cell.config["strategy"]))
        own = {**short, "trainer.max_steps": steps, "hardware.rate": link}
        kept = [text for text in cell.overrides if _key(text) not in own and not _key(text).startswith(_OF_TRAININGS)]
        choice = (*kept, *(f"{key}={value}" for key, value in own.items()))
        folder = cell.folder.parent / f"{slug(cell.variant)}-{link}"
        probes.append(Cell(cell.variant, cell.seed, choice, _composed(choice), folder, link))
    return tuple(probes)


def _without_all(argument: str) -> str:
    """The argument, in which "all" is replaced by the names of all strategies."""
    key, _, value = argument.partition("=")
    if key != "strategy" or "all" not in value.split(","):
        return argument
    if value != "all":
        raise RecipeError(f"{argument}: 'all' includes the others; take strategy=all, or a list of names")
    return f"strategy={','.join(ALL)}"


def _settings(overrides: Sequence[Override]) -> Settings:
    values: dict[str, Any] = {override.key_or_group: override.value() for override in overrides}
    for override in overrides:
        if override.key_or_group == "links":
            sweep = override.is_sweep_override()
            values["links"] = tuple(override.sweep_string_iterator()) if sweep else (str(override.value()),)
    for name, kind in (("target", (int, float)), ("output", str), ("probe_steps", int)):
        if name in values and (isinstance(values[name], bool) or not isinstance(values[name], kind)):
            raise RecipeError(f"{name}={values[name]!r} cannot be read; examples: target=0.9 links=100mbit,1gbit")
    return Settings(**values)


def _checked_rate(rate: str) -> int | None:
    """Bits per second of a rate; None for no limit."""
    try:
        return parse_rate(rate)
    except NetLabError as error:
        raise RecipeError(f"links={rate}: {error}") from error


def _experiment(overrides: Sequence[Override]) -> str:
    for override in overrides:
        if override.key_or_group in ("exp", "experiment") and isinstance(override.value(), str):
            return str(override.value())
    names = ", ".join(choices_of("exp"))
    raise RecipeError(f"name one experiment: +exp=NAME, one of {names}")


def _swept(overrides: Sequence[Override]) -> list[str]:
    return [override.key_or_group for override in overrides if override.is_sweep_override()]


def _composed(overrides: Sequence[str]) -> dict[str, Any]:
    resolved: Any = OmegaConf.to_container(composed(overrides), resolve=True)
    assert isinstance(resolved, dict)
    check_configuration(resolved, os.environ)
    for key, asked in (("resume", resolved["resume"] is True), ("ckpt_path", resolved["ckpt_path"] is not None)):
        if asked:
            raise RecipeError(
                f"{key}={typed(resolved[key])}: the seconds, bytes and curves of a run that goes on are those of the "
                f"run before it as well, perhaps under another strategy; leave {key} out. Finished runs of a "
                "comparison are kept, and run.py goes on with single runs"
            )
    if resolved["trainer"]["accelerator"] == "cpu":
        check_devices(resolved)  # GPUs are counted by the runs: that imports torch
        here = local_processes("cpu", resolved["trainer"]["devices"])
        check_known_samples(resolved["data"], here * resolved["trainer"]["num_nodes"])
    name = resolved["hardware"]["name"]
    if name == MULTI_NODE:
        folders = f"outputs/{resolved['title']}/*"
        raise RecipeError(
            f"hardware={name}: the runs of a comparison are started from this machine, on this machine; take "
            "python recipes/run.py for each of them, and compare them when they have finished: "
            f"python recipes/compare.py --from {folders}"
        )
    return {str(key): value for key, value in resolved.items()}


def _cell(overrides: Sequence[str], config: dict[str, Any], swept: Sequence[str], comparison: Path) -> Cell:
    """The run of one command line, in a folder below that of its comparison."""
    for key, logger in chosen_loggers(config).items():
        if "group" in logger and logger["group"] is None:
            logger["group"] = group = f"compare-{comparison.name}"
            overrides = [*overrides, f"{key}.group={group}"]
    seed, name = config["seed"], config["strategy"]["name"]
    details = [_last_part(override) for override in overrides if _key(override) in swept]
    variant = " ".join([name, *(detail for detail in details if detail)])
    folder = comparison / "cells" / f"{slug(variant)}-seed{seed}"
    return Cell(variant, seed, tuple(overrides), config, folder)


def _hardware(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Parts of the folder's name that say which hardware all runs have in common.

    These are the profile, and the number of hosts and the rate where all runs have the same one. Several profiles, and
    cpu alone, are not named.
    """
    profiles = {config["hardware"]["name"] for config in configs}
    nodes = {config["trainer"]["num_nodes"] for config in configs} - {1}
    rates = {str(config["hardware"]["rate"]) for config in configs if "rate" in config["hardware"]}
    if len(profiles) > 1 or profiles == {"cpu"}:
        return []
    hosts = [f"{count}-hosts" for count in nodes] if len(nodes) == 1 else []
    return [*profiles, *hosts, *(rates if len(rates) == 1 else ())]


def _last_part(override: str) -> str:
    """``bits=4`` of ``strategy.bits=4``; "" for a setting that the variant's name or the seed says already."""
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
            raise RecipeError(f"several runs are called {cell.folder.name}; list every strategy and seed once")


def slug(name: str) -> str:
    """A name as a part of a path: runs of characters that shells or file systems read otherwise are one dash."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-")
