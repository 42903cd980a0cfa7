"""The interval around a predicted step, which is meant to contain nine of ten measured steps.

Its ends are the predictions at the ends of what is known of the network (`tcp.Terms`), times the shares by which
measured steps of the package's own benchmarks differ from predicted ones. There, computation and network had been
measured before, so these shares are what the model of a step leaves out.
"""

from __future__ import annotations

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.predict.costs import Costs
from lightning_gqsgd.predict.model import predict
from lightning_gqsgd.predict.timeline import Timeline

#: Measured over predicted steps: the 3rd and the 97th of a hundred, of the 64 settings of ``benchmarks/prediction.py``.
SHORTEST = 0.972
LONGEST = 1.16

#: Seconds of the least and the most that a step is expected to take.
Interval = tuple[float, float]


def interval(timeline: Timeline, costs: Costs, ranks: int, method: GQSGDConfig | str) -> Interval:
    """Returns the interval of a step in seconds; see `model.predict` for the arguments and errors."""
    if costs.terms is None:
        step_s = predict(timeline, costs, ranks, method).step_s
        return SHORTEST * step_s, LONGEST * step_s
    least, most = (costs.at(factors) for factors in (costs.terms.least, costs.terms.most))
    return (
        SHORTEST * predict(timeline, least, ranks, method).step_s,
        LONGEST * predict(timeline, most, ranks, method).step_s,
    )
