"""The Trainer strategy for Ray Train, which starts the processes and knows their ranks and devices."""

from __future__ import annotations

from typing import Any

from ray.train.lightning import RayDDPStrategy

# Ray chooses the flavour of Lightning when it is imported, and both bases have to be of the same flavour.
if any(base.__module__.startswith("lightning.pytorch") for base in RayDDPStrategy.__mro__):
    from lightning_gqsgd.frameworks.trainer_lightning import GQSGDStrategy
else:
    from lightning_gqsgd.frameworks.trainer_pytorch_lightning import GQSGDStrategy

_RayStrategy: Any = RayDDPStrategy


class RayGQSGDStrategy(GQSGDStrategy, _RayStrategy):
    """`GQSGDStrategy` for a Trainer that runs inside a ``ray.train.torch.TorchTrainer``, with the same arguments.

    Ray starts the processes and their process group. So the Trainer needs ``plugins=[RayLightningEnvironment()]`` and
    ``devices="auto"``; `ray.train.lightning.prepare_trainer` checks both.

    Raises:
        ConfigError: for an unknown argument, a value that cannot work, or a communication hook of the user's.
    """
