"""Local steps in Fabric: weights that are loaded after `setup`, and optimizers that Fabric does not step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_gqsgd import GQSGDFabricStrategy
from lightning_gqsgd.errors import ConfigError
from tests.distributed.models import batch, fingerprint, mlp
from tests.distributed.ranks import on_ranks, run_alike
from tests.errors import error_text


def _of(strategy: Any, **options: Any) -> Fabric:
    fabric = Fabric(accelerator="cpu", strategy=strategy, **{"devices": 2, **options})
    fabric.launch()
    return fabric


def _train(fabric: Fabric, model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        x, y = batch(fabric.global_rank, step)
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, initialise=False)
def test_weights_that_are_loaded_after_setup_are_the_anchor(rank: int, tmp_path: Path) -> None:
    """Whether weights of a checkpoint stay, bit by bit, in steps of length 0."""
    saved = mlp()
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter += torch.randn_like(parameter)
    whole = torch.optim.SGD(saved.parameters(), lr=0.0)
    file = tmp_path / f"plain-{rank}.ckpt"
    torch.save({"model": saved.state_dict(), "optimizer": whole.state_dict()}, file)
    stay = []
    for preset in ("gqsgd_diloco", "gqsgd_sparseloco", "gqsgd_chb"):
        for loads_optimizer in (True, False):
            fabric = _of(GQSGDFabricStrategy(preset, local_steps=4))
            module = mlp()
            model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.0))
            state = {"model": model, **({"optimizer": optimizer} if loads_optimizer else {})}
            fabric.load(file, state)
            _train(fabric, model, optimizer, 5)
            fabric.strategy.finish()
            fabric.strategy.gqsgd_states[0].close()
            stay.append(fingerprint(module) == fingerprint(saved))
    assert stay == [True] * 6


@on_ranks(2, initialise=False)
def test_weights_of_one_model_leave_the_other_one_in_its_round(rank: int, tmp_path: Path) -> None:
    """Whether the model that is not loaded stays what this rank has made of it."""
    fabric = _of(GQSGDFabricStrategy(local_steps=4))
    modules = [mlp(), mlp()]
    models = []
    for module in modules:
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        _train(fabric, model, optimizer, 2)
        models.append(model)
    fabric.save(tmp_path / "weights.ckpt", {"model": models[0]})
    before = fingerprint(modules[1])
    fabric.load(tmp_path / "weights.ckpt", {"model": models[0]})
    after = fingerprint(modules[1])
    fabric.strategy.finish()
    for state in fabric.strategy.gqsgd_states:
        state.close()
    assert before == after


@on_ranks(2, initialise=False)
def test_steps_that_fabric_does_not_make_are_averaged_or_an_error(rank: int) -> list[Any]:
    fabric = _of(GQSGDFabricStrategy(local_steps=3))
    module = mlp()
    raw = torch.optim.SGD(module.parameters(), lr=0.1)
    model, _ = fabric.setup(module, raw)
    _train(fabric, model, raw, 2)
    fabric.strategy.finish()
    fabric.strategy.gqsgd_states[0].close()
    results: list[Any] = [fingerprint(module)]

    fabric = _of(GQSGDFabricStrategy(local_steps=3))
    module, teacher = mlp(), mlp()
    fabric.setup_module(teacher)
    model = fabric.setup_module(module)
    fabric.strategy.finish()
    raw = torch.optim.SGD(module.parameters(), lr=0.1)
    _train(fabric, model, raw, 2)
    result = [*results, error_text(ConfigError, fabric.strategy.finish)]
    assert "it was set up and trained without its optimizer" in result[1]
    return result


def _on_two_nodes(rank: int) -> str:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    fabric = _of(GQSGDFabricStrategy(local_steps=3), devices=1, num_nodes=2)
    module = mlp()
    model = fabric.setup_module(module)
    _train(fabric, model, torch.optim.SGD(module.parameters(), lr=0.1), 2)
    return error_text(ConfigError, fabric.strategy.finish)


def test_a_model_without_its_optimizer_is_an_error_where_each_node_has_one_process(tmp_path: Path) -> None:
    assert "it was set up and trained without its optimizer" in run_alike(_on_two_nodes, 2, tmp_path, initialise=False)


@on_ranks(2, initialise=False)
def test_an_optimizer_of_several_models_is_refused_and_of_a_model_that_has_them_trained(rank: int) -> list[str]:
    fabric = _of(GQSGDFabricStrategy(local_steps=2))
    parts = [nn.Linear(4, 4), mlp()]
    for part in parts:
        fabric.setup_module(part)
    optimizer = torch.optim.SGD((parameter for part in parts for parameter in part.parameters()), lr=0.1)
    text = error_text(ConfigError, fabric.setup_optimizers, optimizer)
    assert "the optimizer has parameters of several models (Linear, Sequential)" in text
    fabric.setup_module(nn.ModuleList(parts))
    optimizer = fabric.setup_optimizers(optimizer)
    optimizer.step()
    fabric.strategy.finish()
    (averages,) = fabric.strategy.gqsgd_states
    averages.close()
    return [fingerprint(part) for part in parts]
