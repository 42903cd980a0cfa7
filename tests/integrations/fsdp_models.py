"""Models that FSDP2 shards, on meshes of CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from tests.bits import bits_of
from tests.distributed.models import loss_of, mlp

#: FSDP2 before torch 2.9 averages by what Gloo does not have, and takes no reduce-scatter and no all-gather.
needs_fsdp_hooks = pytest.mark.skipif(not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch before 2.9")


def mesh(replicas: int) -> DeviceMesh:
    """All ranks, as so many replicas."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(on: DeviceMesh, model: nn.Module | None = None, **policy: Any) -> nn.Module:
    """The model, sharded layer by layer; the last layer is the root's."""
    model = model or mlp()
    for layer in list(model.children())[:-1]:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=on, **policy)
    return fully_shard(model, mesh=on, **policy)


def quantised(
    on: DeviceMesh, hooks: dict[str, Any], model: nn.Module | None = None, **policy: Any
) -> tuple[nn.Module, GQSGDFSDPState]:
    """The model, sharded inside of replicas, with quantised means over them."""
    model = sharded(on["shard"], model, **policy)
    return model, register_gqsgd_fsdp(model, replicate=on["replicate"], **hooks)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name."""
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}


def padded() -> nn.Sequential:
    """Layers whose outputs two shards cannot share evenly; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 65), nn.ReLU(), nn.Linear(65, 11))


def relative_errors(model: nn.Module, exact: dict[str, Tensor]) -> dict[str, float]:
    """Of each gradient."""
    found = gradients(model)
    return {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}


def weight_bits(model: nn.Module) -> str:
    """Of all parameters."""
    return bits_of(p.full_tensor() for p in model.parameters())


def once(model: nn.Module, rank: int) -> None:
    loss_of(model, rank, 0).backward()
