"""Strategy for the Fabric of ``lightning_fabric``."""

from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.utilities import rank_zero_info

from lightning_gqsgd.frameworks.fabric import FabricMixin


class GQSGDFabricStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__
    _rank_zero_info = staticmethod(rank_zero_info)
