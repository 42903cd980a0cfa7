"""The reducers on virtual ranks in one process: what a configuration does to given gradients, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.layout import Segment, cut, pieces
from lightning_gqsgd.plan import check_gradient
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import REDUCERS, Setting, StepKeys, resolve, run_virtual


def average(
    gradients: Sequence[Tensor],
    *,
    step: int = 0,
    segments: Sequence[Segment] | None = None,
    preset: str | None = None,
    **fields: Any,
) -> list[Tensor]:
    """What each rank would hold after reducing its gradient, by the same codec and reducer objects as in training.

    Args:
        gradients: one flat floating-point tensor per rank, all of one shape, dtype and device; not changed.
        step: number of the dither.
        segments: the parameters in a gradient, in order; None takes it as one compressed parameter.
        preset: name of a preset; see `presets.PRESETS`.
        **fields: fields of `GQSGDConfig`.

    Returns:
        One tensor per rank, all with the same bits.

    Raises:
        ConfigError: gradients or a configuration that cannot work.
    """
    _check(gradients)
    config, ranks, first = make_config(preset, **fields), len(gradients), gradients[0]
    config = resolve(config, ranks)
    setting, keys = Setting(config, ranks, first.dtype), StepKeys.of(config, step, ranks)
    results = [one.clone() for one in gradients]
    for table in pieces(cut(segments or [Segment(0, first.numel(), raw=False)], config.block_size)):
        piece = REDUCERS[config.reducer](table, setting)
        run_virtual([piece.steps(x, rank, keys) for rank, x in enumerate(results)])
    return results


def relative_error(estimate: Tensor, gradients: Sequence[Tensor]) -> float:
    """Relative L2 error of an estimate against the exact mean of the gradients."""
    mean = torch.stack([one.double() for one in gradients]).mean(0)
    return float((estimate.double() - mean).norm() / mean.norm())


def _check(gradients: Sequence[Tensor]) -> None:
    if not gradients:
        raise ConfigError("no gradients were given; give one flat tensor per rank")
    for rank, one in enumerate(gradients):
        check_gradient(one, f"the gradient of rank {rank}")
        kind, expected = ((g.shape, g.dtype, g.device) for g in (one, gradients[0]))
        if one.ndim != 1 or kind != expected:
            raise ConfigError(
                f"the gradient of rank {rank} is {tuple(one.shape)} {one.dtype} on {one.device}, that of rank 0 "
                f"{tuple(gradients[0].shape)} {gradients[0].dtype} on {gradients[0].device}; "
                "give flat tensors of one shape, dtype and device"
            )
