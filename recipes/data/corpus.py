"""Text files in a folder or an archive, encoded once and cached as arrays.

Archives are read in memory: no member is ever written to the path that it names.
"""

from __future__ import annotations

import io
import lzma
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from recipes.data.named_files import is_tokenizer_file
from recipes.data.sources import cached_arrays, stamp
from recipes.data.tokenizer_files import FileTokenizer
from recipes.data.tokenizers import Ids, Vocabulary, splitter
from recipes.errors import RecipeError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")

#: Usual names of a split's file, the first choice first.
NAMES = ("wiki.{}.tokens", "{}.txt", "wiki.{}.raw")

#: Largest size of one unpacked file in bytes: a file is read into memory as a whole.
MAX_FILE_BYTES = 4 * 2**30

#: About how many characters are split at a time.
_CHARACTERS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Text:
    """The contents of a file.

    Attributes:
        name: name of the file.
        contents: the text as UTF-8.
        raw: whether punctuation sticks to the words, see `tokenizers.splitter`.
    """

    name: str
    contents: bytes
    raw: bool


@dataclass(frozen=True)
class TextFile:
    """A file, or a member of an archive."""

    path: Path
    member: str | None = None

    def read(self) -> Text:
        """The whole file."""
        name = PurePosixPath(self.member).name if self.member else self.path.name
        with _readable(self.path):
            contents = self.path.read_bytes() if self.member is None else _member(self.path, self.member)
        return Text(name, contents, name.endswith(".raw"))


def is_archive(path: Path) -> bool:
    """Whether the name of a path ends like that of a zip or tar archive."""
    return path.name.lower().endswith(ARCHIVES)


def find(root: Path, split: str) -> TextFile | None:
    """The file of a split, by its usual names (`NAMES`).

    Args:
        root: an archive, or a folder, which is searched together with the folders in it.
        split: ``"train"`` or ``"valid"``.

    Raises:
        RecipeError: the archive cannot be read, or several files have the same name.
    """
    if root.is_dir():
        files = {str(path): TextFile(path) for path in (*root.glob("*"), *root.glob("*/*")) if path.is_file()}
    else:
        files = {name: TextFile(root, name) for name in _members(root)}
    for pattern in NAMES:
        matching = sorted(name for name in files if PurePosixPath(name).name == pattern.format(split))
        if len(matching) > 1:
            raise RecipeError(f"{root} holds several: {', '.join(matching)}; name one folder or file")
        if matching:
            return files[matching[0]]
    return None


def load_cached(
    train: TextFile, valid: TextFile, cache_dir: Path, tokenizer: str, vocabulary_size: int
) -> tuple[Ids, Ids]:
    """Both texts as `encode` returns them: from the cache, or encoded now and put there.

    Raises:
        RecipeError: the files are not what they should be, or the cache cannot be read or written.
    """

    def make() -> dict[str, NDArray[Any]]:
        ids = encode(train.read(), valid.read(), tokenizer, vocabulary_size)
        return {"train": ids[0], "valid": ids[1]}

    files = [train, valid, *([TextFile(Path(tokenizer))] if is_tokenizer_file(tokenizer) else [])]
    described = (f"{file.path.resolve()} {file.member} {stamp(file.path)}" for file in files)
    arrays = cached_arrays(cache_dir, "text", [f"{tokenizer} {vocabulary_size}", *described], make)
    return arrays["train"], arrays["valid"]


def encode(train: Text, valid: Text, tokenizer: str, vocabulary_size: int) -> tuple[Ids, Ids]:
    """Both texts as numbers in the vocabulary of the training text, with a progress bar on standard error.

    Args:
        train, valid: the texts.
        tokenizer: see `tokenizers.splitter`; or the path of a file, see `tokenizer_files.FileTokenizer`.
        vocabulary_size: see `tokenizers.Vocabulary` and `tokenizer_files.FileTokenizer`.

    Returns:
        Numbers of the tokens of the training text and of the validation text, (N,) each.

    Raises:
        RecipeError: a text is not UTF-8, or the tokenizer is none.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    # On standard error: standard output holds the run's own lines.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        if is_tokenizer_file(tokenizer):
            encoders: list[Callable[[str], Ids]] = [FileTokenizer(Path(tokenizer), vocabulary_size).encode] * 2
        else:
            encoders = _encoders((train, valid), tokenizer, vocabulary_size, progress)
        ids = [
            np.concatenate([encoder(part) for part in _parts(text, progress, "encoding")] or [encoder("")])
            for text, encoder in zip((train, valid), encoders, strict=True)
        ]
    return ids[0], ids[1]


def _encoders(
    texts: tuple[Text, Text], tokenizer: str, vocabulary_size: int, progress: Progress
) -> list[Callable[[str], Ids]]:
    """What turns lines of either text into numbers, by the vocabulary of the first one."""
    splits = [splitter(tokenizer, text.raw) for text in texts]
    counts: Counter[str] = Counter()
    for part in _parts(texts[0], progress, "counting"):
        counts.update(splits[0](part))
    vocabulary = Vocabulary(counts, vocabulary_size)
    return [lambda part, split=split: vocabulary.encode(split(part)) for split in splits]  # type: ignore[misc]


def _parts(text: Text, progress: Progress, doing: str) -> Iterator[str]:
    """The text, some lines at a time; ``doing`` is the verb beside the progress bar."""
    task = progress.add_task(f"{doing} {text.name} (once)", total=max(1, len(text.contents)))
    buffer = io.BytesIO(text.contents)
    try:
        with io.TextIOWrapper(buffer, encoding="utf-8") as lines:
            while part := lines.readlines(_CHARACTERS_AT_ONCE):
                yield "".join(part)
                progress.update(task, completed=buffer.tell())
    except UnicodeDecodeError as error:
        raise RecipeError(f"{text.name} is not UTF-8 text ({error}); save it as UTF-8") from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
        reason = " ".join(str(error).split())  # tarfile's message has several lines
        raise RecipeError(f"{path} cannot be read ({reason}); is it complete?") from error


def _members(archive: Path) -> list[str]:
    with _readable(archive):
        if archive.name.lower().endswith(".zip"):
            with zipfile.ZipFile(archive) as packed:
                return packed.namelist()
        with tarfile.open(archive) as tar:
            return [member.name for member in tar if member.isfile()]


def _member(archive: Path, name: str) -> bytes:
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as packed:
            _check_size(packed.getinfo(name).file_size, name)
            return packed.read(name)
    with tarfile.open(archive) as tar:
        member = tar.getmember(name)
        _check_size(member.size, name)
        stream = tar.extractfile(member)
        assert stream is not None  # `_members` lists regular files only
        return stream.read()


def _check_size(size: int, name: str) -> None:
    if size > MAX_FILE_BYTES:
        raise RecipeError(f"{name} has {size} bytes, more than {MAX_FILE_BYTES}; take a part of the text")
