"""How long a training step takes: a model of it, and the measurements that the model needs.

The model runs the package's own reducers on a virtual clock. Nothing in the core imports this package.
"""

from lightning_gqsgd.performance.clock import Event
from lightning_gqsgd.performance.costs import Collective, Costs, Gamma, Link, collectives_between
from lightning_gqsgd.performance.model import Prediction, predict
from lightning_gqsgd.performance.timeline import Bucket, Timeline, estimated

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
