"""Recipes whose processes are runs of their own, which meet at a lighthouse."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.distributed.test_elastic import lighthouse  # noqa: F401
from tests.marks import skip_without_torchft
from tests.recipes.conftest import TINY, run_script

skip_without_torchft()

ELASTIC = ("strategy=gqsgd_elastic", "strategy.local_steps=300ms", "+strategy.min_replicas=2", "trainer.devices=1")


@pytest.mark.slow
def test_two_runs_of_one_training_end_with_the_same_weights(tmp_path: Path, lighthouse: str) -> None:  # noqa: F811
    environment = {"TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"}

    def start(seed: int) -> CompletedProcess[str]:
        arguments = (*TINY, *ELASTIC, f"seed={seed}", f"hydra.run.dir={tmp_path}/{seed}")
        return run_script("run.py", *arguments, cwd=tmp_path, environment=environment)

    with ThreadPoolExecutor(2) as pool:
        finished = list(pool.map(start, range(2)))
    assert [process.returncode for process in finished] == [0, 0], [process.stderr[-3000:] for process in finished]
    results = [json.loads((tmp_path / str(seed) / "result.json").read_text())["metrics"] for seed in range(2)]
    first, second = ({name: value for name, value in found.items() if name.startswith("test/")} for found in results)
    assert first == second  # of runs with other seeds, down to the last digit of the loss
    assert "test/loss" in first
