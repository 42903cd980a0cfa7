"""Criteo's click logs: in their own text format, and as arrays."""

from __future__ import annotations

import gzip
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recipes.data.click_lines import parse_lines
from recipes.data.sources import cached_arrays, stamp
from recipes.errors import RecipeError

NUMERICAL = 13
CATEGORICAL = 26
FIELDS = NUMERICAL + CATEGORICAL

TEXT = (".txt", ".tsv", ".txt.gz", ".tsv.gz")
ARRAYS = (".npz",)
LAYOUT = (
    ".npz with categorical (N, 26), numerical (N, 13), label (N,), or Criteo's text, "
    ".txt or .tsv, also .gz: label, 13 integers and 26 hexadecimal numbers between tabs"
)

_COLUMNS = [
    re.compile(rb"[01]"),
    *[re.compile(rb"(-?\d{1,10})?")] * NUMERICAL,
    *[re.compile(rb"[0-9a-fA-F]{0,8}")] * CATEGORICAL,
]
_NEWLINE = ord("\n")
#: Bytes of the text that are parsed at once.
_BLOCK_BYTES = 2**22


@dataclass(frozen=True)
class ClickLog:
    """Rows of a log.

    Attributes:
        categorical: values of the categorical fields, uint32 (N, 26); 0 for a missing value.
        numerical: values of the numerical fields, int32 (N, 13); `MISSING` for a missing value.
        labels: 1 for a click and 0 for none, int8 (N,).
    """

    categorical: NDArray[np.uint32]
    numerical: NDArray[np.int32]
    labels: NDArray[np.int8]


def is_log(path: Path) -> bool:
    """Whether the name of a path ends like that of a log."""
    return path.name.lower().endswith((*ARRAYS, *TEXT))


def load_log(path: Path, cache_dir: Path, max_rows: int | None) -> ClickLog:
    """Read a log. Text is parsed once, and kept as arrays in the cache.

    Raises:
        RecipeError: the file is no log, or the cache cannot be read or written.
    """
    if path.name.lower().endswith(ARRAYS):
        return _read_arrays(path, max_rows)

    def make() -> dict[str, NDArray[Any]]:
        log = parse(path, max_rows)
        return {"categorical": log.categorical, "numerical": log.numerical, "label": log.labels}

    identity = [f"{path.resolve()} {stamp(path)} {max_rows}"]
    arrays = cached_arrays(cache_dir, path.name.split(".")[0], identity, make)
    return ClickLog(arrays["categorical"], arrays["numerical"], arrays["label"])


def parse(path: Path, max_rows: int | None) -> ClickLog:
    """Read Criteo's text format, with a progress bar on standard error.

    Raises:
        RecipeError: the file is no log; the message names the line, the column and what stands there.
    """
    parts: list[ClickLog] = []
    rows = 0
    for block in _blocks(path):
        count = int(np.count_nonzero(block == _NEWLINE))
        wanted = count if max_rows is None else min(count, max_rows - rows)
        part = ClickLog(
            np.empty((wanted, CATEGORICAL), np.uint32),
            np.empty((wanted, NUMERICAL), np.int32),
            np.empty(wanted, np.int8),
        )
        right, place = parse_lines(block, part.labels, part.numerical, part.categorical)
        if right < wanted:
            line = block[place:].tobytes().partition(b"\n")[0].rstrip(b"\r")
            raise RecipeError(f"{path}, line {rows + right + 1}: {_what_is_wrong(line)}")
        parts.append(part)
        rows += wanted
        if wanted < count:
            break
    if not rows:
        raise RecipeError(f"{path} has no lines; expected {LAYOUT}")
    return ClickLog(
        np.concatenate([part.categorical for part in parts]),
        np.concatenate([part.numerical for part in parts]),
        np.concatenate([part.labels for part in parts]),
    )


def _blocks(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The text in blocks of whole lines, each with a newline at its end, uint8 (bytes,)."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # On standard error: standard output holds the run's own lines.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"reading {path.name} (once)", total=path.stat().st_size)
        try:
            with open(path, "rb") as raw:
                text = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
                rest = b""
                # A line that is longer than a block is none of a log, and is shown to be none.
                while len(rest) <= _BLOCK_BYTES and (part := text.read(_BLOCK_BYTES)):
                    progress.update(task, completed=raw.tell())
                    lines, newline, rest = (rest + part).rpartition(b"\n")
                    if newline:
                        yield np.frombuffer(lines + newline, np.uint8)
                if rest:
                    yield np.frombuffer(rest + b"\n", np.uint8)
        except (OSError, EOFError, zlib.error) as error:
            raise RecipeError(f"{path} cannot be read ({error}); is the download complete?") from error


def _what_is_wrong(line: bytes) -> str:
    """The reason why `click_lines` refuses a line."""
    texts = line.split(b"\t")
    if len(texts) != len(_COLUMNS):
        hint = "; Criteo's test file has no labels" if len(texts) == len(_COLUMNS) - 1 else ""
        return f"{len(texts)} columns instead of {len(_COLUMNS)}{hint}; expected {LAYOUT}"
    wrong = next((place for place, text in enumerate(texts) if not _COLUMNS[place].fullmatch(text)), None)
    if wrong is None:
        return "a number does not fit 32 bits; is this column one of counts?"
    kind = "the label, 0 or 1" if wrong == 0 else "an integer" if wrong <= NUMERICAL else "a hexadecimal number"
    return f"column {wrong + 1} is {texts[wrong][:20].decode(errors='replace')!r}, not {kind}; expected {LAYOUT}"


def _read_arrays(path: Path, max_rows: int | None) -> ClickLog:
    """Read and check an npz file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            categorical, numerical, labels = (arrays[key] for key in ("categorical", "numerical", "label"))
    except KeyError as error:
        raise RecipeError(f"{path}: {error.args[0]}; expected {LAYOUT}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read ({error}); see conf/data/criteo.yaml for its arrays") from error
    rows = len(labels) if labels.ndim else 0
    if not rows:
        raise RecipeError(f"{path}: no rows in label; expected {LAYOUT}")
    for name, values, shape, dtypes in (
        ("label", labels, (rows,), ("int8",)),
        ("categorical", categorical, (rows, CATEGORICAL), ("int32", "uint32")),
        ("numerical", numerical, (rows, NUMERICAL), ("int32",)),
    ):
        if values.shape != shape or str(values.dtype) not in dtypes:
            wanted = f"{' or '.join(dtypes)} {shape}"
            raise RecipeError(f"{path}: {name} is {values.dtype} {values.shape}, not {wanted}; convert it with NumPy")
    _check(path, "label", labels, (labels < 0) | (labels > 1), "0 or 1")
    _check(path, "categorical", categorical, categorical < 0, "0 or more; shift the ids")
    return ClickLog(categorical[:max_rows].astype(np.uint32), numerical[:max_rows], labels[:max_rows])


def _check(path: Path, name: str, values: NDArray[np.integer], wrong: NDArray[np.bool_], limit: str) -> None:
    """Refuse values of an array that are marked as wrong; the message has the first of them."""
    if wrong.any():
        place = tuple(int(axis[0]) for axis in wrong.nonzero())
        raise RecipeError(f"{path}: {name}{list(place)} is {values[place]}, must be {limit}")
