"""Reducers on virtual ranks, for tests of numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.layout import Segment, cut, pieces
from lightning_gqsgd.reducers import REDUCERS, Setting, StepKeys, choose_reducer, run_virtual


def average(
    gradients: Sequence[Tensor], step: int = 0, segments: Sequence[Segment] | None = None, **fields: object
) -> list[Tensor]:
    """What each rank holds after reducing its gradient."""
    config = GQSGDConfig(**{"min_numel": 0, **fields})  # type: ignore[arg-type]
    ranks = len(gradients)
    config = GQSGDConfig(**{**config.to_dict(), "reducer": choose_reducer(config, ranks), "scale": "auto"})
    segments = segments or [Segment(0, gradients[0].numel(), False)]
    setting = Setting(config, ranks, gradients[0].dtype)
    keys = StepKeys.of(config, step, ranks)
    results = [one.clone() for one in gradients]
    for table in pieces(cut(segments, config.block_size)):
        piece = REDUCERS[config.reducer](table, setting)
        run_virtual([piece.steps(x, rank, keys) for rank, x in enumerate(results)])
    return results


def relative_error(estimate: Tensor, gradients: Sequence[Tensor]) -> float:
    """Relative L2 error against the exact mean."""
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    return float((estimate.double() - mean).norm() / mean.norm())
