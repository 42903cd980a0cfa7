"""Text held in memory as numbers, as a LightningDataModule."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_gqsgd.errors import counted
from recipes.data.named_files import is_tokenizer_file
from recipes.data.task_data import DataInMemory, whole_batches
from recipes.data.tokenizers import TOKENIZERS, Ids, unknown_tokenizer
from recipes.errors import RecipeError

#: Inputs and targets.
TextBatch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class TextSet:
    """A training and a validation text, as numbers of the tokens in their order, (N,), and the name of both."""

    name: str
    train: Ids
    valid: Ids


class Windows(Dataset[TextBatch]):
    """A text in windows of equal length, one after the other; a batch is taken by one indexing operation.

    A batch is (inputs, targets), int64 (N, length) each. A target is the token after its input, so that every token but
    the first is a target once. The end of the text, which is shorter than a window, is left out.

    Args:
        ids: numbers of the tokens, (N,).
        length: number of tokens in a window.
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


class TextDataModule(DataInMemory[TextSet]):
    """Loads a `TextSet` and serves its windows: a sample is a window of ``sequence_length`` tokens.

    Args:
        name, batch_size: see `TaskData`.
        tokenizer: see `tokenizers.splitter`; or the path of a file, see `tokenizer_files.FileTokenizer`.
        vocabulary_size: see `tokenizers.Vocabulary`.
        sequence_length: number of tokens in a window, at least 1.
        train_samples, valid_samples: number of windows from the beginning of each text; None: all.

    Raises:
        RecipeError: a setting is out of range.
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
        if tokenizer not in TOKENIZERS and not is_tokenizer_file(tokenizer):
            raise unknown_tokenizer(tokenizer)
        if vocabulary_size < 3:
            raise RecipeError(f"data.vocabulary_size={vocabulary_size} must be at least 3")
        if sequence_length < 1:
            raise RecipeError(f"data.sequence_length={sequence_length} must be at least 1")
        self.tokenizer, self.vocabulary_size, self.sequence_length = tokenizer, vocabulary_size, sequence_length
        self._train_samples, self._valid_samples = train_samples, valid_samples

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`: the number of windows."""
        return len(self._windows(self.splits.train))

    def taken(self, data: TextSet) -> TextSet:
        """See `DataInMemory.taken`."""
        self.check_same_everywhere((data.name, len(data.train), len(data.valid)))
        self.data_name = data.name
        return replace(
            data,
            train=self._part(data.train, self._train_samples, "train"),
            valid=self._part(data.valid, self._valid_samples, "valid"),
        )

    def train_dataloader(self) -> DataLoader[TextBatch]:
        """Batches of the training text in random order."""
        self.check_fills_a_step()
        return self._loader(self.splits.train, train=True)

    def val_dataloader(self) -> DataLoader[TextBatch]:
        """Batches of the validation text."""
        return self._loader(self.splits.valid, train=False)

    def _part(self, ids: Ids, count: int | None, split: str) -> Ids:
        windows = len(self._windows(ids))
        if not windows:
            raise RecipeError(
                f"the {split} text has {counted(len(ids), 'token')}, less than a window and its last target; "
                f"lower data.sequence_length={self.sequence_length}"
            )
        if count is None:
            return ids
        if not 1 <= count <= windows:
            raise RecipeError(f"data.{split}_samples={count} is out of range: 1 to {windows}")
        return ids[: count * self.sequence_length + 1]

    def _windows(self, ids: Ids) -> Windows:
        return Windows(ids, self.sequence_length)

    def _loader(self, ids: Ids, train: bool) -> DataLoader[TextBatch]:
        return whole_batches(self._windows(ids), self.batch_size, train)
