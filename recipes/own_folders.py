"""Folders of configurations that a user adds to conf/: ``--config-dir FOLDER``, or Hydra's ``hydra.searchpath``.

They are the user's own code: what their files name as ``_target_`` may be called, see `recipes.training.building`. A
``_target_`` on the command line may not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.errors import RecipeError
from recipes.strategies.choices import CONF

OPTIONS = ("--config-dir", "-cd")
SEARCH_PATH = "hydra.searchpath"
_FILE = "file://"


def with_search_path(arguments: Sequence[str]) -> list[str]:
    """The command line with ``hydra.searchpath=[...]`` in the place of ``--config-dir FOLDER``.

    An override goes wherever overrides go: to the processes of a run, to the jobs of a sweep, to a comparison's runs.
    """
    kept: list[str] = []
    folders: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, folder = word.partition("=")
        if option not in OPTIONS:
            kept.append(word)
            continue
        folder = folder if equals else next(words, "")
        if not Path(folder).is_dir() or not folder:
            raise RecipeError(f"{option} {folder} is not a folder; name one with e.g. model/NAME.yaml inside")
        folders.append(f"{_FILE}{Path(folder).absolute()}")
    if not folders:
        return kept
    before = [word for word in kept if is_search_path(word)]
    listed = [*(place for word in before for place in _places(word)), *folders]
    quoted = ",".join("'" + place.replace("\\", "\\\\").replace("'", "\\'") + "'" for place in listed)
    return [*(word for word in kept if word not in before), f"{SEARCH_PATH}=[{quoted}]"]


def folders_of(overrides: Iterable[str]) -> list[Path]:
    """The user's own folders of a command line, after `with_search_path`."""
    places = [place for word in overrides if is_search_path(word) for place in _places(word)]
    return [Path(place.removeprefix(_FILE)) for place in places if place.startswith(_FILE)]


def make_importable(folders: Sequence[Path]) -> None:
    """Let Python find modules of the working folder, where there are folders of the user's own."""
    if folders and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def named_targets(folders: Iterable[Path]) -> frozenset[str]:
    """Everything that the choices in these folders name as a ``_target_``.

    Other files below the folders are not read: a folder of configurations may hold results of runs as well.
    """
    groups = sorted(group.name for group in CONF.iterdir() if group.is_dir())
    files = (file for folder in folders for group in groups for file in sorted((folder / group).glob("*.yaml")))
    return frozenset(target for file in files for target in _targets(_read(file)))


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{file} cannot be read ({reason}); correct the file, or move it elsewhere") from error


def _targets(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for entry in node.values():
            yield from _targets(entry)
    elif isinstance(node, list):
        for entry in node:
            yield from _targets(entry)


def is_search_path(word: str) -> bool:
    """Whether an argument of a command line sets Hydra's search path."""
    return word.lstrip("+").startswith(f"{SEARCH_PATH}=")


def _places(word: str) -> list[str]:
    value = OverridesParser.create().parse_override(word).value()
    return [str(place) for place in value] if isinstance(value, list) else [str(value)]
