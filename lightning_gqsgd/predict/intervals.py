"""The interval around a predicted step that should contain nine of ten measured steps.

Its ends are predictions with the smallest and the largest terms of the network (`tcp.Terms`), multiplied by the ratios
of measured to predicted steps in the package's own benchmarks. In these benchmarks, computation and network were
measured beforehand, so the ratios show the effects that the model leaves out.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_gqsgd.predict.costs import Costs

#: Measured over predicted steps: the 3rd and the 97th percentile over the 64 settings of ``benchmarks/prediction.py``.
SHORTEST = 0.972
LONGEST = 1.16

#: The shortest and the longest expected duration of a step, in seconds.
Interval = tuple[float, float]


def interval(costs: Costs, step_at: Callable[[Costs], float]) -> Interval:
    """Returns the interval of a step in seconds; ``step_at`` returns the predicted seconds of the step at given
    costs."""
    if costs.terms is None:
        step_s = step_at(costs)
        return SHORTEST * step_s, LONGEST * step_s
    return SHORTEST * step_at(costs.at(costs.terms.least)), LONGEST * step_at(costs.at(costs.terms.most))
