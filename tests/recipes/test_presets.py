"""Training under the presets of the literature, in real processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recipes.comparison.results import Run
from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY
from tests.recipes.conftest import ROOT, TINY, run_ranks, run_script

#: Trains once for each command line, in this process.
TRAIN = """
import json, sys
from pathlib import Path
from recipes.configuration import compose_configuration
from recipes.training.train import train

for folder, overrides in json.loads(sys.argv[1]).items():
    train(compose_configuration(overrides), Path(folder))
"""

MEMORY = {
    "signsgd_ef": {"up_error", "down_error"},
    "cd_adam": {"up_reference", "up_mean", "down_reference"},
    "topk_ef": {"up_error"},
}


@pytest.mark.slow
def test_presets_with_memory_train_and_save_it(tmp_path: Path) -> None:
    # A width at which there are parameters to compress. One pair of processes for all: starting takes longest.
    small = [*TINY, "model.width=16", "trainer.max_epochs=1", "data.batch_size=16", "threads=1"]
    runs = {str(tmp_path / preset): [*small, f"strategy={preset}"] for preset in MEMORY}
    ranks = [{"LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    run_ranks(["-c", TRAIN, json.dumps(runs)], ranks, cwd=ROOT, timeout=250, PYTHONPATH=str(ROOT))
    for preset, kinds in MEMORY.items():
        folder = tmp_path / preset
        facts = json.loads((folder / "result.json").read_text())
        assert (facts["strategy"], facts["processes"], facts["steps"]) == (preset, 2, 3)
        assert math.isfinite(facts["metrics"][names.TEST_LOSS])
        run = Run.load(folder)
        assert 0.4 < run.message_bits < 4  # some parameters are too small to be compressed
        assert 0.3 < run.rel_l2 < 3
        memory = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["gqsgd"]["memory"]
        assert set(memory) == kinds
        assert all(rows.count_nonzero() for kind in kinds - {"down_error"} for rows in memory[kind].values())
        assert {len(rows) for rows in next(iter(memory.values())).values()} == {2}


#: The test split has 360 images, so that one point is less than four of them: one seed alone decides little.
SEEDS = (0, 1)


def _accuracy(folder: Path, strategy: str) -> float:
    """Mean test accuracy of the seeds, each trained by 4 processes."""
    found = []
    for seed in SEEDS:
        overrides = ("+exp=quickstart", "trainer.devices=4", "checkpoint=false", f"strategy={strategy}", f"seed={seed}")
        run = folder / str(seed)
        finished = run_script("run.py", *overrides, f"hydra.run.dir={run}", cwd=folder, timeout=280)
        assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-3000:]
        found.append(json.loads((run / "result.json").read_text())["metrics"][ACCURACY.test])
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Accuracy of plain DDP."""
    return _accuracy(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "preset", ["qsgd", "terngrad", "natural_compression", "ecq_sgd", "gqsgd_exponential", "gqsgd_4bit"]
)
def test_quickstart_is_within_a_point_of_ddp(reference: float, tmp_path: Path, preset: str) -> None:
    assert _accuracy(tmp_path, preset) >= reference - 0.01
