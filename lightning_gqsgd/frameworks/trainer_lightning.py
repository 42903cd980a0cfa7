"""Strategy and callback for the Trainer of ``lightning``."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_gqsgd.frameworks.trainer import TelemetryMixin, TrainerMixin


class GQSGDTelemetry(TelemetryMixin, Callback):
    __doc__ = TelemetryMixin.__doc__


class GQSGDStrategy(TrainerMixin, DDPStrategy):
    __doc__ = TrainerMixin.__doc__

    def _telemetry_callback(self) -> Any:
        return GQSGDTelemetry()

    @staticmethod
    def _rank_zero_info(text: str) -> None:
        rank_zero_info(text)
