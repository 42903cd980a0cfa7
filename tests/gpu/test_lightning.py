"""Lightning on a GPU: two processes share one card, as one process on each of two nodes, over Gloo."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import SPAWN, run
from tests.gpu.card import DEVICE, STANDS_IN, marks
from tests.integrations.fit import fits

pytestmark = marks

PRECISIONS = ["32-true", "16-mixed", "bf16-mixed"]
STRATEGIES: list[dict[str, Any]] = [
    {},
    {"bits": 4, "reducer": "two_shot"},
    {"reducer": "sum"},
    {"preset": "signsgd_ef"},
]


def _fits(rank: int, folder: Path, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    # Lightning takes the card with the number LOCAL_RANK: for each process, the first card of a node of its own.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    return fits(rank, folder, *runs)


@pytest.mark.parametrize(
    "precision", [PRECISIONS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PRECISIONS[1:])]
)
def test_fits_with_the_hook_and_ends_with_the_same_bits_on_both_ranks(precision: str, tmp_path: Path) -> None:
    runs = [
        {
            "strategy": {"process_group_backend": "gloo", **strategy},
            "accelerator": "gpu" if DEVICE.type == "cuda" else "cpu",
            "devices": 1,
            "trainer": {"num_nodes": 2, "precision": precision},
            "max_epochs": 2,
        }
        for strategy in STRATEGIES
    ]
    options: dict[str, Any] = {"timeout": 270, "initialise": False, "context": None if STANDS_IN else SPAWN}
    first, second = run(_fits, 2, tmp_path, tmp_path, *runs, **options)
    for strategy, mine, other in zip(STRATEGIES, first, second, strict=True):
        name = f"{strategy} at {precision}"
        assert (mine["rank"], other["rank"], mine["world"]) == (0, 1, 2), name
        assert mine["hooks"] == other["hooks"] == ["gqsgd_hook"], f"{name}: hooks {mine['hooks']}, {other['hooks']}"
        assert mine["bits"] == other["bits"], f"{name}: the ranks' parameters differ"
        assert mine["step"] == mine["hook_step"] == 16, f"{name}: {mine['step']} steps, {mine['hook_step']} reduced"
        assert 0 < mine["metrics"]["loss"] < 0.69, f"{name}: loss {mine['metrics']['loss']}"
        assert mine["metrics"]["gqsgd/bytes_sent"] > 0, name
