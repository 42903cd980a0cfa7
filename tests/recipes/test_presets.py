"""Training under the presets of the literature, in real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.comparison.results import Run
from recipes.tasks import names
from tests.recipes.conftest import TINY, run_script


def _trained(folder: Path, *overrides: str, timeout: float = 150) -> dict[str, Any]:
    """Contents of ``result.json``."""
    finished = run_script("run.py", *overrides, f"hydra.run.dir={folder}", cwd=folder.parent, timeout=timeout)
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
    facts: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return facts


@pytest.mark.parametrize(
    ("preset", "remembered", "message_bits"),
    [
        ("signsgd_ef", {"up_error", "down_error"}, (1, 2)),
        ("cd_adam", {"up_reference", "up_mean", "down_reference"}, (1, 2)),
        ("topk_ef", {"up_error"}, (0.48, 2)),
    ],
)
def test_presets_with_memory_train_and_save_it(
    tmp_path: Path, preset: str, remembered: set[str], message_bits: tuple[float, float]
) -> None:
    # Wide enough for parameters that are compressed.
    run = tmp_path / "run"
    facts = _trained(run, *TINY, f"strategy={preset}", "model.width=16", "trainer.max_epochs=1", "data.batch_size=16")
    assert (facts["processes"], facts["steps"]) == (2, 3)
    assert facts["metrics"][names.TRAIN_LOSS] < 10
    read = Run.load(run)
    assert message_bits[0] < read.message_bits < message_bits[1]
    assert 0.3 < read.rel_l2 < 3
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["gqsgd"]
    assert set(saved["memory"]) == remembered
    assert {
        len(rows) for rows in saved["memory"]["up_" + ("reference" if preset == "cd_adam" else "error")].values()
    } == {2}


LEARNING = ("+exp=quickstart", "trainer.devices=4", "checkpoint=false")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Test accuracy of plain DDP."""
    facts = _trained(tmp_path_factory.mktemp("ddp") / "run", *LEARNING, "strategy=ddp", timeout=280)
    return float(facts["metrics"][names.TEST_ACC])


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset", ["qsgd", "terngrad", "natural_compression", "ecq_sgd", "gqsgd_exponential", "gqsgd_4bit"]
)
def test_quickstart_is_within_a_point_of_ddp(reference: float, tmp_path: Path, preset: str) -> None:
    facts = _trained(tmp_path / "run", *LEARNING, f"strategy={preset}", timeout=280)
    assert facts["metrics"][names.TEST_ACC] >= reference - 0.01
