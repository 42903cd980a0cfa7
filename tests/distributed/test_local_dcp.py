"""Local steps and torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lightning_gqsgd import LocalSteps
from tests.distributed.local_models import bits_of_anchors, bits_of_model
from tests.distributed.models import mlp, train_with
from tests.distributed.ranks import on_ranks, run

#: With a memory, a momentum of the outer optimizer, fragments and a delay.
WAY: dict[str, Any] = {"every": 3, "outer_after": 0, "fragments": 2, "delay": 1, "preset": "signsgd_ef"}


def _made() -> tuple[nn.Module, LocalSteps]:
    model = mlp(64)
    return model, LocalSteps(model, torch.optim.AdamW(model.parameters(), lr=0.01), **WAY)


def _saved_and_loaded(rank: int, folder: Path) -> list[Any]:
    """Bits of an undisturbed run, and of one that goes on from a checkpoint with each rank's state under its name."""
    model, optimizer = _made()
    train_with(model, optimizer, rank, range(7))
    weights, state = get_state_dict(model, optimizer)
    steps = [optimizer.averages.step]
    dcp.save({f"rank{rank}": {"model": weights, "optimizer": state}}, checkpoint_id=folder)
    train_with(model, optimizer, rank, range(7, 12))
    optimizer.finish()
    undisturbed = [bits_of_model(model), bits_of_anchors(optimizer)]
    optimizer.close()

    model, optimizer = _made()
    weights, state = get_state_dict(model, optimizer)
    steps.append(optimizer.averages.step)
    dcp.load({f"rank{rank}": {"model": weights, "optimizer": state}}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps.append(optimizer.averages.step)
    train_with(model, optimizer, rank, range(7, 12))
    optimizer.finish()
    resumed = [bits_of_model(model), bits_of_anchors(optimizer)]
    optimizer.close()
    return [undisturbed, resumed, steps]


def test_a_run_that_goes_on_from_a_distributed_checkpoint_has_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    first, second = run(_saved_and_loaded, 2, tmp_path, tmp_path / "checkpoint")
    for undisturbed, resumed, steps in (first, second):
        assert undisturbed == resumed
        assert steps == [7, 0, 7]
    assert first[0] == second[0]


@on_ranks(2)
def test_a_state_that_one_rank_asks_for_counts_no_step(rank: int) -> list[Any]:
    """One rank asks for a state, before the first step and later; the other does not."""
    model, optimizer = _made()
    for steps in (range(4), range(4, 8)):
        if rank == 0:
            get_state_dict(model, optimizer)
        train_with(model, optimizer, rank, steps)
    optimizer.finish()
    result = [optimizer.averages.step, bits_of_model(model)]
    optimizer.close()
    assert result[0] == 8
    return result
