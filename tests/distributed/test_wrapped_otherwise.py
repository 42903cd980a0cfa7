"""Models whose gradients something averages already: no error proposes to wrap them a second time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import register_gqsgd, register_gqsgd_fsdp
from lightning_gqsgd.errors import ConfigError
from tests.distributed.models import mlp
from tests.distributed.ranks import on_ranks


def _replicate() -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(mlp())


def _replicate_with_fsdp() -> nn.Module | None:
    try:
        from torch.distributed._composable.replicate_with_fsdp import replicate
    except ImportError:  # an older torch
        return None
    model = mlp()
    replicate(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _fsdp1() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))


def _fsdp2() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(mlp(), mesh=init_device_mesh("cpu", (2,)))


#: How a model is wrapped, and the remedies of `register_gqsgd` and of `register_gqsgd_fsdp`; None: that one takes it.
WRAPPED: list[tuple[Callable[[], nn.Module | None], str | None, str | None]] = [
    (
        _replicate,
        r"it averages .* by replicate\(\) already.*: leave replicate\(\) out",
        "sharded by fully_shard: it av",
    ),
    (_replicate_with_fsdp, r"replicate\(\) already.*: leave replicate\(\) out", r"is sharded: it averages.*leave repl"),
    (_fsdp1, r"FSDP1\) already.*: leave that wrapper out, and use fully_shard", "leave that wrapper out, and use full"),
    (_fsdp2, "sharded by fully_shard already: call register_gqsgd_fsdp instead, without Dist", None),
    (lambda: DistributedDataParallel(mlp()), None, "call register_gqsgd on that DistributedDataParallel model itself"),
    (
        lambda: nn.Sequential(DistributedDataParallel(mlp())),
        "its module '0' is one: call register_gqsgd on that Dist",
        "its module '0' is one",
    ),
    (
        lambda: nn.DataParallel(mlp()),
        r"inside of it instead: DistributedDataParallel\(model.module\)",
        "start a process",
    ),
    (mlp, r"wrap it first: DistributedDataParallel\(model\)", "apply fully_shard first"),
]


@on_ranks(2)
def test_the_remedy_does_not_wrap_a_model_twice(rank: int) -> None:
    for make, text, text_fsdp in WRAPPED:
        model = make()
        for register, expected in ((register_gqsgd, text), (register_gqsgd_fsdp, text_fsdp)):
            if model is not None and expected is not None:
                with pytest.raises(ConfigError, match=expected) as error:
                    register(model, bits=8)
                assert ("wrap it first" in str(error.value)) == ("wrap it first" in expected)
