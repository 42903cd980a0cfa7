"""Strategy for the Fabric of ``lightning_fabric``."""

from lightning_fabric.strategies import DDPStrategy
from lightning_fabric.utilities import rank_zero_info

from lightning_gqsgd.integrations.fabric import FabricMixin


class GQSGDFabricStrategy(FabricMixin, DDPStrategy):
    __doc__ = FabricMixin.__doc__

    def _rank_zero_info(self, text: str) -> None:
        rank_zero_info(text)
