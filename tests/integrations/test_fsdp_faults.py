"""What FSDP2 with quantised reductions refuses, and how it ends where ranks do not agree or die."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.frameworks.fsdp import register_gqsgd_fsdp
from lightning_gqsgd.wire.communicator import CollectiveError
from tests.distributed.models import mlp, train
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text
from tests.integrations.fsdp_models import mesh, needs_fsdp_hooks, once, quantised, sharded

pytestmark = needs_fsdp_hooks


def _errors(rank: int) -> list[str]:
    on = mesh(2)
    texts = []

    def fails(call: Callable[[], Any]) -> None:
        texts.append(error_text(ConfigError, call))

    for odd in range(4):  # whoever differs, all hear of it
        fails(lambda odd=odd: quantised(on, {"bits": 4 if rank == odd else 8}))
    fails(lambda: quantised(on, {"seed": rank // 2}))
    fails(lambda: quantised(on, {"reduce_scatter": rank == 1}))
    fails(lambda: quantised(on, {}, mlp(width=128 if rank < 2 else 64)))
    for odd in range(4):
        model = mlp()
        with torch.no_grad():
            model[2].bias[::2] += rank == odd  # shards are halves: of one of them, its replica differs
        model, _ = quantised(on, {}, model)
        fails(lambda model=model: once(model, rank))
    return texts


@pytest.mark.slow
def test_ranks_that_do_not_agree_all_raise(tmp_path: Path) -> None:
    ranks = run(_errors, 4, tmp_path)
    assert all("do not agree" in text for texts in ranks for text in texts)
    texts = ranks[0]
    assert "bits: 4 != 8" in texts[0]
    assert "seed: 0 != 1" in texts[4]
    assert "reduce_scatter: false != true" in texts[5]
    assert "parameters: " in texts[6]
    assert all("values of parameters (replicas have to start alike)" in text for text in texts[7:])


@on_ranks(4)
def test_what_cannot_work_is_refused(rank: int) -> None:
    on = mesh(2)

    def refuses(text: str, model: nn.Module | None = None, **arguments: Any) -> None:
        model = model or sharded(on["shard"])
        with pytest.raises(ConfigError, match=text):
            register_gqsgd_fsdp(model, **arguments)

    replicas = {"replicate": on["replicate"]}
    refuses("no module of this Sequential is sharded; apply fully_shard first", mlp(), **replicas)
    refuses("nothing would be compressed: give replicate=")
    refuses("replicate has 2 dimensions; give the mesh of replicas", replicate=on)
    refuses("replicas hold the same shards, so give the other dimension", replicate=on["shard"])
    refuses("is neither a process group nor a mesh; give the mesh", replicate="replicate")
    alone = mesh(4)  # each rank has all parameters
    refuses("replicas hold the same shards", sharded(alone["shard"]), replicate=alone["shard"])
    refuses("timeout=5 must be a positive", timeout=5, **replicas)
    crosswise = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    other = crosswise[dist.get_rank() in (1, 2)]
    refuses("mesh of two dimensions, whose replicas have the ranks .*give the dimension", sharded(on), replicate=other)
    refuses("memories do not work with sharded gradients: give memory='none'", preset="signsgd_ef", **replicas)
    refuses("does not go with reducer='sum': take 'auto'", reducer="sum", reduce_scatter=True)
    refuses("does not go with reducer='native'", reducer="native", reduce_scatter=True)
    refuses("scale='global' does not fit reducer='two_shot'", scale="global", reduce_scatter=True, **replicas)
    refuses("auto=True is for DistributedDataParallel", auto=True, **replicas)
    refuses('bits="auto" is for DistributedDataParallel', max_slowdown=0.1, **replicas)
    refuses("not for FSDP2, which has dense gradients only", sparse="gather", **replicas)
    refuses("unknown field 'bit'; did you mean 'bits'", bit=4, **replicas)
    refuses("exclude patterns .* match no parameter", exclude=("*.wait",), **replicas)
    refuses("bits patterns .* match no parameter", bits={"*": 8, "*.wait": 4}, **replicas)
    refuses("does not go with reducer='bf16'.*no 16 or 32 bits", bits={"*": 8, "0.*": 16}, reduce_scatter=True)
    model, _ = quantised(on, {})
    refuses("module 'the root' already has an all-reduce hook", model, **replicas)
    model = sharded(on["shard"])
    state = register_gqsgd_fsdp(model, reduce_scatter=True)
    refuses("module 'the root' already has an all-reduce hook or a custom reduce-scatter", model, reduce_scatter=True)
    with pytest.raises(TypeError, match="is not copied or pickled: save state_dict"):
        copy.deepcopy(state)
    state.close()
    refuses(r"after close\(\), so shard a new model", model, reduce_scatter=True)
    later = fully_shard(mlp(), mesh=on["shard"])
    later[2] = nn.Identity()
    refuses(r"2 parameters \('weight of a Linear', 'bias of a Linear'\) .* cannot be found in this", later, **replicas)
    later = fully_shard(mlp(), mesh=on["shard"])
    later[2].bias = None
    refuses(r"1 parameter \('bias of a Linear'\) .*: change a model before fully_shard", later, **replicas)
    grouped = mlp()
    fully_shard([grouped[0], grouped[2]], mesh=on["shard"])
    refuses("a model that has all modules of each fully_shard", grouped[0], **replicas)
    apart = mlp()
    fully_shard(apart[0], mesh=on["shard"])
    fully_shard(apart, mesh=on["replicate"])
    two = r"\[\d, \d\] and \[\d, \d\]"
    refuses(f"several process groups, here over the ranks {two}: .* with mesh=", apart, reduce_scatter=True)
    everyone = dist.group.WORLD
    refuses(rf"mesh has the ranks \[0, 1, 2, 3\], and .* {two}", apart, mesh=everyone, reduce_scatter=True)
    refuses("mesh='shard' is neither", mesh="shard", **replicas)
    three = init_device_mesh("cpu", (1, 2, 2))
    refuses("mesh has 3 dimensions; give the one that fully_shard was given", mesh=three, **replicas)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "set_custom_reduce_scatter")
        refuses("has no FSDPModule.set_custom_reduce_scatter, .* torch 2.9", reduce_scatter=True)


def _dies(rank: int) -> tuple[str, bool]:
    model, state = quantised(mesh(2), {})
    once(model, rank)
    if rank == 1:
        os._exit(7)
    buffer = torch.ones(100)
    try:
        for _ in range(3):
            state.average(state._groups[0], buffer)
    except CollectiveError as error:
        return str(error), bool(buffer.isnan().all())
    return "no error", False


@pytest.mark.slow
def test_a_replica_that_dies_is_an_error(tmp_path: Path) -> None:
    (text, nan), _ = run(_dies, 2, tmp_path, dies=(1,), collective_timeout=10)
    assert "all-reduce of the root, number" in text
    assert "failed on rank 0 of 2" in text
    assert nan


@pytest.mark.slow
@on_ranks(4)
def test_threads_end_with_the_model(rank: int) -> None:
    model, state = quantised(mesh(2), {"reduce_scatter": True})
    train(model, rank, range(2))
    del model, state
    gc.collect()
    assert "gqsgd-sequencer" not in [thread.name for thread in threading.enumerate()]


def _sharded_later(rank: int) -> list[str]:
    """A root that is sharded after hooks were installed, and a layer that is added after steps."""
    on = mesh(2)
    model = mlp()
    fully_shard(model[2], mesh=on["shard"])
    register_gqsgd_fsdp(model, replicate=on["replicate"], bits=4)
    fully_shard(model, mesh=on["shard"])
    texts = [error_text(ConfigError, once, model, rank)]

    model = mlp()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=on["shard"])
    register_gqsgd_fsdp(model, replicate=on["replicate"], bits=4)
    once(model, rank)
    model.append(nn.Linear(10, 10))
    fully_shard(model[-1], mesh=on["shard"])
    return [*texts, error_text(ConfigError, once, model, rank)]


def test_what_is_sharded_after_hooks_were_installed_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for root, layer in run(_sharded_later, 4, tmp_path):
        assert "1 module ('the root') became sharded after register_gqsgd_fsdp" in root
        assert "after the last fully_shard" in layer
