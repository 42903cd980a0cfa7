"""Ray Train: two workers of one machine, each with Lightning's Trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bits import bits_of
from tests.processes import ended_well

pytest.importorskip("ray", reason="needs the extra ray")

PROGRAM = """
import sys
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from tests.integrations.test_ray import train

folder = sys.argv[1]
TorchTrainer(
    train,
    train_loop_config={"folder": folder},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=folder + "/ray"),
).fit()
"""


def train(config: dict[str, str]) -> None:
    """On a worker: fit for three steps on its own data; writes what this rank ended with."""
    import torch
    from lightning.pytorch import Trainer, seed_everything
    from lightning.pytorch.demos.boring_classes import BoringModel
    from ray.train.lightning import RayLightningEnvironment, prepare_trainer

    from lightning_gqsgd import RayGQSGDStrategy

    seed_everything(0)
    model = BoringModel()
    model.layer = torch.nn.Linear(32, 256)
    trainer = Trainer(
        strategy=RayGQSGDStrategy(bits=4, find_unused_parameters=True),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        devices="auto",
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    prepare_trainer(trainer).fit(model)
    state = trainer.strategy.gqsgd_state
    result = {
        "world_size": trainer.world_size,
        "steps": state.step,
        "bits": state.config.bits,
        "parameters": bits_of(model.parameters()),
    }
    (Path(config["folder"]) / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_two_workers_compress_and_end_with_the_same_bits(tmp_path: Path) -> None:
    done = ended_well(
        "-c",
        PROGRAM,
        str(tmp_path),
        timeout=280,
        cwd=Path(__file__).parents[2],
    )
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert (first["world_size"], first["steps"], first["bits"]) == (2, 3, 4)
    assert "8,192 gradient values in 1 tensor at 4 bits" in done.stdout + done.stderr


@pytest.mark.slow  # imports Ray and Lightning
def test_the_strategy_is_one_that_ray_accepts_and_has_all_fields() -> None:
    from ray.train.lightning import RayDDPStrategy

    from lightning_gqsgd import ConfigError, GQSGDConfig, GQSGDStrategy, RayGQSGDStrategy

    assert issubclass(RayGQSGDStrategy, RayDDPStrategy)
    assert issubclass(RayGQSGDStrategy, GQSGDStrategy)
    assert RayGQSGDStrategy("dore").gqsgd_config == GQSGDStrategy("dore").gqsgd_config
    assert RayGQSGDStrategy(bits=4).gqsgd_config == GQSGDConfig(bits=4)
    with pytest.raises(ConfigError, match="RayGQSGDStrategy.*bitz"):
        RayGQSGDStrategy(bitz=4)
