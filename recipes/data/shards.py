"""Images in tar shards, as the package webdataset reads them, decoded by worker processes while the network trains."""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from recipes.data.image_folder import ImageFolderData, Sample, Transform, decoded
from recipes.errors import RecipeError, check_installed

PICTURES = "jpg;jpeg;png;webp"
REMEDY = "name a folder with train-*.tar and val-*.tar (or validation-*.tar) with data.root=PATH"


class Shards(IterableDataset[Sample]):
    """Samples of one rank from tar files: a random stream for training, or its share of all, in their order.

    Args:
        files: all shards.
        count: number of samples of this rank in an epoch.
        place: rank, and number of ranks.
        transform: what is done to each image.
        order: of a random stream, the seed and the size of its buffer: shards are drawn with replacement, so that ranks
            have equally many samples. Otherwise the number of samples of each shard: the first samples come again for
            the last ranks, if ranks cannot have equally many.
        batch_size: number of samples that a worker hands on together.
    """

    def __init__(
        self,
        files: Sequence[Path],
        count: int,
        place: tuple[int, int],
        transform: Transform,
        order: tuple[int, int] | Sequence[int],
        batch_size: int,
    ) -> None:
        self._files, self._count, self._place = [str(file) for file in files], count, place
        self._transform, self._order, self._batch_size = transform, order, batch_size
        self._epoch = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        self._epoch += 1
        samples = self._drawn(number) if isinstance(self._order, tuple) else self._ordered(number, workers)
        for image, label in itertools.islice(samples, self._own(number, workers)):
            picture = decoded(io.BytesIO(image), "an image of a shard", "pack the shards anew")
            yield self._transform(picture), int(label)

    def _own(self, number: int, workers: int) -> int:
        """How many samples a worker hands on: whole batches, but for the last batch of all."""
        batches = -(-self._count // self._batch_size)
        own = len(range(number, batches, workers)) * self._batch_size
        is_last = number == (batches - 1) % workers
        return own - (batches * self._batch_size - self._count if is_last else 0)

    def _drawn(self, number: int) -> Iterator[tuple[bytes, bytes]]:
        """Encoded images and labels of a random stream, without an end."""
        seed, buffer = self._order
        rng = np.random.default_rng((seed, self._epoch, self._place[0], number))
        drawn = (self._files[int(rng.integers(len(self._files)))] for _ in itertools.count())
        import webdataset  # of the extra `webdataset`

        yield from _read(drawn, webdataset.shuffle(buffer, initial=buffer, seed=int(rng.integers(2**31))))

    def _ordered(self, number: int, workers: int) -> Iterator[tuple[bytes, bytes]]:
        """Encoded images and labels from the first of a worker on, without an end."""
        before = sum(self._own(other, workers) for other in range(number))
        skipped = (self._place[0] * self._count + before) % sum(self._order)
        for file, size in itertools.cycle(zip(self._files, self._order, strict=True)):
            if skipped < size:
                yield from itertools.islice(_read([file]), skipped, None)
            skipped = max(0, skipped - size)


def _read(files: Iterable[str], *stages: Any) -> Iterator[tuple[bytes, bytes]]:
    import webdataset  # of the extra `webdataset`

    first = (lambda: ({"url": file} for file in files), webdataset.tarfile_to_samples())
    return iter(webdataset.DataPipeline(*first, *stages, webdataset.to_tuple(PICTURES, "cls")))


def samples_in(file: Path) -> int:
    """Returns the number of samples of a shard, from the heads of its members."""
    try:
        with tarfile.open(file) as tar:
            return sum(member.name.endswith(".cls") for member in tar)
    except (OSError, tarfile.TarError) as error:
        raise RecipeError(f"{file} is not a shard ({error}); replace or remove it") from error


class ShardData(ImageFolderData):
    """Batches as those of `ImageFolderData`, from the tar shards of webdataset.

    Args:
        root: folder with ``train-*.tar`` and ``val-*.tar`` (or ``validation-*.tar``).
        train_samples: number of samples of an epoch: as many as all training shards have.
        shuffle: samples of a worker from which the next one is drawn in training.
        seed: seed of the order in training.
        **common: see `ImageFolderData`.

    Raises:
        RecipeError: webdataset is not installed, or a number is out of range.
    """

    def __init__(
        self,
        root: str | None = None,
        train_samples: int = 1281167,
        shuffle: int = 2000,
        seed: int = 0,
        **common: Any,
    ) -> None:
        check_installed("webdataset", "data=webdataset", "webdataset", "webdataset")
        for key, value in {"train_samples": train_samples, "shuffle": shuffle}.items():
            if not isinstance(value, int) or value < 1:
                raise RecipeError(f"data.{key}={value} must be an integer of at least 1")
        super().__init__(root=root, fallback=False, **common)
        self._count, self._drawn = train_samples, (seed, shuffle)
        self._shards: tuple[list[Path], list[Path]] = ([], [])
        self._sizes: list[int] = []  # of the shards that are evaluated

    def prepare_once(self) -> None:
        """Check that there are shards."""
        self._shards = self._found()

    def setup(self, stage: str | None = None) -> None:
        """List the shards, on every process."""
        self._shards = self._found()
        self._sizes = [samples_in(file) for file in self._shards[1]]
        if not sum(self._sizes):
            raise RecipeError(f"{self._shards[1][0]} and {len(self._sizes) - 1} others hold no NAME.cls; {REMEDY}")
        self.check_same_everywhere((self.data_name, len(self._shards[0]), sum(self._sizes)))

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`."""
        return self._count

    def train_dataloader(self) -> DataLoader[Sample]:
        """Batches of a random stream of training samples."""
        self.check_fills_a_step()
        transform, _ = self._transforms()
        # Equally many whole batches for every rank.
        count = self._count // (self._ranks()[1] * self.batch_size) * self.batch_size
        shards = Shards(self._shards[0], count, self._ranks(), transform, self._drawn, self.batch_size)
        return self._loader(shards, train=True)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Batches of the split that is evaluated."""
        _, transform = self._transforms()
        count = -(-sum(self._sizes) // self._ranks()[1])
        shards = Shards(self._shards[1], count, self._ranks(), transform, self._sizes, self.batch_size)
        return self._loader(shards, train=False)

    def _ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)

    def _found(self) -> tuple[list[Path], list[Path]]:
        if self._root is None:
            raise RecipeError(f"there is no {self.data_name}: data.root is not set; {REMEDY}")
        train = sorted(self._root.glob("train-*.tar"))
        test = sorted([*self._root.glob("val-*.tar"), *self._root.glob("validation-*.tar")])
        if not train or not test:
            raise RecipeError(
                f"data.root={self._root} holds {len(train)} train-*.tar and {len(test)} val-*.tar; {REMEDY}"
            )
        return train, test
