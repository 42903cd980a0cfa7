"""Quantised gradient all-reduce for Lightning, Accelerate and PyTorch: unbiased, bit-identical on every rank.

Importing the package registers the strategies ``gqsgd``, ``gqsgd_4bit``, ... with Lightning (the Trainer and Fabric of
``lightning`` and of ``pytorch_lightning``), each when it is imported. Nothing else is loaded until it is used.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

from lightning_gqsgd._autoload import flavour, install
from lightning_gqsgd.version import __version__ as __version__

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig, Memory
    from lightning_gqsgd.ddp.functional import all_reduce
    from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
    from lightning_gqsgd.errors import CollectiveError, ConfigError
    from lightning_gqsgd.frameworks.accelerate import GQSGDKwargs
    from lightning_gqsgd.frameworks.distributed_checkpoint import DCPState
    from lightning_gqsgd.frameworks.enable import enable
    from lightning_gqsgd.frameworks.fabric_lightning import GQSGDFabricStrategy
    from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
    from lightning_gqsgd.frameworks.ray import RayGQSGDStrategy
    from lightning_gqsgd.frameworks.trainer_lightning import GQSGDStrategy, GQSGDTelemetry
    from lightning_gqsgd.local_steps.optimizer import LocalSteps
    from lightning_gqsgd.membership.process_group import quantised
    from lightning_gqsgd.presets import PRESETS
    from lightning_gqsgd.reducers.memory import StabilityWarning
    from lightning_gqsgd.research.optim import CMDAdagrad, RDAAdagrad
    from lightning_gqsgd.research.simulation import simulate

    __all__ = [
        "PRESETS",
        "CMDAdagrad",
        "CollectiveError",
        "ConfigError",
        "DCPState",
        "GQSGDConfig",
        "GQSGDFSDPState",
        "GQSGDFabricStrategy",
        "GQSGDKwargs",
        "GQSGDState",
        "GQSGDStrategy",
        "GQSGDTelemetry",
        "LocalSteps",
        "Memory",
        "RDAAdagrad",
        "RayGQSGDStrategy",
        "StabilityWarning",
        "all_reduce",
        "enable",
        "quantised",
        "register_gqsgd",
        "register_gqsgd_fsdp",
        "simulate",
    ]

_HOMES = {
    "CMDAdagrad": "research.optim",
    "CollectiveError": "errors",
    "ConfigError": "errors",
    "DCPState": "frameworks.distributed_checkpoint",
    "GQSGDConfig": "config",
    "GQSGDFSDPState": "frameworks.fsdp",
    "GQSGDKwargs": "frameworks.accelerate",
    "GQSGDState": "ddp.hook",
    "LocalSteps": "local_steps.optimizer",
    "Memory": "spec.memories",
    "PRESETS": "presets",
    "RDAAdagrad": "research.optim",
    "RayGQSGDStrategy": "frameworks.ray",
    "StabilityWarning": "reducers.memory",
    "all_reduce": "ddp.functional",
    "enable": "frameworks.enable",
    "quantised": "membership.process_group",
    "register_gqsgd": "ddp.hook",
    "register_gqsgd_fsdp": "frameworks.fsdp",
    "simulate": "research.simulation",
}

_NAMES = (*_HOMES, "GQSGDFabricStrategy", "GQSGDStrategy", "GQSGDTelemetry")

#: The packages that bring a module, as the extras of pyproject.toml have them (a test compares). PyPI does not have our
#: own name and its extras.
_BRINGS = {
    "accelerate": "accelerate>=1.10",
    "lightning": "lightning>=2.5,!=2.6.2,!=2.6.3",
    "lightning_fabric": "lightning>=2.5,!=2.6.2,!=2.6.3",
    "pytorch_lightning": "lightning>=2.5,!=2.6.2,!=2.6.3",
    "ray": "ray[train]>=2.40",
    "torchft": "torchft>=0.2",
    "transformers": "transformers>=5.4",
}

install()


def __getattr__(name: str) -> Any:
    if name == "__all__":  # a star import loads every name of it, and should not need every optional package
        return [each for each in _NAMES if _loads(each)]
    if name in ("GQSGDStrategy", "GQSGDTelemetry"):
        home = f"frameworks.{flavour('lightning.pytorch', 'pytorch_lightning')}"
    elif name == "GQSGDFabricStrategy":
        home = f"frameworks.{flavour('lightning.fabric', 'lightning_fabric')}"
    elif name in _HOMES:
        home = _HOMES[name]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _BRINGS:
            raise
        package = re.split(r"[^a-z]", _BRINGS[missing], maxsplit=1)[0]
        raise ImportError(
            f"{name} needs {package}, which is not installed: pip install '{_BRINGS[missing]}'",
            name=error.name,
        ) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES})


def _loads(name: str) -> bool:
    """Returns whether the packages that a name needs are installed."""
    try:
        __getattr__(name)
    except ImportError:
        return False
    return True
