"""Click logs held in memory, as a LightningDataModule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from recipes.data import criteo
from recipes.data.click_features import field_ids
from recipes.data.criteo import FIELDS, ClickLog
from recipes.data.sources import announce_fallback, cache_folder
from recipes.data.splits import split, stratified
from recipes.data.synthetic_clicks import TRUE_AUC, synthetic_clicks
from recipes.data.task_data import DataInMemory, Rows, whole_batches
from recipes.errors import RecipeError

#: Ids and labels.
ClickBatch = tuple[Tensor, Tensor]

FALLBACK = "synthetic clicks (fallback)"
REMEDY = f"name it with data.root=PATH ({criteo.LAYOUT}; or a folder with one of them)"


@dataclass(frozen=True)
class ClickSet:
    """A training split and a test split: ids inside each field, (N, 39), and labels, (N,), of which 1 is a click."""

    train_ids: NDArray[np.int32]
    train_labels: NDArray[np.int8]
    test_ids: NDArray[np.int32]
    test_labels: NDArray[np.int8]


class ClickData(DataInMemory[ClickSet]):
    """Batches (ids int64 (N, 39), labels float32 (N,)) of Criteo's click logs, or of drawn clicks where there are none.

    Args:
        buckets: number of ids of each field, see `click_features.field_ids`.
        fields: number of fields, which is 39 in click logs.
        root: a file, or a folder with one file, which is used or refused, and never replaced; None: `fallback` decides.
        fallback: whether drawn clicks stand in where ``root`` is None.
        cache_dir: folder of parsed text; None: ``~/.cache/lightning_gqsgd``.
        max_rows: number of rows to read at most; None: all.
        test_fraction: fraction of the rows that is the test split, stratified, the same in every run.
        train_samples, test_samples: number of rows of a stratified part of each split; None: all.
        **common: ``name`` and ``batch_size``, see `TaskData`.

    Raises:
        RecipeError: a number is out of range.
    """

    def __init__(
        self,
        buckets: int,
        fields: int = FIELDS,
        root: str | None = None,
        fallback: bool = True,
        cache_dir: str | None = None,
        max_rows: int | None = None,
        test_fraction: float = 0.2,
        train_samples: int | None = None,
        test_samples: int | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if fields != FIELDS:
            raise RecipeError(f"data.fields={fields}, but click logs have {FIELDS}; leave data.fields out")
        if not 1 <= buckets < 2**31:
            raise RecipeError(f"data.buckets={buckets} is out of range: 1 to {2**31 - 1}")
        if max_rows is not None and max_rows < 1:
            raise RecipeError(f"data.max_rows={max_rows} must be at least 1, or null for all")
        self._buckets, self._max_rows, self._test_fraction = buckets, max_rows, test_fraction
        self._root = Path(root).expanduser() if root else None
        self._fallback = fallback
        self._cache = cache_folder(cache_dir)
        self._train_samples, self._test_samples = train_samples, test_samples

    def prepare_once(self) -> None:
        """Parse text; say so when drawn clicks stand in."""
        if self._root is None:
            self._check_fallback()
            self.data_name = FALLBACK
            stand_in = f"clicks drawn from a known model (its own AUC is {TRUE_AUC:.3f})"
            announce_fallback("Criteo", "data.root is not set", stand_in, FALLBACK, REMEDY)
        else:
            criteo.load_log(_file(self._root), self._cache, self._max_rows)

    @property
    def train_count(self) -> int:
        """See `TaskData.train_count`."""
        return len(self.splits.train_labels)

    def load(self) -> tuple[str, ClickLog]:
        """The name of the log, and its rows."""
        if self._root is not None:
            return self.data_name, criteo.load_log(_file(self._root), self._cache, self._max_rows)
        self._check_fallback()
        return FALLBACK, synthetic_clicks()[0]

    def taken(self, data: tuple[str, ClickLog]) -> ClickSet:
        """Hash and split the rows."""
        name, log = data
        train, test = split(log.labels, self._test_fraction)
        self.check_same_everywhere((name, len(train), len(test)))
        train = train[stratified(log.labels[train], self._train_samples, "data.train_samples")]
        test = test[stratified(log.labels[test], self._test_samples, "data.test_samples")]
        _check_both_kinds(log.labels[train], "training", "data.train_samples")
        _check_both_kinds(log.labels[test], "test", "data.test_samples")
        ids = field_ids(log, self._buckets)
        self.data_name = name
        return ClickSet(ids[train], log.labels[train], ids[test], log.labels[test])

    def train_dataloader(self) -> DataLoader[ClickBatch]:
        """Batches of the training split in random order."""
        self.check_fills_a_step()
        return self._loader(self.splits.train_ids, self.splits.train_labels, train=True)

    def val_dataloader(self) -> DataLoader[ClickBatch]:
        """Batches of the test split."""
        return self._loader(self.splits.test_ids, self.splits.test_labels, train=False)

    def _check_fallback(self) -> None:
        if not self._fallback:
            raise RecipeError(f"there is no Criteo: data.root is not set; {REMEDY}")

    def _loader(self, ids: NDArray[np.int32], labels: NDArray[np.int8], train: bool) -> DataLoader[ClickBatch]:
        size = self.batch_size if train else max(self.batch_size, 1024)
        return whole_batches(Rows((ids, torch.int64), (labels, torch.float32)), size, train)


def _check_both_kinds(labels: NDArray[np.int8], part: str, setting: str) -> None:
    """Refuse samples that are all clicks or all none: they have no AUC."""
    clicks = int(labels.sum())
    if not 0 < clicks < len(labels):
        remedy = f"take more rows ({setting}, data.max_rows, data.test_fraction)"
        raise RecipeError(f"{clicks} of {len(labels)} {part} samples are clicks: AUC needs both kinds; {remedy}")


def _file(root: Path) -> Path:
    """The log that ``root`` names or holds."""
    if not root.exists():
        raise RecipeError(f"data.root={root} does not exist; {REMEDY}")
    if root.is_file():
        if not criteo.is_log(root):
            raise RecipeError(f"data.root={root} is neither .npz nor {', '.join(criteo.TEXT)}; {REMEDY}")
        return root
    logs = sorted(file for file in root.iterdir() if file.is_file() and criteo.is_log(file))
    if len(logs) != 1:
        contents = f"{len(logs)} logs ({', '.join(log.name for log in logs[:5])})" if logs else "no log"
        raise RecipeError(f"data.root={root} holds {contents}; {REMEDY}")
    return logs[0]
