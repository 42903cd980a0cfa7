"""States of hooks in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lightning_gqsgd import DCPState, LocalSteps
from lightning_gqsgd.errors import ConfigError
from tests.distributed.models import fingerprint, mlp, train, wrapped
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.integrations.fsdp_models import mesh, needs_fsdp_hooks, quantised, weight_bits

#: What is remembered between steps: by each rank, by owners of stripes, by all, or nothing.
HOOKS: list[dict[str, Any]] = [
    {"bits": 2, "memory": "ef"},
    {"bits": 4, "memory": "diana", "memory_down": "ef"},
    {"bits": 4, "memory": "shared"},
    {"bits": 4, "exclude": ("0.*",)},
]


def _save(folder: Path, model: nn.Module, state: Any, *, later: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of one process and of what it deprecates
        entries = {"model": model.state_dict(), "gqsgd": DCPState(state)}
        if not later:
            dcp.save(entries, checkpoint_id=folder)
            return
        future: Any = dcp.async_save(entries, checkpoint_id=folder)
    train(model, 0, range(90, 92))  # what is saved is the state before
    getattr(future, "upload_completion", future).result()


def _load(folder: Path, model: nn.Module, state: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = model.state_dict()
        dcp.load({"model": weights, "gqsgd": DCPState(state)}, checkpoint_id=folder)
    model.load_state_dict(weights)


def _resumed(rank: int, folder: Path) -> list[list[str]]:
    """Ends of undisturbed runs, and of runs that went on from checkpoints."""
    pairs = []
    for number, hook in enumerate(HOOKS):
        ends = []
        for later in (False, True):
            model, state = wrapped({}, hook)
            train(model, rank, range(3))
            _save(folder / f"{number} {later}", model, state, later=later)
            if not later:
                train(model, rank, range(3, 6))
                ends.append(fingerprint(model))
            state.close()
            model, state = wrapped({}, {**hook, "seed": 5})
            train(model, rank, range(20, 22))  # something else is remembered
            _load(folder / f"{number} {later}", model, state)
            assert state.step == 3
            train(model, rank, range(3, 6))
            ends.append(fingerprint(model))
            state.close()
        pairs.append(ends)
    return pairs


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    result = run_alike(_resumed, 2, tmp_path, tmp_path / "checkpoints")
    assert all(len(set(ends)) == 1 for ends in result)
    assert len({ends[0] for ends in result}) > 1


def _saved(rank: int, folder: Path) -> None:
    for number, hook in enumerate(HOOKS[:2]):
        model, state = wrapped({}, hook)
        train(model, rank, range(3))
        _save(folder / str(number), model, state)


def _loaded(rank: int, folder: Path) -> list[tuple[str, list[str]]]:
    records = logged("lightning_gqsgd.session.checkpoint")
    ends = []
    for number, hook in enumerate(HOOKS[:2]):
        model, state = wrapped({}, hook)
        train(model, rank, range(20, 22))
        records.clear()
        _load(folder / str(number), model, state)
        assert state.step == 3
        assert not any(bool(rows.any()) for rows in state._store._tensors.values())
        train(model, rank, range(3, 5))
        ends.append((fingerprint(model), list(records)))
    return ends


@pytest.mark.parametrize(
    ("before", "now"),
    [(2, 3), *(pytest.param(*numbers, marks=pytest.mark.slow) for numbers in ((1, 2), (3, 2), (2, 1)))],
)
def test_another_number_of_ranks_starts_with_an_empty_memory(tmp_path: Path, before: int, now: int) -> None:
    run(_saved, before, tmp_path, tmp_path / "checkpoints")
    ranks = run(_loaded, now, tmp_path, tmp_path / "checkpoints")
    assert all(ends == ranks[0] for ends in ranks)
    expected = (
        f"the memory starts empty: the checkpoint has that of {before} ranks (up_error), this run has {now} ranks"
    )
    assert expected in ranks[0][0][1][0]


def _loaded_with_other_blocks(rank: int, folder: Path) -> list[Any]:
    """With other blocks, other ranks own a coordinate; what each rank remembers for itself is kept."""
    records = logged("lightning_gqsgd.session.checkpoint")
    empty = []
    for number, hook in enumerate(HOOKS[:2]):
        model, state = wrapped({}, {**hook, "block_size": 512})
        _load(folder / str(number), model, state)
        empty.append(not any(bool(rows.any()) for rows in state._store._tensors.values()))
        other, state = wrapped({}, {**hook, "block_size": 512})
        shared: list[Any] = [torch.load(folder / f"{number}.pt", weights_only=True)]
        state.load_state_dict(shared[0])
        empty.append(not any(bool(rows.any()) for rows in state._store._tensors.values()))
    return [empty, [record for record in records if "starts empty" in record]]


def _saved_in_both_ways(rank: int, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for number, hook in enumerate(HOOKS[:2]):
        model, state = wrapped({}, hook)
        train(model, rank, range(3))
        _save(folder / str(number), model, state)
        whole = state.state_dict()
        if rank == 0:
            torch.save(whole, folder / f"{number}.pt")


def test_a_memory_in_parts_starts_empty_where_other_ranks_would_own_them(tmp_path: Path) -> None:
    run(_saved_in_both_ways, 2, tmp_path, tmp_path / "checkpoints")
    for empty, warned in run(_loaded_with_other_blocks, 2, tmp_path, tmp_path / "checkpoints"):
        assert empty == [False, False, True, True]
        assert len(warned) == 2
        for line in warned:
            assert "down_error, 2 owners of blocks of 128), this run has 2 ranks" in line
            assert line.endswith("2 owners of blocks of 512)")


def _refused(rank: int, folder: Path) -> list[str]:
    """A checkpoint of another model, and one whose state was saved without DCPState."""
    texts = []
    model, state = wrapped({}, HOOKS[0])
    train(model, rank, range(2))
    _save(folder / "narrow", model, state)
    wide, wider = wrapped({}, HOOKS[0], mlp(width=160))
    train(wide, rank, range(2))
    with pytest.raises(Exception, match="of parameter") as error:
        dcp.load({"gqsgd": DCPState(wider)}, checkpoint_id=folder / "narrow")
    texts.append(str(error.value))
    with pytest.raises(ConfigError, match="load what DCPState has saved") as error:
        DCPState(state).load_state_dict({"state": 1} if rank else {})
    texts.append(str(error.value))
    dcp.save({"gqsgd": state}, checkpoint_id=folder / "plain")
    if rank:  # the only rank that has the memory does not know of the others
        with pytest.raises(Exception, match=r"give DCPState\(state\) to both save and load"):
            dcp.load({"gqsgd": state}, checkpoint_id=folder / "plain")
    else:
        dcp.load({"gqsgd": state}, checkpoint_id=folder / "plain")
    local = mlp()
    for other in (model, LocalSteps(local, torch.optim.SGD(local.parameters(), lr=0.1), every=2)):
        with pytest.raises(ConfigError, match="DCPState takes what register_gqsgd.* saved as an optimizer"):
            DCPState(other)  # type: ignore[arg-type]
    train(wide, rank, range(2, 3))  # nothing was taken
    return [*texts, fingerprint(wide)]


@on_ranks(2)
def test_a_state_below_the_top_level_is_refused_when_it_is_saved(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    _, state = wrapped({}, HOOKS[0])
    with pytest.raises(CheckpointException) as error:  # no Exception, but a BaseException
        dcp.save({"app": {"gqsgd": DCPState(state)}}, checkpoint_id=folder)
    state.close()
    text = str(error.value)
    # DCP would pickle it, and restore nothing.
    assert "DCPState(state) has to be at the top level" in text


def test_what_cannot_be_loaded_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run(_refused, 2, tmp_path, tmp_path / "checkpoints")
    assert first[2] == second[2]


@needs_fsdp_hooks
@on_ranks(2)
def test_a_sharded_model_resumes_to_the_same_bits(rank: int, tmp_path: Path) -> list[str]:
    folder = tmp_path / "checkpoint"
    on, ends = mesh(2), []
    model, state = quantised(on, {"bits": 4, "reduce_scatter": True})
    train(model, rank, range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "gqsgd": DCPState(state)}, checkpoint_id=folder)
    train(model, rank, range(3, 6))
    ends.append(weight_bits(model))
    model, state = quantised(on, {"bits": 4, "reduce_scatter": True, "seed": 9})
    train(model, rank, range(20, 22))  # with another dither
    _load(folder, model, state)
    assert state.step == 3
    train(model, rank, range(3, 6))
    result = [*ends, weight_bits(model)]
    assert result[0] == result[1]
    return result
