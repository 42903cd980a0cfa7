"""What all data modules have in common."""

from __future__ import annotations

from typing import Any, TypeVar

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from recipes.data.sizes import check_fills_a_step
from recipes.errors import DataError, OtherDataError

T = TypeVar("T")


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
        DataError: the batch size is out of range.
    """

    def __init__(self, name: str, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise DataError(f"data.batch_size={batch_size} must be at least 1")
        self.data_name = name
        self.batch_size = batch_size

    @property
    def train_count(self) -> int:
        """Number of training samples, after `setup`."""
        raise NotImplementedError

    def test_dataloader(self) -> DataLoader[Any]:
        """Batches of the split that validation has."""
        return self.val_dataloader()

    def check_fills_a_step(self) -> None:
        """Check that the training samples make at least one step of all processes.

        Raises:
            DataError: there are too few.
        """
        check_fills_a_step(self.train_count, self.batch_size, self.trainer.world_size if self.trainer else 1)

    def check_same_everywhere(self, loaded: tuple[str | int, ...]) -> None:
        """Check that all processes have loaded the same data.

        Args:
            loaded: name of the data, and the numbers of training and test samples.

        Raises:
            OtherDataError: this process has loaded other data than process 0.
        """
        if self.trainer is None or self.trainer.world_size == 1:
            return
        first = self.trainer.strategy.broadcast(loaded, src=0)
        if loaded != first:
            raise OtherDataError(
                f"process {self.trainer.global_rank} has found {loaded} (name, training and test samples), "
                f"process 0 {first}; put the same data at data.root on every machine"
            )


def loaded(data: T | None, words: str) -> T:
    """Returns data that `setup` has loaded.

    Args:
        data: the data; None: they are not loaded yet.
        words: subject and verb of the error, e.g. ``"the images are"``.

    Raises:
        DataError: `setup` has not been called.
    """
    if data is None:
        raise DataError(f"{words} not loaded; call setup() first")
    return data


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
