"""What all data modules have in common."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from recipes.tasks.sources import DataError


class TaskData(LightningDataModule):
    """Data of a task, whose batches are (inputs, targets).

    Validation and test are the same split: nothing is chosen by it, the last weights are the result.

    Args:
        name: name of the data in runs and plots.
        batch_size: samples per process and step.

    Attributes:
        data_name: the name, which changes when other data stand in.
    """

    def __init__(self, name: str, batch_size: int) -> None:
        super().__init__()
        if batch_size < 1:
            raise DataError(f"data.batch_size={batch_size} must be at least 1")
        self.data_name = name
        self.batch_size = batch_size

    @property
    def train_count(self) -> int:
        """Number of training samples; after `setup`."""
        raise NotImplementedError

    def check_fills_a_step(self) -> None:
        """Whether the training samples make one step of all processes.

        Raises:
            DataError: they do not.
        """
        processes = self.trainer.world_size if self.trainer else 1
        if self.train_count < self.batch_size * processes:
            raise DataError(
                f"{self.train_count} training samples do not fill one step of {processes} processes with "
                f"data.batch_size={self.batch_size}; lower data.batch_size or raise data.train_samples"
            )

    def check_same_everywhere(self, found: tuple[str | int, ...]) -> None:
        """Whether all processes have found the same data, by name and numbers of training and test samples.

        Raises:
            DataError: they have not.
        """
        if self.trainer is None or self.trainer.world_size == 1:
            return
        first = self.trainer.strategy.broadcast(found, src=0)
        if found != first:
            raise DataError(
                f"process {self.trainer.global_rank} has found {found} (name, training and test samples), "
                f"process 0 {first}; put the same data at data.root on every machine"
            )


def whole_batches(rows: Any, size: int, train: bool) -> DataLoader[Any]:
    """Batches of a dataset in memory whose ``__getitems__`` gives a whole batch by one indexing operation.

    Without worker processes, which would compete with training for the cores. Lightning puts a DistributedSampler in
    place of the default one.
    """
    return DataLoader(rows, batch_size=size, shuffle=train, drop_last=train, collate_fn=_as_is)


def _as_is(batch: Any) -> Any:
    return batch
