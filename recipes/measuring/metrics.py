"""The metrics that tasks are judged by."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric of a validation: its names in logs, and how tables and plots write its values.

    Attributes:
        key: last part of its name in logs: ``val/KEY``.
        label: what tables and plots call it.
        higher_is_better: whether the best value is the largest.
        percent: whether a value, 0 to 1, is written in per cent.
        digits: number of digits after the point when a value is written.
        is_bounded: whether values are 0 to 1 where higher is better, and else above 0: targets outside are refused.
    """

    key: str
    label: str
    higher_is_better: bool = True
    percent: bool = False
    digits: int = 2
    is_bounded: bool = False

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Metric:
        """The metric that a ``result.json`` describes; earlier versions have written the key only."""
        return cls(**facts["judged_by"]) if "judged_by" in facts else METRICS[facts["metric"]]

    @property
    def train(self) -> str:
        """Name of the value on a training batch."""
        return f"train/{self.key}"

    @property
    def val(self) -> str:
        """Name of the value of a validation."""
        return f"val/{self.key}"

    @property
    def test(self) -> str:
        """Name of the value of the final test."""
        return f"test/{self.key}"

    @property
    def file(self) -> str:
        """The label as the beginning of a file's name."""
        return re.sub(r"[^\w.+-]+", "-", self.label.lower()).strip("-")

    @property
    def heading(self) -> str:
        """The label with its unit, for the head of a column."""
        return f"{self.label} (%)" if self.percent else self.label

    def of_run(self, logged: Mapping[str, Any]) -> Any:
        """The final value among all that a run has logged: that of the test, or of the last validation; else None."""
        return logged.get(self.test, logged.get(self.val))

    def text(self, value: float, digits: int | None = None) -> str:
        """A value as it is written below `heading`; a dash for NaN."""
        if math.isnan(value):
            return "–"
        shown = 100 * value if self.percent else value
        return f"{shown:,.{self.digits if digits is None else digits}f}"

    def shown(self, value: float, digits: int | None = None) -> str:
        """A value with its unit, e.g. ``97.78 %``, for lines of text."""
        return self.text(value, digits) + (" %" if self.percent else "")

    def reached(self, value: float, target: float) -> bool:
        """Whether ``value`` is at least as good as ``target``."""
        return value >= target if self.higher_is_better else value <= target

    def worst_first(self, values: list[float]) -> list[float]:
        """The values from the worst to the best."""
        return sorted(values, reverse=not self.higher_is_better)

    def is_possible(self, value: float) -> bool:
        """Whether the metric can take a value, see `is_bounded`."""
        if not self.is_bounded:
            return math.isfinite(value)
        return 0 < value <= 1 if self.higher_is_better else 0 < value < math.inf


ACCURACY = Metric("acc", "accuracy", percent=True, is_bounded=True)
PERPLEXITY = Metric("perplexity", "perplexity", higher_is_better=False, is_bounded=True)
AUC = Metric("auc", "AUC", digits=4, is_bounded=True)

#: The loss of a validation, as a metric that curves can show.
LOSS = Metric("loss", "loss", higher_is_better=False, digits=4)

METRICS = {metric.key: metric for metric in (ACCURACY, PERPLEXITY, AUC)}
