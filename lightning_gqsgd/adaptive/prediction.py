"""Predicts the duration of steps at other numbers of bits from measured steps of the training.

The performance model (`predict.model`) needs a rank's computing time and the costs of the link and the codec.
`predicted_steps` derives all of them from measured steps:

* Steps at 32 bits give the duration of a step, the time from its first to its last bucket, and the time in which it
  waits for gradients. The rest of the step is computation. The cost β of a byte on the link is chosen so that the
  model's step of 32 bits takes as long as the measured one.
* Steps at one number of bits with codes give the cost of the codec: the processor-seconds γ per coordinate at which the
  model's step takes as long as the measured one. Before there is such a step, γ is 0, and predictions with codes are
  lower bounds.

The model uses a few equal buckets instead of the real ones, and each of their coordinates stands for several real
coordinates. So a prediction takes milliseconds. Starting a collective is free in this model, and one β holds for all
collectives. `hierarchical` uses two links, so there is no prediction for it.

All inputs are known to all ranks, and nothing is random, so all ranks make the same predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from lightning_gqsgd.codecs.floats.codec import REDUCER_OF_BITS
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.costs import KINDS, Collective, Costs, Gamma
from lightning_gqsgd.predict.device_times import codec_of_config
from lightning_gqsgd.predict.model import Prediction, predict
from lightning_gqsgd.predict.timeline import Bucket, Timeline

#: Buckets of the model, and coordinates of each; a bucket is one piece.
BUCKETS = 4
BUCKET_NUMEL = 1 << 16
#: Halvings of the interval in which a cost is searched. The cost is accurate to 2^-20 of the largest possible cost.
_HALVINGS = 20


class Measured(NamedTuple):
    """Medians over steps at one number of bits, in seconds.

    Attributes:
        step_s: from a step's first bucket to the first bucket of the next step, on the slowest rank.
        exposed_s: waiting for the last gradients, on the rank that waits least; NaN if unknown.
        backward_s: from the first bucket to the last one, on the rank that takes longest.
    """

    step_s: float
    exposed_s: float
    backward_s: float


def predicted_steps(
    candidates: Mapping[int, GQSGDConfig], ranks: int, measured: Mapping[int, Measured]
) -> dict[int, float | None]:
    """Returns the predicted seconds of a step at every number of bits; None if there is no prediction.

    Args:
        candidates: the configurations by their bits, with the chosen reducers.
        ranks: number of ranks.
        measured: the medians of the numbers of bits that were measured so far.
    """
    nothing: dict[int, float | None] = dict.fromkeys(candidates)
    base = measured.get(32)
    if base is None or not base.exposed_s >= 0 or any(c.node_size for c in candidates.values()):
        return nothing
    wait_s = min(base.exposed_s, base.step_s)
    backward_s = min(base.backward_s, base.step_s - wait_s)
    model = _Model(candidates, ranks, base.step_s - wait_s, backward_s)
    # A step of 32 bits takes longer with this cost of a byte, even if part of the exchange is hidden.
    most_s = 2 * base.step_s / model.predicted(32, 0.0, 0.0).sent_bytes
    beta_s = _solved(lambda beta: model.predicted(32, beta, 0.0).step_s - base.step_s, most_s)
    gamma_s = 0.0
    coded = [bits for bits in measured if bits not in REDUCER_OF_BITS]
    if coded:
        bits = min(coded)  # the fewest bytes, so that the codec has the largest part of the step
        step_s = measured[bits].step_s
        gamma_s = _solved(lambda gamma: model.predicted(bits, beta_s, gamma).step_s - step_s, step_s / model.numel)
    return {bits: model.predicted(bits, beta_s, gamma_s).step_s for bits in candidates}


class _Model:
    """Steps of the performance model.

    Args:
        candidates: see `predicted_steps`.
        ranks: number of ranks.
        compute_s: seconds of a step without waiting.
        backward_s: the part of these seconds from the first bucket to the last one.
    """

    def __init__(self, candidates: Mapping[int, GQSGDConfig], ranks: int, compute_s: float, backward_s: float) -> None:
        self._candidates = {bits: replace(config, sample_every=0) for bits, config in candidates.items()}
        self._ranks = ranks
        self.numel = BUCKETS * BUCKET_NUMEL
        segments = (Segment(0, BUCKET_NUMEL, False),)
        ready = [backward_s * number / (BUCKETS - 1) for number in range(BUCKETS)]
        buckets = tuple(Bucket(segments, ready_s) for ready_s in ready)
        self._timeline = Timeline(buckets, backward_s, max(0.0, compute_s - backward_s))
        self._codecs = [codec_of_config(config) for bits, config in candidates.items() if bits not in REDUCER_OF_BITS]

    def predicted(self, bits: int, beta_s: float, gamma_s: float) -> Prediction:
        """Returns the prediction of a step, given the costs of a byte and of a coordinate of codes."""
        collectives = {f"all {kind}": Collective(0.0, beta_s) for kind in KINDS}
        gammas = dict.fromkeys(self._codecs, Gamma(gamma_s, gamma_s, gamma_s))
        costs = Costs(collectives, gammas, source="the training's own steps")
        return predict(self._timeline, costs, self._ranks, self._candidates[bits])


def _solved(excess: Callable[[float], float], most: float) -> float:
    """Returns the root of an increasing function between 0 and ``most``, by bisection; if there is none, the nearer
    end."""
    if excess(0.0) >= 0 or most <= 0:
        return 0.0
    low = 0.0
    high = most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return (low + high) / 2
