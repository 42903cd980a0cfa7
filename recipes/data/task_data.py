"""What all data modules have in common."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.data.sizes import check_fills_a_step
from recipes.errors import RecipeError

Splits = TypeVar("Splits")


class TaskData(LightningDataModule):
    """The data of a task, in batches (inputs, targets).

    The last weights are the result, and nothing is chosen by validation. So validation and test may be the same split,
    and they are unless a data module keeps a part of the training samples for validation.

    Args:
        name: name of the data in runs and plots.
        batch_size: number of samples per process and step, at least 1.

    Attributes:
        data_name: the name, which changes when other data stand in.

    Raises:
        RecipeError: the batch size is out of range.
    """

    def __init__(self, name: str, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise RecipeError(f"data.batch_size={batch_size} must be at least 1")
        self.data_name = name
        self.batch_size = batch_size
        self._prepared = False

    def prepare_data(self) -> None:
        """Find, download or decode the data, once per machine; say so when others stand in.

        Raises:
            RecipeError: ``data.root`` is not what it should be, or there are no data and none may stand in.
        """
        if not self._prepared:  # `train` calls this, and Lightning calls it again
            self.prepare_once()
            self._prepared = True

    def prepare_once(self) -> None:
        """What `prepare_data` does."""

    @property
    def train_count(self) -> int:
        """Number of training samples, after `setup`."""
        raise NotImplementedError

    def test_dataloader(self) -> DataLoader[Any]:
        """Batches of the split that validation has."""
        return self.val_dataloader()

    def check_fills_a_step(self) -> None:
        """Check that the training samples make at least one step of all processes."""
        check_fills_a_step(self.train_count, self.batch_size, self.trainer.world_size if self.trainer else 1)

    def check_same_everywhere(self, loaded: tuple[str | int, ...]) -> None:
        """Check that all processes have loaded the same data.

        Args:
            loaded: name of the data, and the numbers of training and test samples.
        """
        if self.trainer is None or self.trainer.world_size == 1:
            return
        first = self.trainer.strategy.broadcast(loaded, src=0)
        if loaded != first:
            raise RecipeError(
                f"process {self.trainer.global_rank} has found {loaded} (name, training and test samples), "
                f"process 0 {first}; put the same data at data.root on every machine",
                of_one_process=True,
            )


class DataInMemory(TaskData, Generic[Splits]):
    """Data whose splits `setup` loads into memory as a whole."""

    _splits: Splits | None = None

    def load(self) -> Any:
        """All data, from what `prepare_data` has left on this machine."""
        raise NotImplementedError

    def taken(self, data: Any) -> Splits:
        """Check what `load` gives, and take the wanted part of it, on every process; sets ``data_name``."""
        raise NotImplementedError

    def setup(self, stage: str | None = None) -> None:
        """Load the data, check them and take the wanted part of them; on every process.

        Raises:
            RecipeError: the data are not what the configuration says, or the processes have loaded different data.
        """
        if self._splits is None:  # Lightning calls this for training and again for testing
            self._splits = self.taken(self.load())

    @property
    def splits(self) -> Splits:
        """The splits in use."""
        if self._splits is None:
            raise RecipeError("the data are not loaded; call setup() first")
        return self._splits


class Rows(Dataset[tuple[Tensor, ...]]):
    """Rows of arrays in memory; a batch is taken by one indexing operation instead of row by row.

    Args:
        *columns: arrays of equal length, each with the type of its part of a batch.
    """

    def __init__(self, *columns: tuple[NDArray[Any], torch.dtype]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(self._columns[0][0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, ...]:
        rows = np.asarray(indices, dtype=np.int64)
        return tuple(torch.from_numpy(values[rows]).to(dtype) for values, dtype in self._columns)


def whole_batches(rows: Any, size: int, train: bool) -> DataLoader[Any]:
    """Batches of a dataset in memory.

    There are no worker processes, which would compete with training for the cores.

    Args:
        rows: dataset whose ``__getitems__`` gives a whole batch by one indexing operation.
        size: number of samples in a batch.
        train: whether the samples are shuffled and an incomplete last batch is dropped.
    """
    # Lightning puts a DistributedSampler in the place of the default sampler.
    return DataLoader(rows, batch_size=size, shuffle=train, drop_last=train, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
