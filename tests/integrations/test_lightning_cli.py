"""LightningCLI: the strategy from the command line and from YAML."""

from __future__ import annotations

import re
import warnings
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_gqsgd.config import ConfigError, GQSGDConfig, Memory
from tests.distributed.ranks import run

OBJECT = """
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_gqsgd.GQSGDStrategy
    init_args:
      bits: 4
      block_size: 128
      exclude: ["*.bias"]
      memory: {alpha: 0.5, beta: 1.0, rho: 0.0}
      dither: stochastic
    dict_kwargs:
      find_unused_parameters: true
      bucket_cap_mb: 5
      timeout: 5min
"""
pytestmark = [  # LightningCLI on the jsonargparse of the day
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DEVICES = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]


def strategy_of(*arguments: str):
    """The strategy that a command line makes, with nothing run."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    return LightningCLI(BoringModel, BoringDataModule, run=False, args=[*DEVICES, *arguments]).trainer.strategy


def test_a_name() -> None:
    assert strategy_of("--trainer.strategy=gqsgd_4bit").gqsgd_config == GQSGDConfig(bits=4)


def test_an_object_from_the_command_line() -> None:
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", "--trainer.strategy.bits=3")
    assert strategy.gqsgd_config == GQSGDConfig(bits=3)
    noise = ("--trainer.strategy.bits=auto", "--trainer.strategy.max_slowdown=0.1")
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", *noise)
    assert strategy.gqsgd_config == GQSGDConfig(bits="auto", max_slowdown=0.1)
    by_name = '--trainer.strategy.bits={"*": 4, "*.head.*": 8}'
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", by_name)
    assert strategy.gqsgd_config == GQSGDConfig(bits={"*": 4, "*.head.*": 8})
    decided = '--trainer.strategy.auto={"step": 70, "bits": 4, "seconds": {"4": 0.01}, "reason": "first trial"}'
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", decided)
    assert strategy.gqsgd_config == GQSGDConfig(bits=4)
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", "--trainer.strategy.preset=dore")
    assert strategy.gqsgd_config.codec == "linear"
    assert strategy.gqsgd_config.memory_down != "none"


def test_an_object_from_yaml(tmp_path: Path) -> None:
    from lightning_gqsgd import GQSGDStrategy

    file = tmp_path / "strategy.yaml"
    file.write_text(OBJECT)
    strategy = strategy_of(f"--config={file}")
    memory = Memory(0.5, 1.0, 0.0)
    assert strategy.gqsgd_config == GQSGDConfig(
        bits=4, block_size=128, exclude=("*.bias",), memory=memory, dither="stochastic"
    )
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 5}
    assert strategy._timeout == timedelta(minutes=5)
    for wrong in (60, "soon"):
        with pytest.raises(ConfigError, match=f"timeout='{wrong}' is not a time: write a number and a unit"):
            GQSGDStrategy(timeout=wrong)


def test_help_has_every_argument_with_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategy_of("--trainer.strategy.help=lightning_gqsgd.GQSGDStrategy")
    said = " ".join(capsys.readouterr().out.split())
    assert "--trainer.strategy.bits BITS" in said.replace("init_args.", "")
    assert "Union[int, Literal['auto'], dict[str, int], null]" in said
    for name in (*GQSGDConfig.field_names(), "local_steps", "rule", "telemetry", "validate_at"):
        assert re.search(rf"--trainer\.strategy\.(init_args\.)?{name} ", said), name


def test_a_wrong_value_is_the_parsers_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", "--trainer.strategy.bits=many")
    assert "bits" in capsys.readouterr().err


def fit(_: int, *arguments: str) -> tuple[str, int, int]:
    """The hook that a command line installs, its steps, and its bits."""
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    hooks = []

    class Model(BoringModel):
        def on_train_end(self) -> None:
            hooks.append(self.trainer.strategy.model._get_ddp_logging_data()["comm_hook"])

    warnings.simplefilter("ignore")
    arguments = ("fit", *DEVICES, *arguments)
    strategy = LightningCLI(Model, BoringDataModule, args=[*arguments], save_config_callback=None).trainer.strategy
    return hooks[0], strategy.gqsgd_state.step, strategy.gqsgd_config.bits


@pytest.mark.slow
def test_fit(tmp_path: Path) -> None:
    by_name = ["--trainer.strategy=gqsgd_4bit", "--trainer.max_steps=2", "--trainer.enable_checkpointing=false"]
    assert run(fit, 2, tmp_path, *by_name, initialise=False) == [("gqsgd_hook", 2, 4)] * 2
    file = tmp_path / "strategy.yaml"
    file.write_text(OBJECT)
    assert run(fit, 2, tmp_path, f"--config={file}", initialise=False) == [("gqsgd_hook", 2, 4)] * 2
