"""Strategy and callback for the Trainer of ``pytorch_lightning``."""

from pytorch_lightning import Callback
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.utilities import rank_zero_info

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
