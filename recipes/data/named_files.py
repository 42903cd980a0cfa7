"""Files and folders that a configuration names. Nothing heavy is imported: names are checked before torch is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError
from recipes.files import denied
from recipes.launch.processes import gpus

#: Settings of ``data`` that name a file, which may lie in ``data.root``.
FILES = ("train_file", "valid_file")


def is_tokenizer_file(tokenizer: str) -> bool:
    """Whether ``data.tokenizer`` is the path of a file, and not the name of a way to split text."""
    return tokenizer.endswith(".json")


def named_file(name: str | Path, root: str | Path | None) -> Path | None:
    """The file of this name, as it stands or in ``root``; None if neither is a file."""
    places = [Path(name).expanduser()]
    if root is not None:
        places.append(Path(root).expanduser() / name)
    return next((place for place in places if os.path.isfile(place)), None)


def check_named(data: Mapping[str, Any]) -> None:
    """Check that the files and folders exist that the node ``data`` of a configuration names."""
    root = data.get("root")
    if root is not None and denied(Path(str(root)).expanduser()):
        raise RecipeError(
            f"data.root={root} may not be read by this user; ask its owner, or name data that you may read"
        )
    if root is not None and not Path(str(root)).expanduser().exists():
        raise RecipeError(
            f"data.root={root} does not exist{_near(Path(str(root)).expanduser())}; name a folder or a file that "
            f"exists (conf/data/ says what it may hold), or leave data.root out"
        )
    named = {key: data.get(key) for key in FILES}
    tokenizer = data.get("tokenizer")
    if tokenizer is not None and is_tokenizer_file(str(tokenizer)):
        named["tokenizer"] = tokenizer
    for key, name in named.items():
        if name is None:
            continue
        if denied(named_file(str(name), root) or Path(str(name)).expanduser()):
            raise RecipeError(f"data.{key}={name} may not be read by this user; ask its owner, or name another file")
        if named_file(str(name), root) is None:
            inside = "" if root is None else f", neither in {Path.cwd()} nor in data.root={root}"
            raise RecipeError(f"data.{key}={name} is not a file{inside}; name a file that exists")


def check_stand_in(data: Mapping[str, Any], accelerator: str) -> None:
    """Check that no digits stand in for images on GPUs: nobody means to train 90 epochs on them."""
    asked = "fallback" in data and data["fallback"] is None and data.get("root") is None
    if not asked or accelerator == "cpu" or (accelerator == "auto" and not gpus()):
        return
    raise RecipeError(
        f"there is no {data['name']}: data.root is not set; name a folder train/CLASS/*.jpg + val/CLASS/*.jpg with "
        "data.root=PATH (data=webdataset reads shards), or let digits stand in with data.fallback=true"
    )


def _near(path: Path) -> str:
    """How far a path does exist, where it does in part."""
    existing = next((parent for parent in path.parents if parent.exists()), None)
    return f" ({existing} does)" if existing not in (None, Path("/"), Path(".")) else ""
