"""TensorBoard event files, with losses and the task's metric against training time as well."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from recipes.loggers.labels import Labels
from recipes.measuring import names
from recipes.measuring.metrics import Metric


class TimedTensorBoardLogger(TensorBoardLogger):
    """Gives losses and the task's metric a second tag, ``time/val_acc``, whose step is the milliseconds of training.

    TensorBoard itself cannot plot one metric against another.

    Args:
        folder: folder of the run; the events are written below its folder ``tensorboard``.
        metric: what the task is judged by.
    """

    def __init__(self, folder: str, metric: Metric) -> None:
        super().__init__(folder, name="tensorboard", version="", default_hp_metric=False)
        self._metric = metric

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write all metrics under their own tags, and some of them against training time."""
        super().log_metrics(metrics, step)
        if names.TRAIN_TIME not in metrics:
            return
        milliseconds = int(1000 * metrics[names.TRAIN_TIME])
        for name in (names.TRAIN_LOSS, names.VAL_LOSS, self._metric.val, self._metric.test):
            if name in metrics:
                self.experiment.add_scalar(f"time/{name.replace('/', '_')}", metrics[name], milliseconds)


def tensorboard_logger(folder: str, labels: Labels, metric: Metric) -> TimedTensorBoardLogger:
    """The logger of ``logger=tensorboard``; event files have no place for ``labels``."""
    return TimedTensorBoardLogger(folder, metric)
