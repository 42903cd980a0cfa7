"""CIFAR-10 from wherever it can be had, and the digits where it cannot."""

from __future__ import annotations

from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from torchvision.datasets import CIFAR10

from recipes.data.image_cache import load_cached
from recipes.data.images import ImageDataModule
from recipes.data.sources import announce_fallback, cache_folder, socket_timeout, try_download
from recipes.errors import RecipeError
from workloads.digits import load_digits
from workloads.image_files import ARCHIVES, SPLITS, is_archive
from workloads.images import ImageSet

REMEDY = (
    "name it with data.root=PATH (torchvision's folder, a folder train/CLASS/*.jpg + test/CLASS/*.jpg, or a tar of it) "
    "or run once with data.download=true where there is a network"
)


class Cifar10Data(ImageDataModule):
    """CIFAR-10 as a data module; it looks for the data in the order of ``conf/data/cifar10.yaml``.

    Args:
        root: folder or archive, which is used or refused, and never replaced; None: the other sources.
        download: whether torchvision may download the data set to ``cache_dir``.
        download_timeout: seconds without an answer after which the network counts as absent.
        fallback: whether the digits stand in where there is no CIFAR-10.
        cache_dir: folder of decoded images and downloads; None: ``~/.cache/lightning_gqsgd``.
        **images: arguments of `ImageDataModule`.
    """

    def __init__(
        self,
        root: str | None = None,
        download: bool = True,
        download_timeout: float = 10,
        fallback: bool = True,
        cache_dir: str | None = None,
        **images: Any,
    ) -> None:
        super().__init__(**images)
        self._root = Path(root).expanduser() if root else None
        self._download, self._timeout, self._fallback = download, download_timeout, fallback
        self._cache = cache_folder(cache_dir)

    def prepare_once(self) -> None:
        """Download or decode the images; say so when the digits stand in."""
        if self._root is not None:
            self._from_root(self._root)
        elif not self._downloaded():
            reason = self._try_download()
            if reason and not self._fallback:
                raise RecipeError(f"there is no CIFAR-10: {reason}; {REMEDY}")
            if reason:
                self.data_name = self.fallback_name
                digits = f"scikit-learn's digits at {self.image_size}x{self.image_size}"
                announce_fallback("CIFAR-10", reason, digits, self.data_name, REMEDY)

    def load(self) -> ImageSet:
        """See `DataInMemory.load`."""
        if self._root is not None:
            return self._from_root(self._root)
        if self._downloaded():
            return from_torchvision(self._cache, self.data_name)
        if not self._fallback:
            raise RecipeError(f"there is no CIFAR-10 in {self._cache}; {REMEDY}")
        self._augment["flip"] = False  # the mirror image of a digit is another sign
        return load_digits(self.fallback_name, self.image_size, self.channels)

    @property
    def fallback_name(self) -> str:
        """What the digits are called when they stand in."""
        return f"digits{self.image_size} (fallback)"

    def _from_root(self, root: Path) -> ImageSet:
        if not root.exists():
            raise RecipeError(f"data.root={root} does not exist; {REMEDY}")
        if root.is_file():
            if not is_archive(root):
                raise RecipeError(f"data.root={root} is not one of {', '.join(ARCHIVES)}; {REMEDY}")
        elif (root / CIFAR10.base_folder).is_dir():
            return from_torchvision(root, self.data_name)
        elif root.name == CIFAR10.base_folder:
            return from_torchvision(root.parent, self.data_name)
        elif not all((root / split).is_dir() for split in SPLITS):
            raise RecipeError(f"data.root={root} holds neither {CIFAR10.base_folder} nor train and test; {REMEDY}")
        return load_cached(root, self._cache, self.data_name, self.image_size, self.channels)

    def _downloaded(self) -> bool:
        return (self._cache / CIFAR10.base_folder).is_dir()

    def _try_download(self) -> str | None:
        """Download the data set; returns why that is not possible, or None."""

        def download() -> None:
            with socket_timeout(self._timeout), redirect_stdout(None):
                CIFAR10(str(self._cache), download=True)

        absent = f"data.root is not set, {self._cache} holds none"
        return try_download(absent, self._download, CIFAR10.url, self._timeout, download)


def from_torchvision(root: Path, name: str) -> ImageSet:
    """CIFAR-10 from torchvision's folder; the files are checked against their known digests before they are read."""
    try:
        train, test = CIFAR10(str(root), train=True), CIFAR10(str(root), train=False)
    except RuntimeError as error:
        damaged = root / CIFAR10.base_folder
        raise RecipeError(f"{damaged} is incomplete or damaged ({error}); delete it or {REMEDY}") from error
    train_labels, test_labels = (np.asarray(part.targets, dtype=np.int64) for part in (train, test))
    return ImageSet(name, train.data, train_labels, test.data, test_labels, tuple(train.classes))
