"""Training without a network: virtual ranks in one process, with the codec, memory and reducer objects of training."""

from lightning_gqsgd.research.simulation.record import Record
from lightning_gqsgd.research.simulation.training import simulate
from lightning_gqsgd.research.simulation.virtual import VirtualRanks, average, relative_error

__all__ = ["Record", "VirtualRanks", "average", "relative_error", "simulate"]
