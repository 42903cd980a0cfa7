"""Checkpoints that version 0.1.0 wrote before its modules moved load, and training goes on to the bits of that version.

`tests/checkpoints` has them: the state of rank 0 of two after 5 steps, with the weights, and the weights after 8 steps.
With local steps, rank 1 starts from the anchor of that state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import LocalSteps, register_gqsgd
from tests.distributed.ranks import on_ranks

FOLDER = Path(__file__).parents[1] / "checkpoints"

#: Configurations by the name of the file.
HOOKS: dict[str, dict[str, Any]] = {
    "hook": {"bits": 8, "seed": 3},
    "memory": {"preset": "dore"},
    "auto": {"auto": True},
    "by_name": {"bits": {"*": 4, "0.*": 8}},
}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def _read(name: str) -> dict[str, Any]:
    return torch.load(FOLDER / f"{name}.pt", weights_only=True)


def _plain(weights: dict[str, Tensor]) -> dict[str, list[Any]]:
    """Weights as lists, which processes can send each other."""
    return {name: value.tolist() for name, value in weights.items()}


@on_ranks(2)
def test_states_of_the_first_version_go_on_to_the_same_bits(rank: int) -> dict[str, tuple[int, dict[str, list[Any]]]]:
    results = {}
    for name, fields in HOOKS.items():
        saved = _read(name)
        module = _network()
        module.load_state_dict(saved["model"])
        model = DistributedDataParallel(module)
        state = register_gqsgd(model, min_numel=1, **fields)
        state.load_state_dict(saved["gqsgd"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5, 8):
            _step(model, optimizer, rank, step)
        results[name] = (state.step, _plain(module.state_dict()))
        state.close()

    module = _network()
    local = LocalSteps(module, torch.optim.SGD(module.parameters(), lr=0.1), every=3, bits=8, min_numel=1)
    local.load_state_dict(_read("local_steps")["optimizer"])
    for step in range(5, 8):
        _step(module, local, rank, step)
    local.finish()
    results["local_steps"] = (local.averages.step, _plain(module.state_dict()))
    local.close()
    for name, (step, weights) in results.items():
        assert step == 8, name
        if name != "auto":  # its decisions follow the time
            assert weights == _plain(_read(f"{name}_later")), name
    return results
