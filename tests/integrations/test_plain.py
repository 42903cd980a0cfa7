"""Frameworks train as they do under plain DDP while it has the hook's place: results, checkpoints, counters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.adaptive.trials import Trials
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.spec.decisions import Decision
from tests.distributed.ranks import logged, run
from tests.integrations import fit, test_accelerate, test_fabric, test_transformers

AUTO = {"preset": "gqsgd_auto", "sample_every": 0}


def decided(function: Callable[..., Any], rank: int, *args: Any) -> Any:
    """Call a function in this process, in which every hook begins with a decision for 32 bits."""
    whole = Steering.__init__

    def begin(steering: Steering, config: GQSGDConfig, ranks: int, **fields: Any) -> None:
        whole(steering, config, ranks, **fields)
        rows = [Decision(3, 32, {32: 0.1}, "made up").to_dict()]
        state = {"bits": 32, "reference_s": None, "credit": 0.0, "decisions": rows}
        steering.trials = Trials.resumed(tuple(steering.candidates), state, is_same_world=True)

    Steering.__init__ = begin  # type: ignore[method-assign]
    return function(rank, *args)


def _lightning(rank: int, *args: Any) -> Any:
    return decided(fit.fits, rank, *args)


def _fabric(rank: int, *cases: dict[str, Any]) -> Any:
    return decided(test_fabric.trains, rank, *cases)


def _accelerate(rank: int, *runs: dict[str, Any]) -> Any:
    return decided(test_accelerate.fits, rank, *runs)


def _transformers(rank: int, *runs: dict[str, Any]) -> Any:
    return decided(test_transformers.fits, rank, *runs)


def _said_by_lightning(rank: int, *args: Any) -> str:
    said = logged("lightning.pytorch")
    fit.fits(rank, *args)
    return "\n".join(said)


def test_lightning_prints_decisions_where_it_prints_what_is_compressed(tmp_path: Path) -> None:
    runs = [{"strategy": "gqsgd_auto", "max_epochs": 12}]
    first, second = run(_said_by_lightning, 2, tmp_path, tmp_path, *runs, initialise=False)
    assert first.index("gqsgd: auto over 2 ranks") < first.index("gqsgd: auto takes")
    assert "gqsgd" not in second


@pytest.mark.slow
def test_lightnings_trainer_trains_resumes_and_logs_while_plain_ddp_carries_the_gradients(tmp_path: Path) -> None:
    path, accumulating = str(tmp_path / "run.ckpt"), {"accumulate_grad_batches": 2}
    runs = [
        {"strategy": "ddp", "max_epochs": 4},
        {"strategy": AUTO, "max_epochs": 2, "save": path},
        {"strategy": AUTO, "max_epochs": 4, "ckpt_path": path},
        {"strategy": "ddp", "max_epochs": 4, "trainer": accumulating},
        {"strategy": AUTO, "max_epochs": 4, "trainer": accumulating},
        {"strategy": "gqsgd_auto_find_unused_parameters_true", "max_epochs": 4},
    ]
    results, others = run(_lightning, 2, tmp_path, tmp_path, *runs, initialise=False)
    assert [result["bits"] for result in results] == [other["bits"] for other in others]
    ddp, begun, resumed, ddp_accumulated, accumulated, unused = results
    assert begun["hooks"] == resumed["hooks"] == ["none"]
    assert begun["hook_step"] == begun["step"] == 16
    assert resumed["hook_step"] == 32
    assert resumed["bits"] == ddp["bits"] == unused["bits"]
    assert accumulated["bits"] == ddp_accumulated["bits"]
    assert accumulated["hook_step"] == accumulated["step"] == 16
    assert unused["hooks"] == ["none"]
    assert begun["metrics"]["gqsgd/plain"] == 1
    assert begun["metrics"]["gqsgd/bits_per_coordinate"] == 32


@pytest.mark.slow
def test_fabric_trains_several_models_and_resumes_while_plain_ddp_carries_the_gradients(tmp_path: Path) -> None:
    path = str(tmp_path / "fabric.ckpt")
    two = {"models": 2, "accumulate": 2, "clip": 0.5, "steps": 40}
    cases = [
        {"strategy": "ddp", **two},
        {"strategy": AUTO, **two},
        {"strategy": "ddp", "steps": 24},
        {"strategy": AUTO, "steps": 12, "save": path},
        {"strategy": AUTO, "steps": 24, "load": path},
        {"strategy": AUTO, "steps": 24, "compile": True},
    ]
    results, others = run(_fabric, 2, tmp_path, *cases, initialise=False)
    assert [result["bits"] for result in results] == [other["bits"] for other in others]
    ddp_two, two_models, ddp, begun, resumed, compiled = results
    assert two_models["bits"] == ddp_two["bits"]
    assert two_models["hooks"] == ["none", "none"]
    assert two_models["steps"] == [20, 20]
    assert resumed["bits"] == ddp["bits"] == compiled["bits"]
    assert [result["hooks"] for result in (begun, resumed)] == [["none"], ["none"]]
    assert (begun["steps"], resumed["steps"]) == ([12], [24])


@pytest.mark.slow
def test_accelerate_accumulates_and_resumes_while_plain_ddp_carries_the_gradients(tmp_path: Path) -> None:
    accumulating = {"gradient_accumulation_steps": 2}
    runs = [
        {"route": "plain", "handler": {}, "options": accumulating, "steps": (0, 30), "clip": 0.5},
        {"handler": AUTO, "options": accumulating, "steps": (0, 30), "clip": 0.5},
        {"route": "plain", "handler": {}, "steps": (0, 24)},
        {"handler": AUTO, "steps": (0, 12), "save": tmp_path / "state"},
        {"handler": AUTO, "steps": (12, 24), "load": tmp_path / "state"},
        {"route": "enable", "handler": AUTO, "steps": (0, 24)},
    ]
    results, others = run(_accelerate, 2, tmp_path, *runs, initialise=False)
    assert [result["bits"] for result in results] == [other["bits"] for other in others]
    ddp_accumulated, accumulated, ddp, begun, resumed, enabled = results
    assert (accumulated["hook"], accumulated["steps"]) == ("none", [15])
    assert accumulated["bits"] == ddp_accumulated["bits"]
    assert (begun["hook"], resumed["hook"], enabled["hook"]) == ("none", "none", "none")
    assert resumed["bits"] == ddp["bits"] == enabled["bits"]
    assert (begun["steps"], resumed["steps"]) == ([12], [24])


@pytest.mark.slow
def test_the_trainer_of_transformers_resumes_while_plain_ddp_carries_the_gradients(tmp_path: Path) -> None:
    common: dict[str, Any] = {"folder": tmp_path / "run", "max_steps": 20, "max_grad_norm": 0.1}
    runs = [
        {**common},
        {**common, "fields": AUTO},
        {**common, "gradient_accumulation_steps": 2},
        {**common, "fields": AUTO, "gradient_accumulation_steps": 2},
        {**common, "fields": AUTO, "folder": tmp_path / "saved", "save_strategy": "steps", "save_steps": 14},
        {**common, "fields": AUTO, "resume": str(tmp_path / "saved" / "checkpoint-14")},
    ]
    results, others = run(_transformers, 2, tmp_path, *runs, initialise=False)
    assert [result["bits"] for result in results] == [other["bits"] for other in others]
    ddp, auto, ddp_accumulated, accumulated, saved, resumed = results
    assert (auto["hook"], auto["steps"]) == ("none", [20])
    assert auto["bits"] == ddp["bits"] == saved["bits"] == resumed["bits"]
    assert accumulated["bits"] == ddp_accumulated["bits"]
    assert accumulated["hook"] == "none"
    assert resumed["steps"] == [20]
