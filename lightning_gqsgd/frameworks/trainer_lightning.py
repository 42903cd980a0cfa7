"""Strategy and callback for the Trainer of ``lightning``."""

from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_gqsgd.frameworks.trainer import SettlingMixin, TelemetryMixin, TrainerMixin


class GQSGDTelemetry(TelemetryMixin, Callback):
    __doc__ = TelemetryMixin.__doc__


class GQSGDSettling(SettlingMixin, Callback):
    __doc__ = SettlingMixin.__doc__


class GQSGDStrategy(TrainerMixin, DDPStrategy):
    __doc__ = TrainerMixin.__doc__
    _telemetry = GQSGDTelemetry
    _settling = GQSGDSettling
    _rank_zero_info = staticmethod(rank_zero_info)
