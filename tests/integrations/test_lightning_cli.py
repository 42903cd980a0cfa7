"""LightningCLI: the strategy from the command line and from YAML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gqsgd.config import GQSGDConfig, Memory

SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def on_train_end(self):
        wrapped = self.trainer.strategy.model
        assert wrapped._get_ddp_logging_data()["comm_hook"] == "gqsgd_hook"
        state = self.trainer.strategy.gqsgd_state
        print(f"step {state.step} at {state.config.bits} bits\\n", end="")  # one write

if __name__ == "__main__":
    LightningCLI(Model, BoringDataModule)
"""

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
    strategy = strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", "--trainer.strategy.preset=dore")
    assert strategy.gqsgd_config.codec == "linear"
    assert strategy.gqsgd_config.memory_down != "none"


def test_an_object_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    file.write_text(OBJECT)
    strategy = strategy_of(f"--config={file}")
    memory = Memory(0.5, 1.0, 0.0)
    assert strategy.gqsgd_config == GQSGDConfig(
        bits=4, block_size=128, exclude=("*.bias",), memory=memory, dither="stochastic"
    )
    assert strategy._ddp_kwargs == {"find_unused_parameters": True, "bucket_cap_mb": 5}


def test_a_wrong_value_is_the_parsers_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        strategy_of("--trainer.strategy=lightning_gqsgd.GQSGDStrategy", "--trainer.strategy.bits=many")
    assert "bits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--trainer.strategy=gqsgd_4bit", "--trainer.max_steps=2"], ["--config=strategy.yaml"]]
)
def test_fit(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "strategy.yaml").write_text(OBJECT)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "script.py", "fit", *DEVICES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 2 at 4 bits") == 2
