"""torch.compile around a whole train step, whose backward pass calls the hook."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.functional import Reduction, all_reduce, close
from lightning_gqsgd.ddp.hook import register_gqsgd
from tests.distributed.models import batch, fingerprint, mlp
from tests.distributed.ranks import on_ranks


def _trained(rank: int, hook: dict[str, Any], compiles: bool) -> str:
    model = DistributedDataParallel(mlp())
    state = register_gqsgd(model, **hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = torch.compile(step, backend="eager") if compiles else step
    for number in range(4):
        compiled(*batch(rank, number))
    assert state.step == 4
    state.close()
    return fingerprint(model)


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_step_has_the_bits_of_one_that_is_not(rank: int) -> None:
    for hook in ({"bits": 4}, {"preset": "signsgd_ef"}, {"auto": True}):
        assert _trained(rank, hook, compiles=True) == _trained(rank, hook, compiles=False)


@on_ranks(2)
def test_all_reduce_in_a_compiled_function(rank: int) -> list[float]:
    def mean(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x * 2, bits=8, step=3).sum()

    def later(x: torch.Tensor) -> torch.Tensor:
        reduction = all_reduce(x * 2, bits=8, step=3, async_op=True)
        assert isinstance(reduction, Reduction)
        return reduction.wait().sum()

    x = torch.arange(2000) + float(rank)
    results = [float(torch.compile(call, backend="eager")(x)) for call in (mean, later)]
    expected = float(mean(x))
    close()
    assert results == [expected, expected]
    return results


@pytest.mark.slow
def test_importing_what_is_not_traced_does_not_import_dynamo() -> None:
    code = "import torch, sys; before = set(sys.modules); "
    code += "import lightning_gqsgd.ddp.functional, lightning_gqsgd.ddp.hook; "
    code += "sys.exit('torch._dynamo' in set(sys.modules) - before)"
    subprocess.run([sys.executable, "-c", code], check=True)
