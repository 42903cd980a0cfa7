"""Checks of the configuration and of the modules before hooks are registered on a model under FSDP2."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed import get_process_group_ranks as ranks_of

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, check_integer
from lightning_gqsgd.frameworks.fsdp_modules import ShardedGroup


def check_request(
    config: GQSGDConfig, replicate: dist.ProcessGroup | None, reduce_scatter: bool, all_gather_bits: int | None
) -> None:
    """Raise ConfigError for a configuration that sharded gradients, or weights, cannot have."""
    if config.chooses_bits:
        name = "auto=True" if config.auto else 'bits="auto"'
        raise ConfigError(f"{name} is for DistributedDataParallel (register_gqsgd); with FSDP2, give bits as a number")
    if replicate is None and not reduce_scatter:
        raise ConfigError(
            "nothing would be compressed: give replicate= (the group of ranks that hold the same shards), "
            "reduce_scatter=True, or both"
        )
    for is_wanted, name, argument in (
        (reduce_scatter, "set_custom_reduce_scatter", "reduce_scatter=True"),
        (all_gather_bits is not None, "set_custom_all_gather", "all_gather_bits"),
    ):
        if is_wanted and not hasattr(torch.distributed.fsdp.FSDPModule, name):
            raise ConfigError(
                f"torch {torch.__version__} has no FSDPModule.{name}, which {argument} needs; the first that has it is "
                "torch 2.9"
            )
    if all_gather_bits is not None:
        if all_gather_bits in (16, 32) and not isinstance(all_gather_bits, bool):
            raise ConfigError(
                f"all_gather_bits={all_gather_bits} is not for floating-point numbers: leave it out, and for 16 bits "
                "give fully_shard mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
            )
        check_integer("all_gather_bits", all_gather_bits, 2, 8)
    if reduce_scatter:
        for one_width in config.by_bits().values():
            if one_width.reducer not in ("auto", "two_shot", "hierarchical"):
                raise ConfigError(
                    f"reduce_scatter=True does not go with reducer={one_width.reducer!r}: take 'auto', 'two_shot' or "
                    "'hierarchical' (so no 16 or 32 bits), or drop reduce_scatter to leave reduce-scatters to torch"
                )
    if config.up is not None or config.down is not None:
        raise ConfigError(
            "memories do not work with sharded gradients: give memory='none' and memory_down='none' (with a biased "
            "codec that is a bias), or train with DistributedDataParallel (register_gqsgd)"
        )


def check_replicas(shards: dist.ProcessGroup, replicate: dist.ProcessGroup | None) -> None:
    """Raise ConfigError for a group of replicas that is the one over which parameters are divided."""
    if replicate is None:
        return
    both = set(ranks_of(replicate)) & set(ranks_of(shards))
    alone = replicate.size() == shards.size() == 1 < dist.get_world_size()
    if len(both) > 1 or alone:
        raise ConfigError(
            f"replicate has the ranks {ranks_of(replicate)}, and parameters are divided among the ranks "
            f"{ranks_of(shards)}: replicas hold the same shards, so give the other dimension of the mesh: "
            "replicate=mesh['replicate']"
        )


def check_groups(groups: list[ShardedGroup], replicate: dist.ProcessGroup | None, *, gathers: bool) -> None:
    """Raise ConfigError for modules that cannot have the hooks; ``gathers``: whether there is an all-gather."""
    for group in groups:
        if replicate is not None and group.replicas is not None and ranks_of(replicate) != ranks_of(group.replicas):
            raise ConfigError(
                f"module {group.name!r} is sharded over a mesh of two dimensions, whose replicas have the ranks "
                f"{ranks_of(group.replicas)}, and replicate has the ranks {ranks_of(replicate)}: give the dimension of "
                "replicas of that mesh: replicate=mesh['replicate']"
            )
        if group.has_hook:
            raise ConfigError(
                f"module {group.name!r} already has an all-reduce hook or a custom reduce-scatter, and FSDP takes one "
                "of each: remove the other registration (a model keeps those of register_gqsgd_fsdp after close(), so "
                "shard a new model)"
            )
        if gathers and group.has_all_gather:
            raise ConfigError(
                f"module {group.name!r} already has an all-gather of its own (set_custom_all_gather, or another memory "
                "for communication), and FSDP takes one: remove it, or leave all_gather_bits out"
            )
