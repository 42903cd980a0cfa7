"""Rules of averages between processes: the bits of the simulation, resuming, and what does not go together."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.reducers.memory import Keeps
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.problems import Quadratic
from tests.distributed.local_models import WithBuffers, bits_of_anchors, bits_of_model
from tests.distributed.models import train_with
from tests.distributed.ranks import on_ranks, run

PROBLEM = Quadratic(2000, condition=10, spread=1.0)
STEPS = 7

#: Presets of systems, with what makes rounds short.
SYSTEMS: dict[str, dict[str, Any]] = {
    "gqsgd_genqsgd": {"every": 3},
    "gqsgd_sparseloco": {"every": 2},
    "gqsgd_muloco": {"every": 3},
    "gqsgd_chb": {},
    "gqsgd_neolithic": {},
    "gqsgd_mcm": {},
    "gqsgd_predictive": {"every": 2},
}


class Point(nn.Module):
    """The parameters of the problem."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(PROBLEM.start())


def _train(rank: int, ranks: int, presets: list[str]) -> dict[str, list[float]]:
    results = {}
    for preset in presets:
        fields = SYSTEMS[preset]
        model = Point()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = LocalSteps(model, inner, preset=preset, min_numel=0, **fields)
        for step in range(STEPS):
            model.x.grad = PROBLEM.gradients(model.x.detach(), step, ranks)[rank]
            optimizer.step()
        optimizer.finish()
        results[preset] = model.x.detach().tolist()
        optimizer.close()
    return results


@pytest.mark.parametrize(
    ("ranks", "presets"),
    [(2, ["gqsgd_chb", "gqsgd_mcm"]), pytest.param(3, list(SYSTEMS), marks=pytest.mark.slow)],
)
def test_every_system_has_the_bits_of_its_simulation_on_all_ranks(
    ranks: int, presets: list[str], tmp_path: Path
) -> None:
    everyone = run(_train, ranks, tmp_path, ranks, presets)
    for preset in presets:
        given = {"local_steps": SYSTEMS[preset]["every"]} if SYSTEMS[preset] else {}
        record = simulate(preset, PROBLEM, workers=ranks, steps=STEPS, lr=0.1, progress=False, **given)
        for results in everyone:
            assert np.array_equal(np.array(results[preset], dtype=np.float32), record.parameters), preset
        assert record.loss[-1] != record.loss[0]


@pytest.mark.slow
@on_ranks(2)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(rank: int) -> None:
    results = {}
    for preset in ("gqsgd_chb", "gqsgd_neolithic", "gqsgd_predictive"):
        fields: dict[str, Any] = {"preset": preset, "every": 2}
        bits = []
        for interrupted in (False, True):
            model = WithBuffers(rank)
            optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)
            train_with(model, optimizer, rank, range(5))
            if interrupted:
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
                optimizer.close()
                model = WithBuffers(7)
                optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            train_with(model, optimizer, rank, range(5, 9))
            bits.append([bits_of_model(model), bits_of_anchors(optimizer)])
            optimizer.close()
        results[preset] = bits[0] == bits[1]
    assert all(results.values()), results


def _saved_by_two(rank: int, folder: Path) -> None:
    model = Point()
    torch.nn.init.ones_(model.x)  # ten times as far from zero as a step goes
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="gqsgd_chb")
    for _ in range(2):
        model.x.grad = torch.ones_like(model.x)
        optimizer.step()
    if rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], folder / "two.pt")
    optimizer.close()


def _loaded_by_three(rank: int, folder: Path) -> int:
    """Bytes that a rank sends in its first average, in which its change is as large as before."""
    model = Point()
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), preset="gqsgd_chb")
    weights, state = torch.load(folder / "two.pt", weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    before = optimizer.telemetry.totals()["bytes_sent"]
    model.x.grad = torch.ones_like(model.x)
    optimizer.step()
    sent = optimizer.telemetry.totals()["bytes_sent"] - before
    optimizer.close()
    return sent


def test_with_another_number_of_ranks_all_changes_are_new_and_sent(tmp_path: Path) -> None:
    run(_saved_by_two, 2, tmp_path, tmp_path)
    for sent in run(_loaded_by_three, 3, tmp_path, tmp_path):
        assert sent >= 2 * (1 + 8000)


def _quiet(rank: int) -> list[int]:
    """Bytes that censored ranks send: rank 1 changes in the second step only."""
    model = Point()
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=1.0), preset="gqsgd_chb", outer="sgd")
    sent = []
    for step in range(4):
        changes = step == 1 and rank == 1
        model.x.grad = torch.full_like(model.x, 1.0 if changes else 0.0)
        before = optimizer.telemetry.totals()["bytes_sent"]
        optimizer.step()
        sent.append(optimizer.telemetry.totals()["bytes_sent"] - before)
    optimizer.close()
    return sent


def test_ranks_that_have_nothing_new_to_say_send_a_byte(tmp_path: Path) -> None:
    """In the third step, rank 1 takes its change back. The first step begins with a number of 4 bytes, see
    `LocalAverages.check_start`."""
    first, second = run(_quiet, 2, tmp_path)
    assert first == [4 + 1, 1, 1, 1]
    assert second == [4 + 1, 1 + 8000, 1 + 8000, 1]


def _constant_gradients(rank: int) -> dict[str, Any]:
    """Signs of constant gradients, with errors fed back both ways; the second fragment is a whole stripe and a part."""
    model = nn.ParameterList([torch.zeros(1500), torch.zeros(700), torch.zeros(100)])
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    fields: dict[str, Any] = {"every": 1, "outer": "sgd", "preset": "signsgd_ef", "fragments": 2, "min_numel": 500}
    optimizer = LocalSteps(model, inner, **fields)
    gradients = [torch.randn(p.numel(), generator=torch.Generator().manual_seed(7 * rank + p.numel())) for p in model]
    for _ in range(STEPS):
        for parameter, gradient in zip(model, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    store = optimizer.averages.store
    results: dict[str, Any] = {
        "gradients": [gradient.tolist() for gradient in gradients],
        "errors": [store.row(Keeps.UP_ERROR, number).tolist() for number in range(2)] + [[0.0] * 100],
        "anchor": bits_of_model(model),
    }
    with optimizer.averages.at_preserved():
        results["preserved"] = [parameter.tolist() for parameter in model]
        results["preserved bits"] = bits_of_model(model)
    results["afterwards"] = bits_of_model(model)
    optimizer.finish()
    results["finished"] = bits_of_model(model)
    optimizer.finish()
    results["finished again"] = bits_of_model(model)
    results["anchors"] = bits_of_anchors(optimizer)
    optimizer.close()
    return results


def test_the_preserved_model_has_lost_nothing_on_the_way_back(tmp_path: Path) -> None:
    """What ranks have sent is their changes less the errors that they still remember, and the preserved model has all
    of it. `finish` ends there, once."""
    everyone = run(_constant_gradients, 3, tmp_path)
    for number in range(3):
        changes = STEPS * 0.5 * torch.tensor([results["gradients"][number] for results in everyone])
        sent = (changes - torch.tensor([results["errors"][number] for results in everyone])).mean(0)
        torch.testing.assert_close(torch.tensor(everyone[0]["preserved"][number]), -sent, rtol=1e-5, atol=1e-5)
    for results in everyone:
        assert results["preserved bits"] == results["finished"] == results["finished again"]
        assert results["preserved bits"] == everyone[0]["preserved bits"] != results["anchor"] == results["afterwards"]
        assert results["anchors"] == everyone[0]["anchors"]


@on_ranks(2)
def test_what_does_not_go_together(rank: int) -> None:
    model = Point()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for fields, words in (
        ({"rule": "censored"}, "rule='censored' sends differences as they are.*take bits=32"),
        ({"rule": "multi_step", "preset": "dore"}, "it needs memory='ef', not"),
        ({"rule": "multi_step", "preset": "topk_ef", "delay": 1}, "so delay=1 hides nothing; take delay=0"),
        ({"rule": "censored" if rank else "mean", "bits": 32}, "do not agree: rule"),
    ):
        with pytest.raises(ConfigError, match=words):
            LocalSteps(model, inner, every=2, **fields)
    optimizer = LocalSteps(model, inner, every=2)
    state = optimizer.state_dict()
    optimizer.close()
    optimizer = LocalSteps(model, inner, every=2, rule="predicted")
    with pytest.raises(ConfigError, match="was written with another rule of averages than Predicted"):
        optimizer.load_state_dict(state)
    optimizer.close()
