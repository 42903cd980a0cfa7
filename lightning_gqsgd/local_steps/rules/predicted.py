"""Predictive coding: ranks send the difference between a change and a prediction that all ranks can make (arXiv
2108.00918).

The next mean change is predicted from the mean changes so far, which all ranks know, by the formulas of the released
code, KAI-YUE/Predictive-Coding-FL: zero, i.e. the previous model; the mean of the last three changes; and η m / (√v +
1e-4), with moving averages m and v of changes and of their squares, of weights 0.8 and 0.9 and η = 1e-3. For each
tensor, a rank takes the prediction that is nearest to its change in l2 norm, and sends

    r = Δ - prediction,

by the codec of the configuration, and also, uncompressed, which prediction it used. The mean change is the mean of all
r and of all predictions. The released code also learns an autoregression, and chooses between two scales by a
rate-distortion rule; both are left out here. With an entropy coder, good predictions leave few bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.rules.base import Averager, MeanOf, Rule, RuleRequests

if TYPE_CHECKING:
    from lightning_gqsgd.local_steps.fragments import Bundle

#: Mean changes that the second prediction averages.
_LAST = 3
#: Weights of the moving averages of changes and of their squares, and the step η of the third prediction.
_WEIGHTS = (0.8, 0.9)
_STEP = 1e-3
#: Number of predictions.
_PREDICTIONS = 3


@dataclass(frozen=True)
class Predicted(Rule):
    """Rule of predictive coding; see the module's docstring."""

    remembers: ClassVar[bool] = True

    def averager(self, bundle: Bundle, ranks: int) -> Averager:
        return _PredictedAverager(bundle)


class _PredictedAverager(Averager):
    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        self._sizes = [segment.numel for segment in bundle.segments]
        # The number of a parameter that no model has, for the chosen predictions.
        told = Segment(2**31 - 1 - bundle.segments[0].parameter, len(self._sizes) * _PREDICTIONS, raw=True)
        self._segments = (*bundle.segments, told)
        like = bundle.flat_anchors()
        self._last = torch.zeros(_LAST, *like.shape, dtype=like.dtype, device=like.device)
        self._count = torch.zeros((), dtype=torch.int64, device="cpu")
        self._averages = torch.zeros(2, *like.shape, dtype=like.dtype, device=like.device)

    def state(self) -> dict[str, Tensor]:
        """Returns the memory by name: the last mean changes, their number, and moving averages."""
        return {"last": self._last, "count": self._count, "averages": self._averages}

    def requests(self, change: Tensor) -> RuleRequests:
        predictions = self._predictions()
        parts = [prediction.split(self._sizes) for prediction in predictions]
        wanted = change.split(self._sizes)
        chosen = torch.zeros(len(self._sizes), _PREDICTIONS, dtype=change.dtype, device=change.device)
        residual = torch.empty_like(change)
        for number, part in enumerate(residual.split(self._sizes)):
            distances = torch.stack([(wanted[number] - row[number]).norm() for row in parts])
            best = int(distances.argmin())
            chosen[number, best] = 1
            torch.sub(wanted[number], parts[best][number], out=part)
        answer = yield MeanOf(torch.cat([residual, chosen.flatten()]), self._segments)
        mean, shares = answer.split([change.numel(), chosen.numel()])
        mean = mean.clone()
        for number, part in enumerate(mean.split(self._sizes)):
            for share, row in zip(shares.view(chosen.shape)[number], parts, strict=True):
                part += share * row[number]
        if bool(mean.isfinite().all()):
            self._remember(mean)
        return mean

    def _predictions(self) -> list[Tensor]:
        """Returns the predictions of the next mean change, each [numel]."""
        known = min(int(self._count), _LAST)
        first, second = self._averages
        corrected = [1 - weight ** int(self._count) for weight in _WEIGHTS] if known else [1.0, 1.0]
        step = _STEP * (first / corrected[0]) / ((second / corrected[1]).sqrt() + 1e-4)
        return [torch.zeros_like(first), self._last.sum(0) / max(known, 1), step]

    def _remember(self, mean: Tensor) -> None:
        self._last.copy_(torch.cat([mean[None], self._last[:-1]]))
        for average, weight, value in zip(self._averages, _WEIGHTS, (mean, mean.square()), strict=True):
            average.mul_(weight).add_(value, alpha=1 - weight)
        self._count += 1
