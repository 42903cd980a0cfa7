"""Models that `fully_shard` or tensor parallelism has divided among the ranks of one replica.

Each rank then trains a part of each parameter, its shard. Local steps average over the ranks that have the same shard,
one of each replica. An average in which one shard is not finite is left out by the ranks of all shards, so that a model
never has some shards from before an average and some from after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.first_rank import take_from_first_rank


def is_divided(tensor: Tensor) -> bool:
    """Returns whether a tensor is divided among ranks (a DTensor)."""
    return hasattr(tensor, "device_mesh")


def own_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this rank has, in the same memory: the tensor itself if it is not divided."""
    if not is_divided(tensor):
        return tensor
    part: Tensor = cast(Any, tensor.detach()).to_local()
    return part


def sum_of_bits(part: Tensor) -> Tensor:
    """Returns the sum of a tensor's bits, taken as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
    return part.detach().contiguous().view(integers).sum(dtype=torch.int64)


def divided_like(whole: Tensor, part: Tensor) -> Tensor:
    """Returns a copy of a tensor that belongs to this rank's part of ``whole``, divided among ranks as ``whole`` is."""
    copy = torch.empty_like(whole.detach(), dtype=part.dtype, device=part.device)
    own_part(copy).copy_(part)
    return copy


def number_of_part(tensor: Tensor) -> int:
    """Returns the number of this rank's part among the different parts of a tensor.

    Ranks that all have the whole tensor, such as a norm under tensor parallelism, have number 0, because they have to
    round it alike.
    """
    if not is_divided(tensor):
        return 0
    divided: Any = tensor
    number = 0
    for dimension, (placement, own) in enumerate(
        zip(divided.placements, divided.device_mesh.get_coordinate(), strict=True)
    ):
        if not placement.is_replicate():
            number = number * divided.device_mesh.size(dimension) + own
    return number


@dataclass(frozen=True)
class Sharding:
    """How the parameters of a model are divided among the ranks of one replica.

    Attributes:
        place: number of this rank's shard.
        size: number of shards; 1 if parameters are not divided.
        groups: process groups that connect all ranks of the replica, one after the other.
        device: device of the parameters; None if parameters are not divided.
    """

    place: int = 0
    size: int = 1
    groups: tuple[dist.ProcessGroup, ...] = ()
    device: torch.device | None = None

    @property
    def is_divided(self) -> bool:
        """Whether parameters are divided, be it among one rank only."""
        return self.device is not None

    @property
    def shard(self) -> str:
        """Which shard this rank has, in words."""
        return f"shard {self.place} of {self.size}"

    def all_have(self, own: bool) -> bool:
        """Returns whether ``own`` is true for all shards. A collective on the ranks of the replica."""
        if not self.groups:
            return own
        flag = torch.tensor([float(own)], device=self.device)
        for group in self.groups:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def agree(self, number: int) -> bool:
        """Returns whether all shards have the same number. A collective on the ranks of the replica."""
        both = torch.tensor([number, -number], device=self.device)
        for group in self.groups:
            dist.all_reduce(both, dist.ReduceOp.MIN, group=group)
        return bool(both[0] == -both[1])

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Give tensors the values that they have on the rank of the first shard. A collective on the ranks of the
        replica."""
        for tensor in tensors:
            moved = tensor.to(self.device)
            for group in self.groups:
                take_from_first_rank([moved], group)
            tensor.copy_(moved)

    def sum_of_bits(self, tensors: Iterable[Tensor]) -> int:
        """Returns a sum over the bits of some tensors of the model, with all their parts. A collective on the ranks of
        the replica.

        The sum does not depend on how tensors are divided over one dimension of a mesh.
        """
        sums = [sum_of_bits(own_part(tensor)) for tensor in tensors if is_divided(tensor) or self.place == 0]
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for one in sums:
            total += one.to(self.device)
        for group in self.groups:
            dist.all_reduce(total, group=group)
        return int(total)


#: Parameters that are not divided.
WHOLE = Sharding()


def sharding_of(model: nn.Module, group: dist.ProcessGroup) -> Sharding:
    """Returns how the parameters of a model are divided, of which at least one is. ``group`` has the ranks that
    average, one of each replica.

    Raises:
        ConfigError: if parameters are divided among ranks of ``group``, or over meshes of which neither contains the
            other.
    """
    found: dict[Any, str] = {}
    for name, parameter in model.named_parameters():
        if is_divided(parameter):
            found.setdefault(cast(Any, parameter).device_mesh, name)
    # With tensor parallelism, some parameters are on a mesh that contains the mesh of the others.
    mesh = max(found, key=lambda one: one.size())
    ranks = _ranks_of(mesh)
    for other, name in found.items():
        if not _ranks_of(other) <= ranks:
            raise ConfigError(
                f"parameters {found[mesh]!r} and {name!r} are sharded over different ranks of a replica, "
                f"{sorted(ranks)} and {sorted(_ranks_of(other))}; local steps need one mesh, or one that contains the "
                "other"
            )
    common = sorted(ranks.intersection(dist.get_process_group_ranks(group)))
    if len(common) > 1:
        raise ConfigError(
            f"parameter {found[mesh]!r} is sharded over a mesh of the ranks {sorted(ranks)}, and local steps would "
            f"average over {common} of them: those have different shards, or average in every step already. Shard over "
            "the inner dimension of a mesh, fully_shard(model, mesh=mesh['shard']), and give LocalSteps the outer one, "
            "group=mesh['replicate'].get_group()"
        )
    place = 0
    for dimension, own in enumerate(mesh.get_coordinate()):
        place = place * mesh.size(dimension) + own
    groups = tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim) if mesh.size(dimension) > 1)
    return Sharding(place, mesh.size(), groups, next(model.parameters()).device)


def _ranks_of(mesh: Any) -> set[int]:
    return set(mesh.mesh.flatten().tolist())


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 has kept after a forward pass, which would hide changes of the shards."""
    for module in model.modules():
        # Only FSDP2's modules have both.
        if hasattr(module, "reshard") and hasattr(module, "set_reshard_after_forward"):
            cast(Any, module).reshard()
