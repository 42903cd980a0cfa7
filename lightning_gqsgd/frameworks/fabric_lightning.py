"""Strategy for the Fabric of ``lightning``."""

from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities import rank_zero_info

from lightning_gqsgd.frameworks.fabric import FabricMixin


class GQSGDFabricStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__
    _rank_zero_info = staticmethod(rank_zero_info)
