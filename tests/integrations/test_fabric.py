"""Fabric: the hook on every model, and what checkpoints keep of it."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gqsgd.config import ConfigError
from tests.bits import bits_of
from tests.distributed.models import batch, fingerprint, mlp
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text
from tests.processes import ended_well


def fabric_of(case: dict[str, Any]) -> Any:
    """A Fabric that is launched in processes that exist already."""
    flavour = case.get("flavour", "lightning.fabric")
    strategy = case["strategy"]
    if isinstance(strategy, dict):
        home = importlib.import_module(f"lightning_gqsgd.frameworks.fabric_{flavour.replace('.fabric', '')}")
        strategy = home.GQSGDFabricStrategy(**strategy)
    fabric = importlib.import_module(flavour).Fabric(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        precision=case.get("precision"),
    )
    fabric.launch()
    return fabric


def trains(rank: int, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    """One training loop for all tests: two models, or one; accumulation; clipping; checkpoints."""
    results = []
    for case in cases:
        fabric = fabric_of(case)
        pairs = []
        for _ in range(case.get("models", 1)):
            model = mlp()
            if case.get("compile"):
                model = torch.compile(model, backend="eager")
            pairs.append(fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
        state = {f"{kind}{k}": one for k, pair in enumerate(pairs) for kind, one in zip("mo", pair, strict=True)}
        state["step"] = 0
        remainder = fabric.load(case["load"], state) if case.get("load") else {}
        every = case.get("accumulate", 1)
        for step in range(state["step"], case.get("steps", 6)):
            x, y = batch(fabric.global_rank, step)
            last = (step + 1) % every == 0
            for model, optimizer in pairs:
                with fabric.no_backward_sync(model, enabled=not last):
                    fabric.backward(nn.functional.cross_entropy(model(x), y) / every)
                if last:
                    if case.get("clip"):
                        fabric.clip_gradients(model, optimizer, max_norm=case["clip"])
                    optimizer.step()
                    optimizer.zero_grad()
        if case.get("save"):
            fabric.save(case["save"], {**state, "step": case.get("steps", 6)})
        hooks = getattr(fabric.strategy, "gqsgd_states", [])
        results.append(
            {
                "bits": bits_of(p for model, _ in pairs for p in model.parameters()),
                "hooks": [hooked(model) for model, _ in pairs],
                "steps": [one.step for one in hooks],
                "reports": [one.report() for one in hooks],
                "remainder": sorted(remainder),
            }
        )
        for one in hooks:
            one.close()
    return results


def hooked(model: Any) -> str:
    """What DDP says is installed."""
    wrapped = model._forward_module
    return (getattr(wrapped, "_orig_mod", wrapped))._get_ddp_logging_data().get("comm_hook", "none")


@pytest.mark.parametrize("flavour", ["lightning.fabric", pytest.param("lightning_fabric", marks=pytest.mark.slow)])
def test_a_string_or_an_object_is_enough(flavour: str, tmp_path: Path) -> None:
    cases = [
        {"strategy": "ddp"},
        {"strategy": {"reducer": "native"}},
        {"strategy": "gqsgd"},
        {"strategy": "gqsgd_4bit", "models": 2, "accumulate": 3, "clip": 0.5},
        {"strategy": "ddp", "models": 2, "accumulate": 3, "clip": 0.5},
        {"strategy": {"reducer": "native"}, "models": 2, "accumulate": 3, "clip": 0.5},
        {"strategy": "gqsgd", "compile": True},
        {"strategy": "gqsgd", "precision": "bf16-mixed"},
        {"strategy": "gqsgd", "precision": "bf16-true"},
        {"strategy": {"reducer": "hierarchical"}},
    ]
    mine, other = run(trains, 2, tmp_path, *[{"flavour": flavour, **case} for case in cases], initialise=False)
    assert [one["bits"] for one in mine] == [one["bits"] for one in other]
    ddp, native, eight, two_models, ddp_two, native_two, compiled, mixed, true, nodes = mine
    assert ddp["hooks"] == ["none"]
    assert ddp["bits"] == native["bits"] != eight["bits"]
    assert ddp_two["bits"] == native_two["bits"]
    assert eight["bits"] == compiled["bits"]
    assert two_models["steps"] == [2, 2]  # one per optimizer step
    for one in (native, eight, two_models, native_two, compiled, mixed, true, nodes):
        assert set(one["hooks"]) == {"gqsgd_hook"}
    assert "all 2 ranks are on one node" in nodes["reports"][0]


@pytest.mark.parametrize(
    "strategy", [pytest.param({"bits": 4}, marks=pytest.mark.slow), {"preset": "signsgd_ef"}], ids=str
)
def test_checkpoints_resume_to_the_same_bits(strategy: dict[str, Any], tmp_path: Path) -> None:
    path, plain = str(tmp_path / "gqsgd.ckpt"), str(tmp_path / "ddp.ckpt")
    cases = [
        {"strategy": strategy, "models": 2, "steps": 6},
        {"strategy": strategy, "models": 2, "steps": 3, "save": path},
        {"strategy": strategy, "models": 2, "steps": 6, "load": path},
        {"strategy": "ddp", "models": 2, "steps": 6, "load": path},
        {"strategy": "ddp", "models": 2, "steps": 3, "save": plain},
        {"strategy": strategy, "models": 2, "steps": 6, "load": plain},
    ]
    whole, _, resumed, by_ddp, _, from_ddp = run(trains, 2, tmp_path, *cases, initialise=False)[0]
    assert resumed["bits"] == whole["bits"]
    assert resumed["steps"] == whole["steps"] == [6, 6]
    assert resumed["remainder"] == []
    assert (by_ddp["hooks"], by_ddp["remainder"]) == (["none", "none"], ["gqsgd"])
    assert (from_ddp["steps"], from_ddp["remainder"]) == ([3, 3], [])  # the dither starts anew
    saved = torch.load(path, weights_only=True)["gqsgd"]
    assert [one["step"] for one in saved] == [3, 3]

    again = {"strategy": strategy, "models": 2, "steps": 6, "load": path}
    every = run(trains, 3, tmp_path, again, initialise=False)  # memory, if any, starts empty, which is a warning
    assert len({one[0]["bits"] for one in every}) == 1
    assert every[0][0]["steps"] == [6, 6]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [{"bits": 4, "seed": 9}, {"preset": "signsgd_ef", "warmup_steps": 1}], ids=str)
@on_ranks(2, initialise=False)
def test_a_hook_that_has_trained_starts_anew_from_a_checkpoint_without_it(
    rank: int, tmp_path: Path, strategy: dict[str, Any]
) -> list[tuple[int, int, str]]:
    """Twice from the same checkpoint without gqsgd: with a new hook, and with one that has trained."""
    fabric = fabric_of({"strategy": strategy})
    module = mlp()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    fabric.save(tmp_path / "own.ckpt", state)
    if rank == 0:
        content = torch.load(tmp_path / "own.ckpt", weights_only=True)
        del content["gqsgd"]
        torch.save(content, tmp_path / "plain.ckpt")
    fabric.barrier()
    found = []
    for _ in range(2):
        fabric.load(tmp_path / "plain.ckpt", state)
        for step in range(3):
            optimizer.zero_grad()
            x, y = batch(rank, step)
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        hook = fabric.strategy.gqsgd_states[0]
        found.append((hook.step, hook.config.seed, fingerprint(module)))
    assert found[0] == found[1]
    assert found[0][:2] == (3, strategy.get("seed", 0))
    return found


def _of_pairs(pairs: list[Any]) -> dict[str, Any]:
    """What a checkpoint of models and their optimizers is made of."""
    return {f"{kind}{k}": one for k, pair in enumerate(pairs) for kind, one in zip("mo", pair, strict=True)}


@pytest.mark.parametrize(
    "strategy", [pytest.param({"preset": "signsgd_ef"}, marks=pytest.mark.slow), {"local_steps": 2}], ids=str
)
@on_ranks(2, initialise=False)
def test_a_checkpoint_may_be_loaded_before_its_models_are_set_up(
    rank: int, tmp_path: Path, strategy: dict[str, Any]
) -> list[tuple[list[int], list[str]]]:
    """Trains two models on from a checkpoint that is loaded where two, one or none of them are set up."""
    found = []
    for ready in (None, 2, 1, 0):  # None: the run that writes the checkpoint, and goes on
        fabric = fabric_of({"strategy": strategy})
        modules = [mlp(), mlp()]
        pairs = [(module, torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules]
        are_set_up = 2 if ready is None else ready
        pairs[:are_set_up] = [fabric.setup(*pair) for pair in pairs[:are_set_up]]
        if ready is not None:
            fabric.load(tmp_path / "two.ckpt", _of_pairs(pairs))
        pairs[are_set_up:] = [fabric.setup(*pair) for pair in pairs[are_set_up:]]
        for steps in (3, 4) if ready is None else (4,):
            for (model, optimizer), more in zip(pairs, (0, 2), strict=True):
                for step in range(steps + more):
                    optimizer.zero_grad()
                    fabric.backward(model(torch.full((2, 32), float(rank + step))).square().mean())
                    optimizer.step()
            if steps == 3:
                fabric.save(tmp_path / "two.ckpt", _of_pairs(pairs))
        fabric.strategy.finish()
        states = fabric.strategy.gqsgd_states
        found.append(([state.step for state in states], [fingerprint(module) for module in modules]))
        for state in states:
            state.close()
    whole, *resumed = found
    assert whole[0] == [7, 11]
    assert resumed == [whole] * 3
    return found


def refuses(rank: int, folder: Path) -> list[str]:
    fabric = fabric_of({"strategy": "gqsgd"})
    model = mlp()
    first = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = {"model": first[0], "optimizer": first[1]}
    messages = []
    messages.append(error_text(ConfigError, fabric.save, folder / "x.ckpt", {**state, "gqsgd": 1}))
    fabric.save(folder / "weights.ckpt", {"model": first[0]})
    fabric.save(folder / "one.ckpt", state)
    model = mlp()
    second = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    both = {**state, "second": second[0], "its optimizer": second[1]}
    messages.append(error_text(ConfigError, fabric.load, folder / "one.ckpt", both, strict=False))
    fabric.save(folder / "two.ckpt", both)
    messages.append(error_text(ConfigError, fabric.load, folder / "two.ckpt", state))
    fabric.save(folder / "weights_of_the_second.ckpt", {**state, "second": second[0]})
    fabric.save(folder / "no_weights.ckpt", {"optimizer": first[1]})
    fabric.strategy._rank_zero_info = messages.append
    fabric.load(folder / "weights.ckpt")
    fabric.load(folder / "one.ckpt", state)
    whole = fabric.load(folder / "one.ckpt")  # many scripts restore from this by themselves
    state["optimizer"].load_state_dict(whole["optimizer"])
    for one in fabric.strategy.gqsgd_states:
        one.close()
    return messages


def test_what_cannot_be_saved_or_restored_is_said(tmp_path: Path) -> None:
    for messages in run(refuses, 2, tmp_path, tmp_path, initialise=False):
        assert "the key 'gqsgd' of a checkpoint is the strategy's" in messages[0]
        assert "has the hook's state of 1 model, and it is loaded into 2" in messages[1]
        assert "has the hook's state of 2 models, and it is loaded into 1" in messages[2]
        assert "'gqsgd' is left unread, because fabric.load was given no optimizer" in messages[3]
        assert len(messages) == 4
    assert "gqsgd" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    for name, states in (("weights_of_the_second", 2), ("no_weights", 1)):
        assert len(torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["gqsgd"]) == states


def folds(rank: int, folder: Path, strategy: dict[str, Any]) -> list[tuple[bool, list[int]]]:
    """Two folds under one Fabric. Returns whether each checkpoint restores its weights, and the steps in it."""
    fabric = fabric_of({"strategy": strategy})
    states = []
    weights = []
    for fold in range(2):
        module = mlp()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(2 * fold + 2):
            optimizer.zero_grad()
            fabric.backward(model(torch.full((2, 32), float(rank + step + fold))).square().mean())
            optimizer.step()
        states.append({"model": model, "optimizer": optimizer})
        weights.append(fingerprint(module))
        fabric.save(folder / f"{fold}.ckpt", states[fold])
    copied = pickle.loads(pickle.dumps(fabric.strategy._hooks))  # noqa: S301
    assert not copied.with_models()  # a process that is started gets none
    found = []
    for fold, state in enumerate(states):
        with torch.no_grad():
            for parameter in state["model"].parameters():
                parameter.zero_()
        fabric.load(folder / f"{fold}.ckpt", state)
        saved = torch.load(folder / f"{fold}.ckpt", weights_only=True)["gqsgd"]
        found.append((fingerprint(state["model"]) == weights[fold], [one["step"] for one in saved]))
    return found


@pytest.mark.parametrize("strategy", [{"preset": "signsgd_ef"}, {"preset": "gqsgd_diloco", "local_steps": 2}], ids=str)
def test_a_checkpoint_has_the_states_of_its_own_models(strategy: dict[str, Any], tmp_path: Path) -> None:
    first, second = run(folds, 2, tmp_path, tmp_path, strategy, initialise=False)
    assert [one[0] for one in first] == [one[0] for one in second] == [True, True]
    assert [one[1] for one in first] == [[2], [4]]


def train(fabric: Any) -> None:
    model = torch.nn.Linear(64, 64)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.randn(4, 64)).square().mean())
    assert model._forward_module._get_ddp_logging_data()["comm_hook"] == "gqsgd_hook"
    print(f"trained {fabric.global_rank} of {fabric.world_size}\n", end="")  # one write


def starts(_: int, strategy: str, output: Path) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        importlib.import_module("lightning.fabric").Fabric(accelerator="cpu", devices=2, strategy=strategy).launch(
            train
        )
        sys.stdout.flush()


def test_fabric_starts_processes_by_fork(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    run(starts, 1, tmp_path, "gqsgd_fork", output, initialise=False, torchrun=False)
    assert "trained 0 of 2" in output.read_text()
    assert "trained 1 of 2" in output.read_text()


SCRIPT = """
from lightning.fabric import Fabric
from tests.integrations.test_fabric import train

if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy=STRATEGY).launch(train)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gqsgd", "gqsgd_spawn"])
def test_start_methods(strategy: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("STRATEGY", repr(strategy)))
    done = ended_well("-W", "ignore", str(script), timeout=200, PYTHONPATH=str(Path(__file__).parents[2]))
    assert "trained 0 of 2" in done.stdout
    assert "trained 1 of 2" in done.stdout
