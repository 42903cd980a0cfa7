"""Big collections of image files in folders, decoded by worker processes while the network trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from recipes.tasks.data import TaskData
from recipes.tasks.digits import load_digits
from recipes.tasks.images import Labels
from recipes.tasks.launch import cores
from recipes.tasks.sources import DataError, announce_fallback
from recipes.tasks.splits import stratified

TRAIN = "train"
EVALUATION = ("val", "validation", "test")  # the first that is there
PICTURES = (".jpg", ".jpeg", ".png", ".webp")
FORMATS = ("JPEG", "PNG", "WEBP")

#: Mean and standard deviation of ImageNet's red, green and blue, 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

#: Largest size of the digits that stand in: they have 8x8 pixels, and more only take time.
FALLBACK_SIZE = 64

REMEDY = "name a folder train/CLASS/*.jpg + val/CLASS/*.jpg (or validation/, test/) with data.root=PATH"

Sample = tuple[Tensor, int]
Transform = Callable[[Any], Tensor]


class PictureFiles:
    """RGB images of files below a folder, decoded when asked for."""

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder
        # One array: of a list of strings, every worker process would soon have its own copy, for the reference counts.
        self._files = np.array([os.fsencode(os.path.relpath(file, folder)) for file in files])

    def __getitem__(self, index: int) -> Image.Image:
        """One image.

        Raises:
            DataError: the file is no image; its path is in the message.
        """
        path = self._folder / os.fsdecode(self._files[index])
        try:
            with Image.open(path, formats=FORMATS) as picture:
                return picture.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path} cannot be decoded ({error}); replace or remove it") from error


@dataclass(frozen=True)
class Split:
    """Images and their labels, int64 (N,)."""

    images: PictureFiles | Tensor
    labels: Labels


@dataclass(frozen=True)
class Source:
    """Where images come from and how they become uint8 tensors (3, size, size)."""

    name: str
    train: Split
    test: Split
    training: Transform
    evaluation: Transform


class Samples(Dataset[Sample]):
    """The chosen rows of a split, transformed one by one."""

    def __init__(self, split: Split, rows: NDArray[np.int64], transform: Transform) -> None:
        self._split, self._rows, self._transform = split, rows, transform

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        row = int(self._rows[index])
        return self._transform(self._split.images[row]), int(self._split.labels[row])


class ImageFolderData(TaskData):
    """Batches (images float32 (N, 3, size, size) in channels-last memory, labels int64 (N,)) of an image folder.

    In training, a random part of each image is resized (torchvision's RandomResizedCrop) and half of them are mirrored;
    in evaluation, the middle is taken. Crops come from torch's generator in each worker, which goes on from epoch to
    epoch; `seed_everything(workers=True)` seeds it by the seed, the number of the worker and the rank. Without workers,
    all ranks draw the same numbers, for different images. A resumed run draws other crops than one without a break.

    Args:
        name, batch_size: see `TaskData`.
        root: folder with ``train/CLASS/`` and ``val/CLASS/`` (or ``validation``, ``test``); None: `fallback` decides.
        image_size: height and width.
        resize: shorter side in evaluation, before the middle is taken; None: image_size * 8/7, 256 for 224.
        channels: 3.
        num_classes: number of classes in the folder; the digits that stand in may have fewer.
        train_samples, test_samples: size of a stratified part; None: all.
        workers: processes that decode, per process that trains; None: its share of the cores, less one.
        fallback: whether scikit-learn's digits stand in when ``root`` is None.

    Raises:
        DataError: a number out of range.
    """

    def __init__(
        self,
        name: str,
        batch_size: int,
        root: str | None = None,
        image_size: int = 224,
        resize: int | None = None,
        channels: int = 3,
        num_classes: int = 1000,
        train_samples: int | None = None,
        test_samples: int | None = None,
        workers: int | None = None,
        fallback: bool = True,
    ) -> None:
        super().__init__(name, batch_size)
        if image_size < 1:
            raise DataError(f"data.image_size={image_size} must be at least 1")
        if resize is not None and resize < image_size:
            raise DataError(f"data.resize={resize} is less than data.image_size={image_size}; leave it null")
        if channels != 3:
            raise DataError(f"data.channels={channels}: images of a folder are read in colour; set data.channels=3")
        if workers is not None and workers < 0:
            raise DataError(f"data.workers={workers} must be at least 0")
        self.num_classes = num_classes
        self._root = Path(root).expanduser() if root else None
        self._size, self._resize = image_size, resize if resize is not None else round(image_size * 8 / 7)
        self._train_samples, self._test_samples = train_samples, test_samples
        self._workers, self._fallback = workers, fallback
        self._source: Source | None = None
        self._announced = False

    @property
    def fallback_name(self) -> str:
        """What the digits are called when they stand in."""
        return f"digits{self._fallback_size} (fallback)"

    def prepare_data(self) -> None:
        """Look whether the folder is there; says so when the digits stand in.

        Raises:
            DataError: ``root`` is not what it should be, or there is none and ``fallback`` is off.
        """
        if self._root is not None:
            split_folders(self._root)
        elif not self._fallback:
            raise DataError(f"there is no {self.data_name}: data.root is not set; {REMEDY}")
        elif not self._announced:  # Lightning asks again after run.py has
            wanted, self.data_name, self._announced = self.data_name, self.fallback_name, True
            digits = f"scikit-learn's digits at {self._fallback_size}x{self._fallback_size}"
            announce_fallback(wanted, "data.root is not set", digits, self.data_name, REMEDY)

    def setup(self, stage: str | None = None) -> None:
        """List the files, not read them; on every process.

        Raises:
            DataError: the folder is not what the configuration says, or the processes have found different data.
        """
        if self._source is not None:
            return
        if self._root is None and not self._fallback:
            raise DataError(f"there is no {self.data_name}: data.root is not set; {REMEDY}")
        source = self._digits() if self._root is None else self._folder(self._root)
        self.check_same_everywhere((source.name, len(source.train.labels), len(source.test.labels)))
        self._train = _part(source.train, source.training, self._train_samples, "data.train_samples")
        self._test = _part(source.test, source.evaluation, self._test_samples, "data.test_samples")
        self.data_name = source.name
        self._source = source

    @property
    def train_count(self) -> int:
        return len(self._train)

    def train_dataloader(self) -> DataLoader[Sample]:
        self.check_fills_a_step()
        return self._loader(self._train, train=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader(self._test, train=False)

    def test_dataloader(self) -> DataLoader[Sample]:
        return self.val_dataloader()

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        """Normalised images, see the class, and labels."""
        images, labels = batch
        # Here, on the device that trains: bytes travel to it, not floats.
        mean, std = (255 * torch.tensor(values, device=images.device)[:, None, None] for values in (MEAN, STD))
        return (images.contiguous(memory_format=torch.channels_last).float() - mean) / std, labels

    @property
    def _fallback_size(self) -> int:
        return min(self._size, FALLBACK_SIZE)

    def _folder(self, root: Path) -> Source:
        train, test = (_listed(folder) for folder in split_folders(root))
        if train.classes != test.classes:
            odd = sorted(set(train.classes) ^ set(test.classes))
            raise DataError(f"{train.root} and {test.root} have different classes, {', '.join(odd[:5])}; {REMEDY}")
        count = len(train.classes)
        if count != self.num_classes:
            raise DataError(f"{root} has {count} classes, not {self.num_classes}; set data.num_classes={count}")
        training = v2.Compose([v2.RandomResizedCrop(self._size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        evaluation = v2.Compose([v2.Resize(self._resize), v2.CenterCrop(self._size), v2.PILToTensor()])
        return Source(self.data_name, _split(train), _split(test), training=training, evaluation=evaluation)

    def _digits(self) -> Source:
        digits, size = load_digits(self.fallback_name, self._fallback_size, channels=3), self._fallback_size
        count = len(digits.classes)
        # A network for more classes learns not to name the others, so the run stays one of the network asked for.
        if count > self.num_classes:
            limit = f"data.num_classes={self.num_classes}"
            raise DataError(f"{digits.name} has {count} classes, more than {limit}; raise it, or {REMEDY}")
        train, test = (
            Split(torch.from_numpy(images).permute(0, 3, 1, 2), labels)
            for images, labels in ((digits.train_images, digits.train_labels), (digits.test_images, digits.test_labels))
        )
        # A part of a digit, or its mirror image, may be another sign: shifts only.
        return Source(
            digits.name, train, test, training=v2.RandomCrop(size, padding=size // 16), evaluation=v2.Identity()
        )

    def _loader(self, samples: Samples, train: bool) -> DataLoader[Sample]:
        workers = self._workers if self._workers is not None else self._free_cores()
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            shuffle=train,  # Lightning puts a DistributedSampler in place of the default one
            drop_last=train,
            num_workers=workers,
            # Those of an evaluation end with it: they would only hold memory while the others decode.
            persistent_workers=train and workers > 0,
            pin_memory=on_cuda,
        )

    def _free_cores(self) -> int:
        processes = self.trainer.num_devices if self.trainer is not None else 1
        return max(0, cores() // processes - 1)


def split_folders(root: Path) -> tuple[Path, Path]:
    """Folders of the training and the evaluation images.

    Raises:
        DataError: they are not there.
    """
    if not root.exists():
        raise DataError(f"data.root={root} does not exist; {REMEDY}")
    if not root.is_dir():
        raise DataError(f"data.root={root} is a file; unpack it, or {REMEDY}")
    evaluation = [root / name for name in EVALUATION if (root / name).is_dir()]
    if not (root / TRAIN).is_dir() or not evaluation:
        raise DataError(f"data.root={root} does not hold {TRAIN} and one of {', '.join(EVALUATION)}; {REMEDY}")
    return root / TRAIN, evaluation[0]


def _listed(folder: Path) -> ImageFolder:
    try:
        return ImageFolder(str(folder), is_valid_file=_is_picture)
    except FileNotFoundError as error:  # no class, or one without images
        raise DataError(f"{error} in {folder}; {REMEDY}, at least one of {', '.join(PICTURES)} per class") from error


def _is_picture(path: str) -> bool:
    # macOS archives carry "._NAME.jpg" companions that are no images.
    return path.lower().endswith(PICTURES) and not os.path.basename(path).startswith(".")


def _split(folder: ImageFolder) -> Split:
    files, labels = zip(*folder.samples, strict=True)
    return Split(PictureFiles(Path(folder.root), files), np.array(labels, dtype=np.int64))


def _part(split: Split, transform: Transform, count: int | None, setting: str) -> Samples:
    """A stratified part in a fixed random order: in that of the files, the first batches would hold one class only."""
    rows = stratified(split.labels, count, setting)
    return Samples(split, np.random.default_rng(0).permutation(rows), transform)
