"""The CSV file of a run, which goes on where the file of an interrupted run ends."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger


class ContinuedCSVLogger(CSVLogger):
    """Writes ``metrics.csv``, which begins with the rows of the run that this run resumes.

    Args:
        folder: where the file is written.
        earlier: file of the resumed run, which may be the same file; None for a new run.
        before_step: optimizer step at which the run resumes. Earlier rows from this step on are left out, because
            these steps are trained again.
    """

    def __init__(self, folder: Path, earlier: Path | None = None, before_step: int = 0) -> None:
        super().__init__(str(folder), name=None, version="")
        self._earlier, self._before_step = earlier, before_step

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Lightning's writer of the file."""
        if self._experiment is None:
            rows = _rows_before(self._earlier, self._before_step) if self._earlier else []
            with warnings.catch_warnings():
                # Lightning warns that the folder is not empty: Hydra's files are in it, and perhaps an earlier
                # metrics.csv, whose rows have been read above and are written again.
                warnings.simplefilter("ignore")
                writer: Any = super().experiment
            writer.metrics.extend(rows)
        return self._experiment


def _rows_before(file: Path, step: int) -> list[dict[str, str]]:
    if not file.exists():
        return []
    # A run that was killed, or that found no room on the disk, may have left a part of its last line.
    lines = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    rows = [row for row in csv.DictReader(lines) if int(row["step"]) < step]
    return [{name: value for name, value in row.items() if value != ""} for row in rows]
