"""Strategy and callback for the Trainer of ``pytorch_lightning``."""

from typing import Any

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import rank_zero_info

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
