"""Predictions for several speeds of the machine, of which the one that was there is chosen afterwards.

The speed of a virtual machine that is shared differs from one hour to the next, and a probe does not know that of
later. So a prediction is a table: what a step takes where a step without communication takes so many times as long as
the probe's. When settings are measured, a step without communication takes its turn beside them, and says which place
of the table counts. It exchanges nothing, so it says nothing else of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from lightning_gqsgd.predict.costs import Collective, Costs
from lightning_gqsgd.predict.timeline import Timeline

#: Lengths of a step without communication, over the probe's, for which steps are predicted.
LENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0)


def slower_timeline(line: Timeline, length: float) -> Timeline:
    """Returns a rank's computation on a machine on which it takes ``length`` times as long."""
    buckets = tuple(replace(bucket, ready_s=length * bucket.ready_s) for bucket in line.buckets)
    return replace(
        line,
        buckets=buckets,
        backward_s=length * line.backward_s,
        forward_s=length * line.forward_s,
        update_s=length * line.update_s,
    )


def slower_costs(costs: Costs, length: float) -> Costs:
    """Returns what was probed without a link's limit, on a machine that takes ``length`` times as long for
    everything: kernels, the sequencing thread, and what Gloo and the system do to send."""
    collectives = {name: _slower(cost, length) for name, cost in costs.collectives.items()}
    gammas = {name: gamma.times(length) for name, gamma in costs.gammas.items()}
    return replace(
        costs,
        collectives=collectives,
        gammas=gammas,
        touch_s=length * costs.touch_s,
        launch_s=length * costs.launch_s,
        stage_s=length * costs.stage_s,
    )


def _slower(cost: Collective, length: float) -> Collective:
    return Collective(*(length * getattr(cost, each.name) for each in fields(Collective)))


def at_length(table: Sequence[Sequence[float]], length: float) -> tuple[float, float, float]:
    """Returns the seconds of a step and of its interval's ends at a length between those of `LENGTHS`.

    Args:
        table: for each of `LENGTHS`, these three numbers.
        length: of a step without communication, over the probe's. Beyond the table's ends, the end counts.
    """
    step_s, shortest_s, longest_s = (float(np.interp(length, LENGTHS, column)) for column in zip(*table, strict=True))
    return step_s, shortest_s, longest_s
