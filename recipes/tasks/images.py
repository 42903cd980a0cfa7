"""Small image collections held in memory, as a LightningDataModule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.tasks.augmentation import augment
from recipes.tasks.data import TaskData, whole_batches
from recipes.tasks.sources import DataError
from recipes.tasks.splits import stratified

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
IndexedBatch = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ImageSet:
    """A training and a test split.

    Attributes:
        name: what runs, dashboards and plots call it.
        train_images, test_images: uint8 (N, height, width, channels).
        train_labels, test_labels: int64 (N,), indices into ``classes``.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: tuple[str, ...]

    def part(self, train: int | None, test: int | None) -> ImageSet:
        """A stratified part with ``train`` and ``test`` images, the same in every run; None: all of them."""
        if train is None and test is None:
            return self
        rows = stratified(self.train_labels, train, "data.train_samples")
        test_rows = stratified(self.test_labels, test, "data.test_samples")
        return replace(
            self,
            train_images=self.train_images[rows],
            train_labels=self.train_labels[rows],
            test_images=self.test_images[test_rows],
            test_labels=self.test_labels[test_rows],
        )


class _Rows(Dataset[IndexedBatch]):
    """Batches (images, labels, indices) by one indexing operation, not image by image."""

    def __init__(self, images: Images, labels: Labels) -> None:
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> IndexedBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> IndexedBatch:
        rows = np.asarray(indices, dtype=np.int64)
        return torch.from_numpy(self._images[rows]), torch.from_numpy(self._labels[rows]), torch.from_numpy(rows)


class ImageDataModule(TaskData):
    """Loads an `ImageSet`, augments and normalises whole batches on the training device.

    Args:
        name, batch_size: see `TaskData`.
        image_size, channels, num_classes: shape of images and number of classes.
        train_samples, test_samples: size of a stratified part; None: all.
        shift, flip, seed: see `augmentation.augment`.
    """

    def __init__(
        self,
        name: str,
        batch_size: int,
        image_size: int,
        channels: int,
        num_classes: int,
        train_samples: int | None = None,
        test_samples: int | None = None,
        shift: int = 0,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(name, batch_size)
        self.num_classes = num_classes
        self.image_size, self.channels = image_size, channels
        self._train_samples, self._test_samples = train_samples, test_samples
        self._shift, self._flip, self._seed = shift, flip, seed
        self._set: ImageSet | None = None

    def load(self) -> ImageSet:
        """The whole collection, from what `prepare_data` has left on this machine."""
        raise NotImplementedError

    @property
    def images(self) -> ImageSet:
        """The collection in use.

        Raises:
            DataError: before `setup`.
        """
        if self._set is None:
            raise DataError("the data is not loaded; call setup() first")
        return self._set

    @property
    def train_count(self) -> int:
        return len(self.images.train_labels)

    def setup(self, stage: str | None = None) -> None:
        """Load, check and cut down the collection; on every process.

        Raises:
            DataError: the images are not what the configuration says, or the processes have found different data.
        """
        if self._set is not None:
            return
        found = self.load()
        shape = (self.image_size, self.image_size, self.channels)
        if found.train_images.shape[1:] != shape or found.test_images.shape[1:] != shape:
            found_shape = found.train_images.shape[1:]
            raise DataError(f"images of {found.name} have shape {found_shape}, the configuration says {shape}")
        if len(found.classes) != self.num_classes:
            count = len(found.classes)
            raise DataError(f"{found.name} has {count} classes, not {self.num_classes}; set data.num_classes={count}")
        self.check_same_everywhere((found.name, len(found.train_labels), len(found.test_labels)))
        self.data_name = found.name
        self._set = found.part(self._train_samples, self._test_samples)
        # At most some thousand images, evenly spread: the statistics need no more, and float copies of all are large.
        some = self._set.train_images[:: max(1, len(self._set.train_images) // 5000)].astype(np.float32)
        self._mean = torch.from_numpy(some.mean((0, 1, 2)))
        self._std = torch.from_numpy(some.std((0, 1, 2))).clamp_min(1.0)

    def train_dataloader(self) -> DataLoader[IndexedBatch]:
        self.check_fills_a_step()
        return self._loader(self.images.train_images, self.images.train_labels, train=True)

    def val_dataloader(self) -> DataLoader[IndexedBatch]:
        return self._loader(self.images.test_images, self.images.test_labels, train=False)

    def test_dataloader(self) -> DataLoader[IndexedBatch]:
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: IndexedBatch, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Float images (N, C, H, W) in channels-last memory, and labels; augmented in training."""
        images, labels, indices = batch
        if self.trainer is not None and self.trainer.training:
            epoch = self.trainer.current_epoch
            images = augment(images, indices, seed=self._seed, epoch=epoch, shift=self._shift, flip=self._flip)
        scaled = (images.float() - self._mean.to(images.device)) / self._std.to(images.device)
        return scaled.permute(0, 3, 1, 2), labels

    def _loader(self, images: Images, labels: Labels, train: bool) -> DataLoader[IndexedBatch]:
        size = self.batch_size if train else max(self.batch_size, 256)
        rows = _Rows(images, labels)
        return whole_batches(rows, size, train)
