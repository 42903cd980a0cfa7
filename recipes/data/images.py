"""Small image collections held in memory, as a LightningDataModule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.data.augmentation import EDGES, FLIPS, Edges, Flip, augment
from recipes.data.sizes import kept_for_validation
from recipes.data.splits import stratified
from recipes.data.task_data import DataInMemory, Rows, whole_batches
from recipes.errors import RecipeError
from workloads.images import Images, ImageSet, Labels

#: Images, labels and indices of a batch.
IndexedBatch = tuple[Tensor, Tensor, Tensor]

#: Number of images, evenly spread, from which mean and standard deviation are taken; float copies of all are large.
STATISTICS_IMAGES = 5000


class ImageDataModule(DataInMemory[ImageSet]):
    """Loads an `ImageSet`; augments and normalises whole batches on the device that trains.

    Args:
        name, batch_size: see `TaskData`.
        image_size: height and width of the images in pixels.
        channels: number of channels of the images.
        num_classes: number of classes.
        train_samples, test_samples: number of images of a stratified part of each split; None: all.
        val_samples: number of training images that validation has and training does not, a stratified part, or a share
            of them, below 1; None: validation has the test split, and nothing may be chosen by it.
        shift, flip, cutout, edges, seed: see `augmentation.augment`.
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
        val_samples: int | float | None = None,
        shift: int = 0,
        flip: Flip = False,
        cutout: int = 0,
        edges: Edges = "black",
        seed: int = 0,
    ) -> None:
        super().__init__(name, batch_size)
        self.num_classes = num_classes
        self.image_size, self.channels = image_size, channels
        self._train_samples, self._test_samples = train_samples, test_samples
        self._val_samples = val_samples
        if not 0 <= cutout <= image_size:
            raise RecipeError(f"data.cutout={cutout} is out of range: 0 (none) to data.image_size={image_size}")
        if not 0 <= shift < image_size:
            raise RecipeError(f"data.shift={shift} is out of range: 0 (none) to {image_size - 1}, less than the image")
        if flip not in FLIPS:
            raise RecipeError(f"data.flip={flip} is not one of {', '.join(str(known).lower() for known in FLIPS)}")
        if edges not in EDGES:
            raise RecipeError(f"data.edges={edges} is not one of {', '.join(EDGES)}")
        self._augment: dict[str, Any] = {
            "seed": seed,
            "shift": shift,
            "flip": flip,
            "cutout": cutout,
            "edges": edges,
        }
        self._kept: tuple[Images, Labels] | None = None

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`."""
        return len(self.splits.train_labels)

    def taken(self, data: ImageSet) -> ImageSet:
        """See `DataInMemory.taken`."""
        self._check(data)
        self.check_same_everywhere((data.name, len(data.train_labels), len(data.test_labels)))
        self.data_name = data.name
        images = _part(data, self._train_samples, self._test_samples)
        if self._val_samples is not None:
            images, self._kept = _kept_apart(images, self._val_samples)
        step = max(1, len(images.train_images) // STATISTICS_IMAGES)
        sample = images.train_images[::step].astype(np.float32)
        self._mean = torch.from_numpy(sample.mean((0, 1, 2)))
        self._std = torch.from_numpy(sample.std((0, 1, 2))).clamp_min(1.0)
        return images

    def train_dataloader(self) -> DataLoader[IndexedBatch]:
        """Batches of the training split in random order."""
        self.check_fills_a_step()
        return self._loader(self.splits.train_images, self.splits.train_labels, train=True)

    def val_dataloader(self) -> DataLoader[IndexedBatch]:
        """Batches of the images that were kept from training; without ``val_samples``, of the test split."""
        if self._kept is None:
            return self.test_dataloader()
        return self._loader(*self._kept, train=False)

    def test_dataloader(self) -> DataLoader[IndexedBatch]:
        """Batches of the test split."""
        return self._loader(self.splits.test_images, self.splits.test_labels, train=False)

    def on_after_batch_transfer(self, batch: IndexedBatch, dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Float images (N, C, H, W) in channels-last memory, and labels; augmented in training."""
        images, labels, indices = batch
        if self.trainer is not None and self.trainer.training:
            images = augment(images, indices, epoch=self.trainer.current_epoch, **self._augment)
        scaled = (images.float() - self._mean.to(images.device)) / self._std.to(images.device)
        return scaled.permute(0, 3, 1, 2), labels

    def _check(self, images: ImageSet) -> None:
        """Raise RecipeError where shape or number of classes are not those of the configuration."""
        wanted = (self.image_size, self.image_size, self.channels)
        for shape in (images.train_images.shape[1:], images.test_images.shape[1:]):
            if shape != wanted:
                raise RecipeError(
                    f"images of {images.name} have shape {shape}, the configuration says {wanted}; "
                    "set data.image_size and data.channels"
                )
        count = len(images.classes)
        if count != self.num_classes:
            raise RecipeError(
                f"{images.name} has {count} classes, not {self.num_classes}; set data.num_classes={count}"
            )

    def _loader(self, images: Images, labels: Labels, train: bool) -> DataLoader[IndexedBatch]:
        size = self.batch_size if train else max(self.batch_size, 256)
        rows = Rows((images, torch.uint8), (labels, torch.int64), (np.arange(len(labels)), torch.int64))
        return whole_batches(rows, size, train)


def _kept_apart(images: ImageSet, val_samples: int | float) -> tuple[ImageSet, tuple[Images, Labels]]:
    """A collection without a stratified part of its training images, and that part: images and labels."""
    total = len(images.train_labels)
    count = kept_for_validation(val_samples, total)
    kept = stratified(images.train_labels, count, "data.val_samples")
    rest = np.setdiff1d(np.arange(total), kept, assume_unique=True)
    training = replace(images, train_images=images.train_images[rest], train_labels=images.train_labels[rest])
    return training, (images.train_images[kept], images.train_labels[kept])


def _part(images: ImageSet, train: int | None, test: int | None) -> ImageSet:
    """A stratified part with ``train`` and ``test`` images, the same in every run; None: all of a split."""
    if train is None and test is None:
        return images
    rows = stratified(images.train_labels, train, "data.train_samples")
    test_rows = stratified(images.test_labels, test, "data.test_samples")
    return replace(
        images,
        train_images=images.train_images[rows],
        train_labels=images.train_labels[rows],
        test_images=images.test_images[test_rows],
        test_labels=images.test_labels[test_rows],
    )
