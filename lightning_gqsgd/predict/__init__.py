"""A model of how long a training step takes, and the measurements that it needs.

The model runs the package's own reducers on a virtual clock.
"""

from lightning_gqsgd.predict.clock import Event
from lightning_gqsgd.predict.costs import Collective, Costs, Gamma, Link, collectives_between
from lightning_gqsgd.predict.model import Prediction, predict
from lightning_gqsgd.predict.timeline import Bucket, Timeline, estimated

__all__ = [
    "Bucket",
    "Collective",
    "Costs",
    "Event",
    "Gamma",
    "Link",
    "Prediction",
    "Timeline",
    "collectives_between",
    "estimated",
    "predict",
]
