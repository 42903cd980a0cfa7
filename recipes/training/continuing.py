"""Settings that a run has to keep when it goes on from a checkpoint; nothing heavy is imported here.

A checkpoint holds weights, the state of the optimizer with its rates, and counters of steps and epochs. Lightning
restores all of these over what the configuration says. A changed setting would be ignored, or would break the counters.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from recipes.configuration import without_hydra
from recipes.errors import RecipeError, typed
from recipes.launch.processes import local_processes
from recipes.training.checkpoints import LAST

#: The configuration of a run, which Lightning's CSV logger writes into the run's folder.
CONFIGURATION_FILE = "hparams.yaml"
#: Entries of the node `data` that say where data are and how they are read, and not what they are.
PLACES_OF_DATA = ("name", "root", "cache_dir", "download", "download_timeout", "fallback", "workers")
#: Nodes that a run keeps when it goes on, each with the entries that may change: names, places, and what is evaluated.
KEPT: dict[str, tuple[str, ...]] = {
    "optimizer": (),
    "model": ("name",),
    "task": (),
    "data": (*PLACES_OF_DATA, "test_samples", "valid_samples", "valid_file", "resize"),
}
#: Single settings that a run keeps.
KEPT_KEYS = ("seed", "trainer.accumulate_grad_batches", "trainer.limit_train_batches")
#: Most settings that a message names.
MOST_NAMED = 4


class _Reader(yaml.SafeLoader):
    """Reads plain values; an object of Python, such as a version of torch, is None, because nothing is called here."""


_Reader.add_multi_constructor("tag:yaml.org,2002:python/", lambda reader, tag, node: None)

_MISSING = object()
#: Values of an entry that does nothing; 0 is false, too.
NEUTRAL: tuple[object, ...] = (_MISSING, None, False, [], {})


def check_continued(cfg: DictConfig, checkpoint: str) -> None:
    """Refuse to go on from what is no checkpoint, and with settings that the checkpoint would override."""
    _check_format(cfg, checkpoint)
    file = Path(checkpoint).parents[1] / CONFIGURATION_FILE
    if not file.is_file():
        return  # a checkpoint that was copied elsewhere is of use, too; `uncompared` says that nothing was compared
    changes = _changes(_recorded(file), _plain(cfg))
    if not changes:
        return
    named = [f"{key}={_written(new)} (there: {_written(old)})" for key, (old, new) in changes.items()]
    more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    raise RecipeError(
        f"{', '.join(named[:MOST_NAMED])}{more}: a run that goes on keeps what the run of {checkpoint} had; set it as "
        f"it was there, or leave {asked_by(cfg)} out for a new run"
    )


def uncompared(checkpoint: str) -> str | None:
    """What is said of a checkpoint whose run has left no settings beside it; None if there are settings."""
    file = Path(checkpoint).parents[1] / CONFIGURATION_FILE
    if file.is_file():
        return None
    return f"there is no {file}: the settings of the run that wrote the checkpoint are not compared with these"


def asked_by(cfg: DictConfig) -> str:
    """The override that asks a run to go on."""
    return f"ckpt_path={cfg.ckpt_path}" if cfg.ckpt_path else "resume=true"


def read_configuration(file: Path) -> dict[str, Any]:
    """The configuration that a run has recorded in `CONFIGURATION_FILE`.

    Raises:
        ValueError: the file cannot be read, or holds something else; the message goes on where the file's name ends.
    """
    try:
        recorded = yaml.load(file.read_text(encoding="utf-8"), _Reader)  # noqa: S506  (a SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot be read ({type(error).__name__})") from error
    if not isinstance(recorded, dict):
        raise ValueError("holds no configuration")
    return recorded


def _check_format(cfg: DictConfig, checkpoint: str) -> None:
    """Refuse a file that torch has not written, or has not written to its end."""
    remedy = f"name a {LAST} that a run has written, or leave {asked_by(cfg)} out for a new run"
    # The list of an archive's files stands at its end, so that a file that was cut off is no archive.
    if not zipfile.is_zipfile(checkpoint):
        raise RecipeError(f"{checkpoint} is not a checkpoint, or its end is missing; {remedy}")
    with zipfile.ZipFile(checkpoint) as archive:
        names = archive.namelist()
    if not any(name.endswith("/data.pkl") for name in names):
        raise RecipeError(f"{checkpoint} is an archive, and no checkpoint; {remedy}")


def _recorded(file: Path) -> dict[str, Any]:
    """The configuration that a run has recorded."""
    try:
        return read_configuration(file)
    except ValueError as error:
        raise RecipeError(f"{file} {error}; delete it to go on without it") from error


def _plain(cfg: DictConfig) -> dict[str, Any]:
    config = OmegaConf.to_container(without_hydra(cfg), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, with the value of the earlier run and that of this one."""
    keys = [*KEPT_KEYS]
    for node, free in KEPT.items():
        entries = {**(old.get(node) or {}), **(new.get(node) or {})}
        keys += [f"{node}.{entry}" for entry in entries if entry not in free]
    pairs = {key: (value_at(old, key, _MISSING), value_at(new, key, _MISSING)) for key in keys}
    pairs["trainer.num_nodes * trainer.devices"] = (_processes(old), _processes(new))
    return {key: pair for key, pair in pairs.items() if not _equal(*pair)}


def value_at(config: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """The value of a setting such as ``"trainer.devices"``; ``missing`` where the configuration does not have it."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return missing
        node = node[part]
    return node


def _equal(old: Any, new: Any) -> bool:
    """Whether two values are the same setting: lists and tuples are alike, and so are 1 and 1.0."""
    if isinstance(old, list | tuple) and isinstance(new, list | tuple):
        return list(old) == list(new)
    if _MISSING in (old, new):
        # Another version of the recipes may not have had the entry: an entry that does nothing is as good as none.
        return old in NEUTRAL and new in NEUTRAL
    return bool(old == new)


def _processes(config: Mapping[str, Any]) -> Any:
    trainer = config.get("trainer") or {}
    if not {"accelerator", "devices", "num_nodes"} <= set(trainer):
        return _MISSING
    return trainer["num_nodes"] * local_processes(trainer["accelerator"], trainer["devices"])


def _written(value: Any) -> str:
    return "not set" if value is _MISSING else typed(value)
