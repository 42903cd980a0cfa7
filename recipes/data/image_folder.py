"""Large collections of image files in folders, decoded by worker processes while the network trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_gqsgd.wire.processors import share_of
from recipes.data.sources import announce_fallback
from recipes.data.splits import stratified
from recipes.data.task_data import TaskData
from recipes.errors import RecipeError
from workloads.digits import load_digits
from workloads.images import Labels

TRAIN = "train"
#: Folders of the images that are evaluated, the first choice first.
EVALUATION = ("val", "validation", "test")
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
FORMATS = ("JPEG", "PNG", "WEBP")

#: Mean and standard deviation of ImageNet's red, green and blue, 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: Largest size of the digits that stand in: they have 8x8 pixels, and more pixels would only take time.
FALLBACK_SIZE = 64

REMEDY = "name a folder train/CLASS/*.jpg + val/CLASS/*.jpg (or validation/, test/) with data.root=PATH"

#: Image, uint8 (3, size, size), and label.
Sample = tuple[Tensor, int]
Transform = Callable[[Any], Tensor]


class PictureFiles:
    """RGB images of the files below a folder, each decoded when it is asked for."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
        # One array, because every worker process would soon have its own copy of a list: reading an element of a list
        # writes its reference count.
        self._files = np.array([os.fsencode(os.path.relpath(file, folder)) for file in files])

    def __getitem__(self, index: int) -> Image.Image:
        """The image of a file.

        Raises:
            RecipeError: the file is no image; the message has its path.
        """
        path = self._folder / os.fsdecode(self._files[index])
        return decoded(path, str(path), "replace or remove it")


def decoded(file: Path | BinaryIO, name: str, remedy: str) -> Image.Image:
    """The RGB image of a file.

    Args:
        file: path of the file, or the file.
        name: what a message calls it.
        remedy: what a message says to do.
    """
    try:
        with Image.open(file, formats=FORMATS) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise RecipeError(f"{name} cannot be decoded ({error}); {remedy}") from error


@dataclass(frozen=True)
class Split:
    """Images, and their labels int64 (N,)."""

    images: PictureFiles | Tensor
    labels: Labels


@dataclass(frozen=True)
class Source:
    """Where images come from, and how they become uint8 tensors (3, size, size).

    Attributes:
        name: name of the collection.
        train, test: the splits.
        training, evaluation: what is done to an image in training, and in evaluation.
    """

    name: str
    train: Split
    test: Split
    training: Transform
    evaluation: Transform


class Samples(Dataset[Sample]):
    """The chosen rows of a split, transformed image by image."""

    def __init__(self, split: Split, rows: NDArray[np.int64], transform: Transform) -> None:
        self._split, self._rows, self._transform = split, rows, transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self._rows[index])
        return self._transform(self._split.images[row]), int(self._split.labels[row])


class ImageFolderData(TaskData):
    """Batches (images float32 (N, 3, size, size) in channels-last memory, labels int64 (N,)) of an image folder.

    In training, a random part of each image is resized (torchvision's RandomResizedCrop), and half of the images are
    mirrored. In evaluation, the middle of each image is taken.

    Crops come from torch's generator in each worker, which goes on from epoch to epoch; `seed_everything(workers=True)`
    seeds it by the seed, the number of the worker and the rank. Without workers, all ranks draw the same numbers, for
    different images. A resumed run draws other crops than a run without a break.

    Args:
        root: folder with ``train/CLASS/`` and ``val/CLASS/`` (or ``validation``, ``test``); None: `fallback` decides.
        image_size: height and width in pixels, at least 1.
        resize: length of an image's shorter side in evaluation, before the middle is taken; None: image_size * 8/7,
            which is 256 for 224.
        channels: must be 3.
        num_classes: number of classes in the folder; the digits that stand in may have fewer.
        train_samples, test_samples: number of images of a stratified part of each split; None: all.
        workers: number of processes that decode, per process that trains; None: its share of the cores, less one.
        fallback: whether scikit-learn's digits stand in where ``root`` is None; None: on the CPU, which
            `recipes.data.named_files.check_stand_in` sees to.
        **common: ``name`` and ``batch_size``, see `TaskData`.

    Raises:
        RecipeError: a number is out of range.
    """

    def __init__(
        self,
        root: str | None = None,
        image_size: int = 224,
        resize: int | None = None,
        channels: int = 3,
        num_classes: int = 1000,
        train_samples: int | None = None,
        test_samples: int | None = None,
        workers: int | None = None,
        fallback: bool | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if image_size < 1:
            raise RecipeError(f"data.image_size={image_size} must be at least 1")
        if resize is not None and resize < image_size:
            raise RecipeError(f"data.resize={resize} is less than data.image_size={image_size}; leave it null")
        if channels != 3:
            raise RecipeError(f"data.channels={channels}: images of a folder are read in colour; set data.channels=3")
        if workers is not None and workers < 0:
            raise RecipeError(f"data.workers={workers} must be at least 0")
        self.num_classes = num_classes
        self._root = Path(root).expanduser() if root else None
        self._size, self._resize = image_size, resize if resize is not None else round(image_size * 8 / 7)
        self._train_samples, self._test_samples = train_samples, test_samples
        self._workers = workers
        self._fallback = fallback is not False
        self._source: Source | None = None

    @property
    def fallback_name(self) -> str:
        """What the digits are called when they stand in."""
        return f"digits{self._fallback_size} (fallback)"

    def prepare_once(self) -> None:
        """Check that the folder is there; say so when the digits stand in."""
        if self._root is not None:
            split_folders(self._root)
        elif not self._fallback:
            raise self._absent()
        else:
            wanted, self.data_name = self.data_name, self.fallback_name
            digits = f"scikit-learn's digits at {self._fallback_size}x{self._fallback_size}"
            announce_fallback(wanted, "data.root is not set", digits, self.data_name, REMEDY)

    def setup(self, stage: str | None = None) -> None:
        """List the files, without reading them; on every process.

        Raises:
            RecipeError: the folder is not what the configuration says, or the processes have found different data.
        """
        if self._source is not None:
            return
        if self._root is None and not self._fallback:
            raise self._absent()
        source = self._digits() if self._root is None else self._folder(self._root)
        self.check_same_everywhere((source.name, len(source.train.labels), len(source.test.labels)))
        self._train = _part(source.train, source.training, self._train_samples, "data.train_samples")
        self._test = _part(source.test, source.evaluation, self._test_samples, "data.test_samples")
        self.data_name = source.name
        self._source = source

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`."""
        return len(self._train)

    def train_dataloader(self) -> DataLoader[Sample]:
        """Batches of the training split in random order."""
        self.check_fills_a_step()
        # Lightning puts a DistributedSampler in the place of the default sampler.
        return self._loader(self._train, train=True, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Batches of the split that is evaluated."""
        return self._loader(self._test, train=False)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalised images, see the class, and labels."""
        images, labels = batch
        # On the device that trains, so that bytes travel to it instead of floats.
        mean, std = (255 * torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
        return (images.contiguous(memory_format=torch.channels_last).float() - mean) / std, labels

    @property
    def _fallback_size(self) -> int:
        return min(self._size, FALLBACK_SIZE)

    def _absent(self) -> RecipeError:
        return RecipeError(f"there is no {self.data_name}: data.root is not set; {REMEDY}")

    def _folder(self, root: Path) -> Source:
        """The images below a folder."""
        train, test = (_listed(folder) for folder in split_folders(root))
        if train.classes != test.classes:
            unshared = sorted(set(train.classes) ^ set(test.classes))
            raise RecipeError(
                f"{train.root} and {test.root} have different classes, {', '.join(unshared[:5])}; {REMEDY}"
            )
        count = len(train.classes)
        if count != self.num_classes:
            raise RecipeError(f"{root} has {count} classes, not {self.num_classes}; set data.num_classes={count}")
        training, evaluation = self._transforms()
        return Source(self.data_name, _split(train), _split(test), training=training, evaluation=evaluation)

    def _transforms(self) -> tuple[Transform, Transform]:
        """What is done to an image in training, and in evaluation."""
        return (
            v2.Compose([v2.RandomResizedCrop(self._size), v2.RandomHorizontalFlip(), v2.PILToTensor()]),
            v2.Compose([v2.Resize(self._resize), v2.CenterCrop(self._size), v2.PILToTensor()]),
        )

    def _digits(self) -> Source:
        """The digits that stand in."""
        digits, size = load_digits(self.fallback_name, self._fallback_size, channels=3), self._fallback_size
        count = len(digits.classes)
        # Fewer classes than outputs are no problem: the network keeps its size, and learns not to name the others.
        if count > self.num_classes:
            limit = f"data.num_classes={self.num_classes}"
            raise RecipeError(f"{digits.name} has {count} classes, more than {limit}; raise it, or {REMEDY}")
        train, test = (
            Split(torch.from_numpy(images).permute(0, 3, 1, 2), labels)
            for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels))
        )
        # Shifts only: a part of a digit, or its mirror image, may be another sign.
        shift = v2.RandomCrop(size, padding=size // 16)
        return Source(digits.name, train, test, training=shift, evaluation=v2.Identity())

    def _loader(self, samples: Dataset[Sample], train: bool, **order: Any) -> DataLoader[Sample]:
        """Batches of samples."""
        workers = self._workers if self._workers is not None else self._free_cores()
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            **order,
            num_workers=workers,
            # Workers of an evaluation end with it: they would only hold memory while those of training decode.
            persistent_workers=train and workers > 0,
            pin_memory=on_cuda,
        )

    def _free_cores(self) -> int:
        ranks, here = (self.trainer.world_size, self.trainer.num_devices) if self.trainer is not None else (1, 1)
        return max(0, share_of(ranks, here) - 1)


def split_folders(root: Path) -> tuple[Path, Path]:
    """The folder of the training images, and the folder of the images that are evaluated."""
    if not root.exists():
        raise RecipeError(f"data.root={root} does not exist; {REMEDY}")
    if not root.is_dir():
        raise RecipeError(f"data.root={root} is a file; unpack it, or {REMEDY}")
    evaluation = [root / name for name in EVALUATION if (root / name).is_dir()]
    if not (root / TRAIN).is_dir() or not evaluation:
        raise RecipeError(f"data.root={root} does not hold {TRAIN} and one of {', '.join(EVALUATION)}; {REMEDY}")
    return root / TRAIN, evaluation[0]


def _listed(folder: Path) -> ImageFolder:
    try:
        return ImageFolder(str(folder), is_valid_file=_is_picture)
    except FileNotFoundError as error:  # there is no class, or a class has no images
        raise RecipeError(f"{error} in {folder}; {REMEDY}, at least one of {', '.join(PICTURES)} per class") from error


def _is_picture(path: str) -> bool:
    # macOS archives hold a companion "._NAME.jpg" of each file, which is no image.
    return path.lower().endswith(PICTURES) and not os.path.basename(path).startswith(".")


def _split(folder: ImageFolder) -> Split:
    files, labels = zip(*folder.samples, strict=True)
    return Split(PictureFiles(Path(folder.root), files), np.array(labels, dtype=np.int64))


def _part(split: Split, transform: Transform, count: int | None, setting: str) -> Samples:
    """A stratified part in a fixed random order; in the order of the files, the first batches would hold one class."""
    rows = stratified(split.labels, count, setting)
    return Samples(split, np.random.default_rng(0).permutation(rows), transform)
