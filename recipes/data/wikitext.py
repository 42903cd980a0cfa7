"""WikiText from wherever it can be had, and Python's own documentation where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recipes.data import corpus
from recipes.data.corpus import Text, TextFile
from recipes.data.named_files import is_tokenizer_file, named_file
from recipes.data.sources import announce_fallback, cache_folder, socket_timeout, try_download
from recipes.data.text import TextDataModule, TextSet
from recipes.data.tokenizers import Ids
from recipes.errors import RecipeError

#: URL and SHA-256 of each collection's archive, at the site of the data set's first author.
COLLECTIONS = {
    "wikitext-2": (
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    "wikitext-103": (
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
}

FALLBACK = "pydoc topics (fallback)"

REMEDY = (
    "name it with data.root=PATH (a folder or a .zip or .tar with wiki.train.tokens and wiki.valid.tokens, or with "
    "train.txt and valid.txt), or data.train_file=FILE data.valid_file=FILE, or run once with data.download=true where "
    "there is a network"
)


class WikiTextData(TextDataModule):
    """WikiText as a data module; it looks for the text in the order of ``conf/data/wikitext.yaml``.

    Args:
        collection: what is downloaded: ``"wikitext-2"`` or ``"wikitext-103"``.
        root: folder or archive, which is used or refused, and never replaced; None: the other sources.
        train_file, valid_file: files to be taken instead of those that ``root`` has; also names of files in ``root``.
        download: whether the collection may be downloaded to ``cache_dir``.
        download_timeout: seconds without an answer after which the network counts as absent.
        fallback: whether the topics of Python's ``help`` stand in where there is no WikiText.
        cache_dir: folder of encoded texts and downloads; None: ``~/.cache/lightning_gqsgd``.
        **text: arguments of `TextDataModule`.

    Raises:
        RecipeError: an unknown collection.
    """

    def __init__(
        self,
        collection: str = "wikitext-2",
        root: str | None = None,
        train_file: str | None = None,
        valid_file: str | None = None,
        download: bool = True,
        download_timeout: float = 10,
        fallback: bool = True,
        cache_dir: str | None = None,
        **text: Any,
    ) -> None:
        super().__init__(**text)
        if collection not in COLLECTIONS:
            raise RecipeError(f"data.collection={collection!r} is not one of {', '.join(COLLECTIONS)}")
        self._url, self._sha256 = COLLECTIONS[collection]
        self._root = Path(root).expanduser() if root else None
        self._files = {
            split: Path(file).expanduser()
            for split, file in (("train", train_file), ("valid", valid_file))
            if file is not None
        }
        self._download, self._timeout, self._fallback = download, download_timeout, fallback
        self._cache = cache_folder(cache_dir)
        self._archive = self._cache / self._url.rpartition("/")[2]
        if "train" in self._files:
            # Another training text makes other results, which must not carry the same name.
            self.data_name = f"{self.data_name} (trained on {self._files['train'].name})"
        if is_tokenizer_file(self.tokenizer):
            found = named_file(self.tokenizer, self._root)
            if found is None:
                raise RecipeError(f"data.tokenizer={self.tokenizer} is not a file; name a tokenizer.json")
            self.tokenizer = str(found)

    def prepare_once(self) -> None:
        """Download and encode the text; say so when the fallback stands in."""
        reason = None
        if not self._is_named and not self._archive.is_file():
            reason = self._try_download()
        if reason is None:
            self._from_files()
        elif not self._fallback:
            raise RecipeError(f"there is no WikiText: {reason}; {REMEDY}")
        else:
            self.data_name = FALLBACK
            announce_fallback("WikiText", reason, "the topics of Python's help()", FALLBACK, REMEDY)

    def load(self) -> TextSet:
        """See `DataInMemory.load`."""
        if self._is_named or self._archive.is_file():
            return TextSet(self.data_name, *self._from_files())
        if not self._fallback:
            raise RecipeError(f"there is no WikiText in {self._cache}; {REMEDY}")
        train, valid = pydoc_topics()
        return TextSet(FALLBACK, *corpus.encode(train, valid, self.tokenizer, self.vocabulary_size))

    @property
    def _is_named(self) -> bool:
        return self._root is not None or bool(self._files)

    def _from_files(self) -> tuple[Ids, Ids]:
        """Both texts from files; see `corpus.load_cached`."""
        train, valid = self._file("train"), self._file("valid")
        return corpus.load_cached(train, valid, self._cache, self.tokenizer, self.vocabulary_size)

    def _file(self, split: str) -> TextFile:
        if split in self._files:
            named = named_file(self._files[split], self._root)
            if named is None:
                raise RecipeError(f"data.{split}_file={self._files[split]} is not a file; {REMEDY}")
            return TextFile(named)
        root = self._root
        if root is None:
            if self._files:
                raise RecipeError(f"there is no {split} text: add data.{split}_file=FILE or data.root=PATH")
            root = self._archive
        elif not root.exists():
            raise RecipeError(f"data.root={root} does not exist; {REMEDY}")
        elif root.is_file() and not corpus.is_archive(root):
            raise RecipeError(f"data.root={root} is not one of {', '.join(corpus.ARCHIVES)}; {REMEDY}")
        file = corpus.find(root, split)
        if file is None:
            raise RecipeError(_missing(root, split))
        return file

    def _try_download(self) -> str | None:
        """Download the collection; returns why that is not possible, or None."""

        def download() -> None:
            self._cache.mkdir(parents=True, exist_ok=True)
            with socket_timeout(self._timeout):  # torch.hub leaves a verified file, or none
                torch.hub.download_url_to_file(self._url, str(self._archive), self._sha256)

        absent = f"data.root is not set, {self._archive} does not exist"
        return try_download(absent, self._download, self._url, self._timeout, download)


def _missing(root: Path, split: str) -> str:
    """What is wrong with a root that has no text of a split, and the files in it that may be meant."""
    names = ", ".join(pattern.format(split) for pattern in corpus.NAMES)
    message = f"data.root={root} holds no {split} text ({names})"
    files = root.glob("*") if root.is_dir() else ()
    others = sorted(file for file in files if file.suffix in (".txt", ".tokens", ".raw"))
    if len(others) < 2:
        return f"{message}; {REMEDY}"
    return f"{message}; say which files to take: data.train_file={others[0]} data.valid_file={others[-1]}"


def pydoc_topics() -> tuple[Text, Text]:
    """The topics of Python's ``help`` as a training text and a validation text, which has every tenth topic.

    The text of the topics differs between versions of Python.
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    valid = texts[::10]
    train = [text for number, text in enumerate(texts) if number % 10]
    return tuple(  # type: ignore[return-value]
        Text(f"pydoc topics ({split})", "\n".join(part).encode(), raw=True)
        for split, part in (("train", train), ("valid", valid))
    )
