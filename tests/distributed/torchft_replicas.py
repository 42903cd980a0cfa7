"""Replicas for the tests of torchft: what each of their processes does."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bits import bits_of
from tests.distributed.elastic_members import wait_for

SECONDS = timedelta(seconds=1)


def process_group(timeout: timedelta = 30 * SECONDS, **fields: Any) -> Any:
    """torchft's process group over Gloo with quantised all-reduces."""
    from torchft.process_group import ProcessGroupGloo

    from lightning_gqsgd import quantised

    return quantised(ProcessGroupGloo(timeout=timeout), **(fields or {"bits": 4}))


def configure(group: Any, rank: int, ranks: int, port: int, name: str) -> None:
    """Configure a group for some ranks, which meet in a store, as the Manager of torchft's release or nightly does."""
    import torchft.process_group

    if hasattr(torchft.process_group, "reconfigure_with_store"):
        torchft.process_group.reconfigure_with_store(group, f"localhost:{port}/{name}", rank, ranks, 30 * SECONDS)
    else:
        group.configure(f"localhost:{port}/{name}", f"replica{rank}", rank, ranks)


def reduce(group: Any, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """The tensor after an all-reduce."""
    options = dist.AllreduceOptions()
    options.reduceOp = operation
    group.allreduce([tensor], options).wait()
    return tensor


def values(rank: int, numel: int = 20_000, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's tensor, which every rank can compute."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def model() -> nn.Module:
    """A model with parameters that are large enough to travel quantised."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))


class Replica:
    """A replica of one rank, with torchft's Manager.

    Args:
        name: of the replica.
        lighthouse: address of the lighthouse.
        **arguments: for the Manager.
    """

    def __init__(self, name: str, lighthouse: str, **arguments: Any) -> None:
        from torchft.manager import Manager

        torch.manual_seed(sum(map(ord, name)))
        self.model = model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.group = process_group(10 * SECONDS)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=self.group,
            replica_id=name,
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            timeout=20 * SECONDS,
            quorum_timeout=60 * SECONDS,
            lighthouse_addr=lighthouse,
            **{"load_state_dict": self.load, "state_dict": self.state, "min_replica_size": 1, **arguments},
        )

    def state(self) -> dict[str, Any]:
        """The state that a replica gets that joins."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take another replica's state."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def loss(self) -> Tensor:
        """The loss of a batch of this replica's own."""
        return self.model(torch.randn(8, 32)).square().mean()

    def bits(self) -> str:
        """A digest of the parameters."""
        return bits_of(self.model.parameters())


def ddp_with_a_death(rank: int, lighthouse: str, folder: Path) -> dict[int, str]:
    """Replica 1 dies after three steps, without a word; replica 2 joins after that; replica 0 goes on all the time.

    Returns the parameters' bits by step, of steps that two replicas have made together.
    """
    from torchft import DistributedDataParallel, Optimizer

    if rank == 2:
        wait_for((folder / "dead").exists)
    replica = Replica(f"replica{rank}", lighthouse)
    replica.model = DistributedDataParallel(replica.manager, replica.model)
    optimizer = Optimizer(replica.manager, replica.optimizer)
    together: dict[int, str] = {}
    while not (folder / "over").exists():
        optimizer.zero_grad()
        replica.loss().backward()
        optimizer.step()
        if replica.manager.num_participants() == 2:
            together[replica.manager.current_step()] = replica.bits()
        if rank == 1 and len(together) >= 3:
            (folder / "dead").touch()
            os._exit(0)
        if rank == 2 and len(together) >= 3:
            (folder / "over").touch()
    replica.manager.shutdown(wait=False)
    return together


def local_steps(rank: int, lighthouse: str, kind: str) -> tuple[str, int]:
    """Two replicas with torchft's LocalSGD or DiLoCo; returns the bits that both share, and those that were sent."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    replica = Replica(f"replica{rank}", lighthouse, min_replica_size=2, use_async_quorum=False)
    if kind == "LocalSGD":
        averaging: Any = LocalSGD(replica.manager, replica.model, replica.optimizer, sync_every=2)
    else:
        outer = torch.optim.SGD(replica.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        averaging = DiLoCo(replica.manager, [replica.model], replica.optimizer, outer, sync_every=2)
    with averaging:
        while replica.manager.current_step() < 3:
            replica.optimizer.zero_grad()
            replica.loss().backward()
            replica.optimizer.step()
    sent = sum(counters.bytes_sent for counters in replica.group.telemetry.buckets.values())
    replica.manager.shutdown(wait=False)
    return replica.bits(), sent


def sharded(rank: int, lighthouse: str, folder: Path) -> str:
    """Two replicas of a model that FSDP2 shards inside of a replica; returns the bits that both share."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchft import Optimizer

    dist.init_process_group("gloo", init_method=f"file://{folder}/inside{rank}", rank=0, world_size=1)
    try:
        replica = Replica(f"replica{rank}", lighthouse, min_replica_size=2)
        fully_shard(replica.model, mesh=init_device_mesh("cpu", (1,)))
        replica.model.set_all_reduce_hook(lambda gradients: replica.manager.allreduce(gradients).wait())
        replica.optimizer = torch.optim.SGD(replica.model.parameters(), lr=0.05)
        optimizer = Optimizer(replica.manager, replica.optimizer)
        while replica.manager.current_step() < 3:
            optimizer.zero_grad()
            replica.loss().backward()
            optimizer.step()
        assert replica.group.telemetry.buckets
        replica.manager.shutdown(wait=False)
        return bits_of(parameter.to_local() for parameter in replica.model.parameters())
    finally:
        dist.destroy_process_group()
