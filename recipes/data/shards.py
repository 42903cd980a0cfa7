"""Images in tar shards, as the package webdataset reads them, decoded by worker processes while the network trains."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.transforms import v2

from recipes.data.image_folder import FORMATS, ImageFolderData, Sample, Transform
from recipes.errors import DataError

PICTURES = "jpg;jpeg;png;webp"
REMEDY = "name a folder with train-*.tar and val-*.tar (or validation-*.tar) with data.root=PATH"


class Shards(IterableDataset[Sample]):
    """Samples of one rank from tar files: a random stream for training, or its share of all, once.

    Args:
        files: all shards.
        count: number of samples of this rank in an epoch.
        place: rank, and number of ranks.
        transform: what is done to each image.
        draw: seed and size of the buffer of a random stream, which draws shards with replacement, so that ranks have
            equally many samples; None: each rank reads shards of its own in their order, and begins again where they
            have fewer samples than ``count``.
        batch_size: number of samples that a worker hands on together.
    """

    def __init__(
        self,
        files: Sequence[Path],
        count: int,
        place: tuple[int, int],
        transform: Transform,
        draw: tuple[int, int] | None,
        batch_size: int,
    ) -> None:
        self._files, self._count, self._place = [str(file) for file in files], count, place
        self._transform, self._draw, self._batch_size = transform, draw, batch_size
        self._epoch = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        self._epoch += 1
        batches = -(-self._count // self._batch_size)
        own = len(range(number, batches, workers)) * self._batch_size
        if self._draw is None and number == (batches - 1) % workers:
            own -= batches * self._batch_size - self._count  # the last batch may be smaller
        for sample in itertools.islice(self._samples(number, workers), own):
            image, label = sample
            yield self._transform(_decoded(image)), int(label)

    def _samples(self, number: int, workers: int) -> Iterator[tuple[bytes, bytes]]:
        """Encoded images and labels, without an end."""
        import webdataset  # of the extra `webdataset`

        rank, ranks = self._place
        stages = [webdataset.tarfile_to_samples(), webdataset.to_tuple(PICTURES, "cls")]
        if self._draw is not None:
            seed, buffer = self._draw
            rng = np.random.default_rng((seed, self._epoch, rank, number))
            urls = ({"url": self._files[int(rng.integers(len(self._files)))]} for _ in itertools.count())
            stages.insert(1, webdataset.shuffle(buffer, initial=buffer, seed=int(rng.integers(2**31))))
            yield from webdataset.DataPipeline(lambda: urls, *stages)
            return
        readers, reader = ranks * workers, rank * workers + number
        by_shard = len(self._files) >= readers
        files = self._files[reader::readers] if by_shard else self._files
        while True:
            every = webdataset.DataPipeline(lambda: ({"url": file} for file in files), *stages)
            yield from every if by_shard else itertools.islice(every, reader, None, readers)


class ShardData(ImageFolderData):
    """Batches as those of `ImageFolderData`, from the tar shards of webdataset.

    Args:
        root: folder with ``train-*.tar`` and ``val-*.tar`` (or ``validation-*.tar``).
        train_samples, test_samples: number of samples of all shards together.
        shuffle: samples of a worker from which the next one is drawn in training.
        seed: seed of the order in training.
        **common: see `ImageFolderData`.

    Raises:
        DataError: webdataset is not installed, or a number is out of range.
    """

    def __init__(
        self,
        root: str | None = None,
        train_samples: int = 1281167,
        test_samples: int = 50000,
        shuffle: int = 2000,
        seed: int = 0,
        **common: Any,
    ) -> None:
        if find_spec("webdataset") is None:
            raise DataError("data=webdataset needs webdataset: uv sync --extra webdataset, or pip install webdataset")
        for key, value in {"train_samples": train_samples, "test_samples": test_samples, "shuffle": shuffle}.items():
            if not isinstance(value, int) or value < 1:
                raise DataError(f"data.{key}={value} must be an integer of at least 1")
        super().__init__(root=root, fallback=False, **common)
        self._counts, self._buffer, self._seed = (train_samples, test_samples), shuffle, seed
        self._shards: tuple[list[Path], list[Path]] = ([], [])

    def prepare_data(self) -> None:
        """Check that there are shards.

        Raises:
            DataError: there are none.
        """
        self._shards = self._found()

    def setup(self, stage: str | None = None) -> None:
        """List the shards, on every process.

        Raises:
            DataError: there are none, or the processes have found different ones.
        """
        self._shards = self._found()
        self.check_same_everywhere((self.data_name, *map(len, self._shards)))

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`."""
        return self._counts[0]

    def train_dataloader(self) -> DataLoader[Sample]:
        """Batches of a random stream of training samples."""
        self.check_fills_a_step()
        transform = v2.Compose([v2.RandomResizedCrop(self._size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
        # Equally many whole batches for every rank.
        count = self._counts[0] // (self._ranks()[1] * self.batch_size) * self.batch_size
        return self._of(Shards(self._shards[0], count, self._ranks(), transform, self._drawn(), self.batch_size), True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Batches of the split that is evaluated."""
        transform = v2.Compose([v2.Resize(self._resize), v2.CenterCrop(self._size), v2.PILToTensor()])
        count = -(-self._counts[1] // self._ranks()[1])
        return self._of(Shards(self._shards[1], count, self._ranks(), transform, None, self.batch_size), False)

    def _drawn(self) -> tuple[int, int]:
        return self._seed, self._buffer

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _of(self, shards: Shards, train: bool) -> DataLoader[Sample]:
        workers = self._workers if self._workers is not None else self._free_cores()
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            shards,
            batch_size=self.batch_size,
            num_workers=workers,
            persistent_workers=train and workers > 0,
            pin_memory=on_cuda,
        )

    def _found(self) -> tuple[list[Path], list[Path]]:
        if self._root is None:
            raise DataError(f"there is no {self.data_name}: data.root is not set; {REMEDY}")
        train = sorted(self._root.glob("train-*.tar"))
        test = sorted([*self._root.glob("val-*.tar"), *self._root.glob("validation-*.tar")])
        if not train or not test:
            raise DataError(
                f"data.root={self._root} holds {len(train)} train-*.tar and {len(test)} val-*.tar; {REMEDY}"
            )
        return train, test


def _decoded(encoded: bytes) -> Image.Image:
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"an image of a shard cannot be decoded ({error}); pack the shards anew") from error
