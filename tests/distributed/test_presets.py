"""Every system over real processes: same bits on all ranks and as on virtual ones, memory that survives a restart."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gqsgd import all_reduce
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.presets import FIXED, PRESETS
from lightning_gqsgd.research.simulation import average
from tests.distributed.models import finish, mlp, train, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

REMEMBERING = [name for name, preset in PRESETS.items() if preset.config.remembers]
STATELESS = [name for name in FIXED if name not in REMEMBERING]


def _gradient(rank: int) -> torch.Tensor:
    return torch.randn(9000, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-3, 0, 9000)


def _reduced(rank: int) -> list[bytes]:
    return [all_reduce(_gradient(rank), preset=name, step=3).numpy().tobytes() for name in STATELESS]


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_processes_and_virtual_ranks_give_the_same_bits(ranks: int, tmp_path: Path) -> None:
    results = run(_reduced, ranks, tmp_path)
    gradients = [_gradient(rank) for rank in range(ranks)]
    for number, name in enumerate(STATELESS):
        expected = average(gradients, preset=name, step=3)[0].numpy().tobytes()
        assert all(result[number] == expected for result in results), name


def _trained(rank: int, names: list[str]) -> dict[str, tuple[str, float]]:
    found = {}
    for name in names:
        model, state = wrapped({"bucket_cap_mb": 0.03}, {"preset": name})
        losses = train(model, rank, range(12))
        found[name] = (finish(state, model)["bits"], losses[-1] - losses[0])
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(PRESETS)[::8], id="every eighth"),
        pytest.param(list(PRESETS), id="all", marks=pytest.mark.slow),
    ],
)
def test_parameters_stay_identical_under_every_preset(names: list[str], tmp_path: Path) -> None:
    first, *others = run(_trained, 3, tmp_path, names)
    for name, (bits, change) in first.items():
        assert all(other[name][0] == bits for other in others), name
        assert change < 0, name


@pytest.mark.slow
@on_ranks(3)
def test_interrupted_and_resumed_with_memory_gives_the_same_bits(rank: int, tmp_path: Path) -> None:
    found = {}
    for name in REMEMBERING:
        options, hook = {"bucket_cap_mb": 0.03}, {"preset": name, "seed": 5, "warmup_steps": 2}
        whole, state = wrapped(options, hook)
        train(whole, rank, range(16))
        expected = finish(state, whole)["bits"]

        first, state = wrapped(options, hook)
        train(first, rank, range(7))
        saved = state.state_dict()  # every rank, because memory is gathered
        if rank == 0:
            torch.save({"model": first.module.state_dict(), "gqsgd": saved}, tmp_path / f"{name}.pt")
        else:
            assert saved["memory"] is None
        state.close()
        dist.barrier()
        checkpoint = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        model = mlp()
        model.load_state_dict(checkpoint["model"])
        resumed, state = wrapped(options, hook, model)
        if rank:
            with pytest.raises(ConfigError, match="not rank 0's"):
                state.load_state_dict(saved)
        state.load_state_dict(checkpoint["gqsgd"])
        train(resumed, rank, range(7, 16))
        found[name] = (expected, finish(state, resumed)["bits"])
    for name, (whole, resumed) in found.items():
        assert resumed == whole, name


def _resumed_elsewhere(rank: int, path: Path, hook: dict[str, Any]) -> list[str]:
    model, state = wrapped({}, hook)
    saved = torch.load(path, weights_only=True) if path.exists() else None
    records: list[str] = []
    if saved is not None:
        from lightning_gqsgd.session import checkpoint as module

        module.logger.warning = lambda text, *args: records.append(text % args)  # type: ignore[method-assign]
        state.load_state_dict(saved)
    train(model, rank, range(3))
    if saved is None:
        saved = state.state_dict()
        if rank == 0:
            torch.save(saved, path)
    state.close()
    return records


@pytest.mark.slow
def test_memory_of_another_number_of_ranks_starts_empty_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    run(_resumed_elsewhere, 2, tmp_path, path, {"preset": "signsgd_ef"})
    for records in run(_resumed_elsewhere, 3, tmp_path, path, {"preset": "signsgd_ef"}):
        assert any("starts empty" in text and "2 ranks" in text and "3 ranks" in text for text in records)
    for records in run(_resumed_elsewhere, 2, tmp_path, path, {"preset": "diana"}):
        assert any("another configuration" in text for text in records)
        assert any("starts empty" in text for text in records)
    for records in run(_resumed_elsewhere, 2, tmp_path, path, {"preset": "gqsgd"}):
        assert len(records) == 1
    assert run(_resumed_elsewhere, 2, tmp_path, path, {"preset": "signsgd_ef"}) == [[], []]


@on_ranks(2)
def test_what_all_reduce_cannot_do(rank: int) -> None:
    words = []
    for fields in ({"preset": "ecq_sgd"}, {"preset": "gqsgd_sum", "bits": 1}, {"codec": "sign", "bits": 1}):
        words.append(error_text(ConfigError, all_reduce, torch.randn(2000), **fields))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_reduce(torch.randn(2000), codec="sign", bits=1, memory="none", reducer="gather")
    first, second, third = words
    assert "cannot remember anything" in first
    assert "bits=1" in second
    assert "is biased" in third


@on_ranks(2)
def test_nan_on_one_rank_reaches_all_and_leaves_memory_alone(rank: int) -> list[Any]:
    found = []
    for name in ("signsgd_ef", "cd_adam", "dore", "topk_ef"):
        model, state = wrapped({}, {"preset": name})
        for step in range(4):
            model.zero_grad()
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(x).square().mean()
            (loss * torch.nan if rank == 1 and step == 2 else loss).backward()
            finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
            found.append((name, step, finite, float(next(model.parameters()).grad.nan_to_num().norm())))
        state.close()
    assert [one[:3] for one in found if one[2] == (one[1] == 2)] == []
    return found
