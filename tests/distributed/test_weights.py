"""Weights that differ between ranks are logged; what is right, or rounded otherwise, is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from lightning_gqsgd.wire.agreement import WEIGHTS_COMPARED, Weights, difference_of_weights
from tests.distributed.models import loss_of, mlp, train, wrapped
from tests.distributed.ranks import logged, on_ranks, run


def _times_two(model: nn.Module) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def _one_layer(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight += 1  # type: ignore[index]


def _rounded(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


#: What rank 0 alone does to its model, and whether that is logged.
ON_ONE_RANK: dict[str, tuple[Callable[[nn.Module], None], bool]] = {
    "a state is loaded": (_times_two, True),
    "a layer is changed": (_one_layer, True),
    "weights are rounded": (_rounded, False),
}


def _said_after(make: Callable[[], None]) -> str:
    said = logged()
    make()
    return "\n".join(said)


def _after_changes(rank: int) -> dict[str, str]:
    seen = {}
    for name, (change, _) in ON_ONE_RANK.items():
        model, state = wrapped({}, {"bits": 8}, mlp())

        def steps(model: nn.Module = model, change: Callable[[nn.Module], None] = change) -> None:
            train(model, rank, range(2))
            if rank == 0:
                change(model.module)
            train(model, rank, range(2, 10))  # more steps than parameters

        seen[name] = _said_after(steps)
        state.close()
    return seen


def test_weights_that_one_rank_has_changed_are_logged_once(tmp_path: Path) -> None:
    first, second = run(_after_changes, 2, tmp_path)
    assert set(second.values()) == {""}
    for name, (_, is_said) in ON_ONE_RANK.items():
        assert first[name].count("ranks have different weights: parameter '") == is_said, (name, first[name])
    assert "parameter '2.weight' has " in first["a layer is changed"]
    assert "LBFGS" in first["a layer is changed"]


@on_ranks(2)
def test_a_rank_without_inputs_keeps_its_weights_and_nothing_is_logged(rank: int) -> None:
    model, state = wrapped({}, {"bits": 8}, mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def steps() -> None:
        with Join([model]):
            for step in range(2 + 8 * rank):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

    said = _said_after(steps)
    state.close()
    assert said == ""


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([[1.0, 2.0], [1.0, 2.0]], ""),
        ([[1.0, 2.0], [1.06, 2.0]], ""),
        ([[0.0, 0.0], [0.0, 0.0]], ""),
        ([[1.0, 2.0], [1.0, 2.0], [1.0, 2.1]], "has 2 on rank 0 where it has 2.1 on rank 2. "),
        ([[float("nan")] * 2, [1.0, 2.0], [-1.0, 2.0]], "has 1 on rank 1 where it has -1 on rank 2. "),
        ([[float("nan"), 2.0], [1.0, 2.0]], ""),
    ],
)
def test_differences_are_relative_to_the_largest_weight(weights: list[list[float]], expected: str) -> None:
    found = difference_of_weights(np.array(weights), range(len(weights)))
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (8,), (50, 7), (2, 3, 5, 7)])
def test_all_weights_are_compared_in_time(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.randn(shape))
    seen = set()
    for step in range(-(-parameter.numel() // WEIGHTS_COMPARED)):
        found = Weights.of("name", parameter, step)
        assert found is not None
        assert found.values.shape == (WEIGHTS_COMPARED,)
        assert found.values.dtype == torch.float64
        seen |= set(found.values.tolist())
    assert seen >= set(parameter.detach().double().flatten().tolist())


def test_weights_in_another_order_or_of_other_kinds_are_left_out() -> None:
    assert Weights.of("name", torch.empty(0, 3), 0) is None
    assert Weights.of("name", torch.randn(3, dtype=torch.complex64), 0) is None
    assert Weights.of("name", torch.randn(4, 8)[:, ::2], 0) is None
    assert Weights.of("name", torch.randn(1).expand(4), 0) is None
    assert Weights.of("name", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), 0) is None
