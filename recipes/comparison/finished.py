"""Finished runs from anywhere, sorted into what can be compared: one experiment, a part for each kind of hardware."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning_gqsgd.errors import counted
from recipes.comparison.grouping import grouping
from recipes.comparison.results import Run
from recipes.errors import RecipeError
from recipes.files import METRICS_FILE, RESULT_FILE, metrics_bytes
from recipes.training.checkpoints import CHECKPOINTS
from recipes.training.continuing import CONFIGURATION_FILE, PLACES_OF_DATA, read_configuration, value_at

#: Settings that tell no trainings apart: where a run is made and what it writes, and the names that follow from others.
_NO_VARIANT = {
    "": (
        *("machine", "hardware", "logger", "paths", "run_root", "ckpt_path", "resume", "threads", "checkpoint", "test"),
        "title",
    ),
    "trainer": ("accelerator", "devices", "num_nodes", "log_every_n_steps"),
    "data": PLACES_OF_DATA,
}
#: Folders that an error names, at most.
MOST_NAMED = 5


@dataclass(frozen=True)
class Hardware:
    """What runs have in common that are compared by their seconds.

    Attributes:
        profile: name of the hardware profile.
        nodes: number of nodes.
        devices: number of processes on each node.
        device: name of the device.
        rate: rate of each link, where the profile has one.
        link: what the profile calls the link.
    """

    profile: str
    nodes: int
    devices: int
    device: str
    rate: str | None
    link: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Hardware:
        """The hardware that a ``result.json`` names."""
        known = facts["hardware"]
        rate = known.get("rate")
        return cls(
            known["profile"],
            known["nodes"],
            known["devices"],
            known["device"],
            None if rate is None else str(rate),
            known["link"],
        )

    @property
    def name(self) -> str:
        """A short name, e.g. ``"netlab 100mbit, 2 x 1"``: profile, rate, nodes and processes on each."""
        shown = [self.profile, *([self.rate] if self.rate not in (None, "none") else [])]
        return f"{' '.join(shown)}, {self.nodes} x {self.devices}"

    @property
    def words(self) -> str:
        """Everything: the name, the device, and the link."""
        return f"{self.name} {self.device}, {self.link}"


@dataclass(frozen=True)
class Found:
    """One finished run.

    Attributes:
        folder: folder of the run.
        run: its results.
        config: its configuration.
        ended: when it ended, in seconds; for a run of an earlier version, when its result was written or copied.
    """

    folder: Path
    run: Run
    config: dict[str, Any]
    ended: float

    @property
    def hardware(self) -> Hardware:
        """Where the run was made."""
        return Hardware.of(self.run.facts)

    @property
    def experiment(self) -> tuple[str, str, str]:
        """What only runs of one experiment share: title, data and metric."""
        return self.run.facts["title"], self.run.facts["data"], self.run.facts["metric"]


@dataclass(frozen=True)
class Finished:
    """Runs of one experiment.

    Attributes:
        by_hardware: by hardware and variant, the runs of all seeds.
        chosen: the same runs in a list.
        left_out: a line for each run that is left out, and why.
        keys: keys of the configuration whose values tell variants apart.
    """

    by_hardware: Mapping[Hardware, dict[str, list[Run]]]
    chosen: Sequence[Found]
    left_out: Sequence[str]
    keys: tuple[str, ...]

    @property
    def title(self) -> str:
        """Experiment, data and networks."""
        facts = [found.run.facts for found in self.chosen]
        models = " / ".join(dict.fromkeys(str(each["model"]) for each in facts))
        return f"{facts[0]['title']} on {facts[0]['data']}: {models}"

    def of(self, hardware: Hardware) -> list[Found]:
        """The runs on one kind of hardware."""
        return [found for found in self.chosen if found.hardware == hardware]


def find(paths: Sequence[Path]) -> Finished:
    """Read the finished runs in and below folders.

    Where several runs have the same hardware, settings and seed, the one that ended last is taken.

    Args:
        paths: folders of runs, folders above them, and folders that W&B has written inside them.

    Raises:
        RecipeError: a path is not a folder, or has no finished run; a run's file is missing or damaged; the runs are of
            several experiments.
    """
    folders: dict[Path, None] = {}
    unfinished: dict[Path, None] = {}
    empty = []
    for path in paths:
        here, not_yet = _below(path)
        folders |= dict.fromkeys(here)
        unfinished |= dict.fromkeys(not_yet)
        empty += [] if here else [path]
    if empty:
        raise RecipeError(
            f"--from {_named(empty)}: no finished run in or below {'it' if len(empty) == 1 else 'them'}: a run writes "
            f"{RESULT_FILE} when it ends. Leave {'it' if len(empty) == 1 else 'them'} out, or let the run go on with "
            f"resume=true"
        )
    every = [_read(folder) for folder in folders]
    _check_one_experiment(every)
    left_out = [f"{folder}: the run has not finished, there is no {RESULT_FILE}" for folder in unfinished]
    usable = []
    for found in every:
        reason = _unusable(found)
        left_out += [f"{found.folder}: {reason}"] if reason else []
        usable += [] if reason else [found]
    if not usable:
        raise RecipeError("--from: no run that can be compared; " + "; ".join(left_out))
    chosen, older = _newest(usable)
    left_out += older
    keys = grouping([_settings(found) for found in chosen], across_seeds=True)
    by_hardware: dict[Hardware, dict[str, list[Run]]] = {}
    for found in chosen:
        variants = by_hardware.setdefault(found.hardware, {})
        variants.setdefault(_variant(found.config, keys), []).append(found.run)
    return Finished(by_hardware, chosen, left_out, keys)


def _below(path: Path) -> tuple[list[Path], list[Path]]:
    """Folders of finished runs and of unfinished runs, in and below a path."""
    if not path.is_dir():
        missing = "is a file" if path.exists() else "does not exist"
        raise RecipeError(f"--from {path} {missing}; name folders of runs, e.g. --from outputs/quickstart/*")
    if path.name.startswith(("offline-run-", "run-")) and path.parent.name == "wandb":
        path = path.parents[1]  # W&B writes inside the folder of the run
    finished = sorted(file.parent for file in path.rglob(RESULT_FILE))
    begun = {file.parent for file in path.rglob(METRICS_FILE)} | {file.parent for file in path.rglob(CHECKPOINTS)}
    return finished, sorted(begun - {*finished})


def _read(folder: Path) -> Found:
    """Read a run."""
    remedy = "a run's folder is compared as it was written; leave it out, or copy the file from where the run was made"
    result, configuration = folder / RESULT_FILE, folder / CONFIGURATION_FILE
    if not configuration.is_file():
        raise RecipeError(f"--from {folder}: {CONFIGURATION_FILE} is missing, the run's configuration; {remedy}")
    try:
        facts = json.loads(result.read_text())
        if facts["steps"] and not (folder / METRICS_FILE).is_file():
            raise RecipeError(f"--from {folder}: {METRICS_FILE} is missing, the run's curves; {remedy}")
        length = metrics_bytes(folder)
        whole = facts.get("metrics_bytes", length)
        if length < whole:
            raise RecipeError(f"--from {folder}: {METRICS_FILE} has {length:,} of {whole:,} bytes; {remedy}")
        try:
            config = read_configuration(configuration)
        except ValueError as error:
            raise ValueError(f"{CONFIGURATION_FILE} {error}") from error
        found = Found(folder, Run.load(folder), config, _ended(facts, result))
        _ = found.hardware, found.experiment, found.config["strategy"]["name"]
    except (KeyError, TypeError, ValueError, OSError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RecipeError(f"--from {folder}: its files cannot be read ({reason}); {remedy}") from error
    return found


def _ended(facts: Mapping[str, Any], result: Path) -> float:
    """When a run ended, see `Found`."""
    return datetime.fromisoformat(facts["ended"]).timestamp() if "ended" in facts else result.stat().st_mtime


def _unusable(found: Found) -> str | None:
    """Why a finished run cannot be compared; None if it can."""
    if found.run.facts.get("diverged"):
        return f"the training diverged, {found.run.facts['diverged']}"
    strategies = found.run.facts.get("strategies", [])
    if len(strategies) > 1:
        return f"the training went on under another strategy: {', then '.join(strategies)}"
    if not found.run.facts["step_s"]:
        return "the run has made no step"
    if not found.run.value.size:
        return f"the run has measured no {found.run.metric.label}"
    return None


def _check_one_experiment(every: Iterable[Found]) -> None:
    folders: dict[tuple[str, str, str], list[Path]] = {}
    for found in every:
        folders.setdefault(found.experiment, []).append(found.folder)
    if len(folders) < 2:
        return
    listed = "; ".join(
        f"{title} on {data}, judged by {metric}: {counted(len(those), 'run')}, e.g. {those[0]}"
        for (title, data, metric), those in folders.items()
    )
    raise RecipeError(
        f"--from names runs of {len(folders)} experiments, whose values cannot be compared; name the folders of one of "
        f"them. {listed}"
    )


def _newest(every: Sequence[Found]) -> tuple[list[Found], list[str]]:
    """The latest run of each hardware, configuration and seed, and lines on the others."""
    latest: dict[tuple[Any, ...], Found] = {}
    older = []
    for found in sorted(every, key=lambda one: one.ended):
        key = (found.hardware, json.dumps(_settings(found), sort_keys=True, default=str), found.config["seed"])
        if key in latest:
            known = all("ended" in one.run.facts for one in (latest[key], found))
            by = "" if known else ", judged by the times of their files, which a copy may change"
            older.append(f"{latest[key].folder}: the same training ended later in {found.folder}{by}")
        latest[key] = found
    chosen = sorted(latest.values(), key=lambda one: (one.run.facts["seed"], str(one.folder)))
    # Plain DDP comes first, as in a comparison that makes its runs itself.
    return sorted(chosen, key=lambda one: not str(one.config["strategy"]["name"]).startswith("ddp")), older


def _settings(found: Found) -> dict[str, Any]:
    """What tells a training from another of the same experiment."""
    kept = {key: value for key, value in found.config.items() if key not in _NO_VARIANT[""]}
    for node in ("trainer", "data"):
        kept[node] = {key: value for key, value in kept.get(node, {}).items() if key not in _NO_VARIANT[node]}
    return kept


def _variant(config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Name of a variant: its strategy, and the settings that tell it from others."""
    words = []
    for key in keys:
        value = value_at(config, key)
        if key == "strategy.name":
            words.append(str(value))
        elif value is not None:  # plain DDP has no bits
            words.append(f"{key.removesuffix('.name').rpartition('.')[2]}={value}")
    return " ".join(words)


def _named(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return ", ".join(str(path) for path in paths[:MOST_NAMED]) + more
