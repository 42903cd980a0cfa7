"""Text held in memory as numbers, as a LightningDataModule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.tasks.data import TaskData, whole_batches
from recipes.tasks.sources import DataError
from recipes.tasks.tokenizers import TOKENIZERS, Ids

TextBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TextSet:
    """A training and a validation text.

    Attributes:
        name: what runs, dashboards and plots call it.
        train, valid: (N,), numbers of tokens in the order of the text.
    """

    name: str
    train: Ids
    valid: Ids


class Windows(Dataset[TextBatch]):
    """A text in windows of ``length`` tokens, one after the other; batches by one indexing operation.

    An item is (inputs, targets), int64 (N, length) each; a target is the token after its input. Every token but the
    first is a target once; the end of the text, shorter than a window, is left out.
    """

    def __init__(self, ids: Ids, length: int) -> None:
        self._ids, self._length = ids, length
        self._offsets = np.arange(length + 1)

    def __len__(self) -> int:
        return max(0, len(self._ids) - 1) // self._length

    def __getitem__(self, index: int) -> TextBatch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> TextBatch:
        starts = np.asarray(indices, dtype=np.int64) * self._length
        tokens = torch.from_numpy(self._ids[starts[:, None] + self._offsets].astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


class TextDataModule(TaskData):
    """Loads a `TextSet` and serves its windows: one sample is ``sequence_length`` tokens.

    Args:
        name, batch_size: see `TaskData`.
        tokenizer, vocabulary_size: see `tokenizers`.
        sequence_length: tokens of a window.
        train_samples, valid_samples: number of windows, from the beginning of the text; None: all.

    Raises:
        DataError: a setting is out of range.
    """

    def __init__(
        self,
        name: str,
        batch_size: int,
        tokenizer: str,
        vocabulary_size: int,
        sequence_length: int,
        train_samples: int | None = None,
        valid_samples: int | None = None,
    ) -> None:
        super().__init__(name, batch_size)
        if tokenizer not in TOKENIZERS:
            raise DataError(f"data.tokenizer={tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
        if vocabulary_size < 3:
            raise DataError(f"data.vocabulary_size={vocabulary_size} must be at least 3")
        if sequence_length < 1:
            raise DataError(f"data.sequence_length={sequence_length} must be at least 1")
        self.tokenizer, self.vocabulary_size, self.sequence_length = tokenizer, vocabulary_size, sequence_length
        self._train_samples, self._valid_samples = train_samples, valid_samples
        self._set: TextSet | None = None

    def load(self) -> TextSet:
        """The whole text, from what `prepare_data` has left on this machine."""
        raise NotImplementedError

    @property
    def text(self) -> TextSet:
        """The text in use.

        Raises:
            DataError: before `setup`.
        """
        if self._set is None:
            raise DataError("the data is not loaded; call setup() first")
        return self._set

    @property
    def train_count(self) -> int:
        return len(self._windows(self.text.train))

    def setup(self, stage: str | None = None) -> None:
        """Load and cut down the text; on every process.

        Raises:
            DataError: the text is too short, or the processes have found different data.
        """
        if self._set is not None:
            return
        found = self.load()
        self.check_same_everywhere((found.name, len(found.train), len(found.valid)))
        self.data_name = found.name
        self._set = replace(
            found,
            train=self._part(found.train, self._train_samples, "train"),
            valid=self._part(found.valid, self._valid_samples, "valid"),
        )

    def train_dataloader(self) -> DataLoader[TextBatch]:
        self.check_fills_a_step()
        return self._loader(self.text.train, train=True)

    def val_dataloader(self) -> DataLoader[TextBatch]:
        return self._loader(self.text.valid, train=False)

    def test_dataloader(self) -> DataLoader[TextBatch]:
        return self.val_dataloader()

    def _part(self, ids: Ids, count: int | None, split: str) -> Ids:
        windows = len(self._windows(ids))
        if not windows:
            raise DataError(
                f"the {split} text has {len(ids)} tokens, less than a window and its last target; "
                f"lower data.sequence_length={self.sequence_length}"
            )
        if count is None:
            return ids
        if not 1 <= count <= windows:
            raise DataError(f"data.{split}_samples={count} is out of range: 1 to {windows}")
        return ids[: count * self.sequence_length + 1]

    def _windows(self, ids: Ids) -> Windows:
        return Windows(ids, self.sequence_length)

    def _loader(self, ids: Ids, train: bool) -> DataLoader[TextBatch]:
        windows = self._windows(ids)
        return whole_batches(windows, self.batch_size, train)
