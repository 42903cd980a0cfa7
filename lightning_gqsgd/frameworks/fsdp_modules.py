"""The modules of a model under FSDP2: which parameters are reduced together, and where they are in memory.

This module alone reads torch's private structures. FSDP reduces gradients in flat tensors. Such a tensor is a row: the
shards of a module's parameters one after the other, each padded to the same size on every rank. Before the
reduce-scatter, a flat tensor has a row for every rank.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.checks import wrapped_otherwise
from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.sharding import sum_of_bits
from lightning_gqsgd.session.parameters import Parameter, number_parameters
from lightning_gqsgd.wire.agreement import Weights

logger = logging.getLogger(__name__)

#: Largest number of lengths of selections of parameters that `present` compares.
MOST_LENGTHS = 1 << 12

#: Where FSDP has its all-reduce hook, its reduce-scatter and its all-gather; torch before 2.9 has only the first.
_HOOKS = ("_all_reduce_hook", "_reduce_scatter_comm", "_all_gather_comm")


@dataclass(frozen=True)
class ShardedParameter(Parameter):
    """A parameter that is divided among ranks.

    Attributes:
        share: coordinates of one shard, padding included; the same on every rank.
    """

    share: int = field(kw_only=True)


class Partial(NamedTuple):
    """Gradients that are not averaged over replicas yet.

    Attributes:
        gradients: flat.
        parameters: those whose gradients they are, in order.
    """

    gradients: Tensor
    parameters: list[ShardedParameter]


class ShardedGroup:
    """The parameters whose gradients FSDP reduces together.

    Attributes:
        index: its place among the model's groups.
        name: of the module; with a number if FSDP reduces the module's parameters in several groups.
        parameters: in FSDP's order.
        device: of the gradients.
        shards: the process group that the parameters are divided among.
        replicas: the process group over which torch itself averages afterwards; None: torch averages over none.
    """

    def __init__(self, index: int, name: str, module: Any, inner: Any, parameters: list[ShardedParameter]) -> None:
        self.index = index
        self.name = name
        self.parameters = parameters
        self.device: torch.device = inner.device
        self.shards: dist.ProcessGroup = inner.mesh_info.shard_process_group
        self.replicas: dist.ProcessGroup | None = getattr(inner.mesh_info, "replicate_process_group", None)
        self._own_partials: dict[Any, Partial] = {}
        # hooks must not keep the model alive
        self._state = weakref.ref(module._get_fsdp_state())
        self._inner = weakref.ref(inner)

    def leave_replicas_to_hook(self) -> None:
        """Let torch no longer average over replicas itself, if the module is sharded over a mesh of two dimensions.

        FSDP then takes the module for one that is sharded over the inner dimension only. Its parameters stay DTensors
        on both dimensions, for checkpoints and norms.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        if self.replicas is None:
            return
        inner = self.inner
        info = inner.mesh_info
        names = [field.name for field in fields(info) if field.init and field.name != "replicate_mesh_dim"]
        alone = FSDPMeshInfo(**{name: getattr(info, name) for name in names})
        # The group of set_separate_reduce_scatter_group, which torch 2.15 has.
        if hasattr(info, "reduce_scatter_process_group"):
            alone.reduce_scatter_process_group = info.reduce_scatter_process_group
        # FSDP compares the two meshes, which are equal unless a forward pass leaves weights on other ranks.
        if inner.post_forward_mesh_info is info:
            inner.post_forward_mesh_info = alone
        inner.mesh_info = alone
        self.replicas = None

    @property
    def inner(self) -> Any:
        """FSDP's own object, an `FSDPParamGroup`."""
        return _alive(self._inner)

    @property
    def awaits_end(self) -> bool:
        """True from when FSDP begins a backward pass until it ends it, also if an exception has ended the pass before.
        False before the first forward pass."""
        context = _alive(self._state)._state_ctx
        return bool(getattr(context, "post_backward_final_callback_queued", False))

    @property
    def partial(self) -> Partial | None:
        """This rank's gradients that wait for a backward pass that reduces over replicas."""
        return self._partials.get(self)

    def keep(self, gradients: Tensor | None) -> None:
        """Set `partial`: to gradients of the parameters that require one now, or to None."""
        self._partials.pop(self, None)
        if gradients is not None:
            self._partials[self] = Partial(gradients, self.reduced())

    @property
    def _partials(self) -> dict[Any, Partial]:
        """The dictionary that has `partial`.

        FSDP's `reset_iter_state` drops the gradients of a step that an exception has ended. It calls no hook, and
        clears this dictionary of FSDP, which FSDP itself uses only where it averages over replicas. An older torch has
        neither.
        """
        partials: dict[Any, Partial] = getattr(self.inner, "_partial_reduce_output_layout", self._own_partials)
        return partials

    @property
    def has_hook(self) -> bool:
        """True if an all-reduce hook or a reduce-scatter is set already."""
        all_reduce, reduce_scatter, _ = self.hooks
        return all_reduce is not None or type(reduce_scatter).__name__ not in ("DefaultReduceScatter", "NoneType")

    @property
    def has_all_gather(self) -> bool:
        """True if an all-gather other than torch's own is set already."""
        return type(self.hooks[-1]).__name__ not in ("DefaultAllGather", "NoneType")

    @property
    def hooks(self) -> tuple[Any, Any, Any]:
        """The all-reduce hook, the reduce-scatter and the all-gather that FSDP calls now."""
        all_reduce, reduce_scatter, all_gather = (getattr(self.inner, name, None) for name in _HOOKS)
        return all_reduce, reduce_scatter, all_gather

    @property
    def trained(self) -> str:
        """What ranks have to have in common in each step: which of the parameters require a gradient now, 1 or 0 for
        each; the dtypes of the shards; and the divisor of sums, see `divisor`."""
        shards = [param.sharded_param for param in self.inner.fsdp_params]
        flags = "".join("1" if shard.requires_grad else "0" for shard in shards)
        return f"{flags} {[*dict.fromkeys(shard.dtype for shard in shards)]} {self.divisor}"

    @property
    def divisor(self) -> float | None:
        """The divisor of sums that the user has set instead of the number of ranks; None: there is none."""
        # torch 2.7 has no such attribute.
        divisor: float | None = getattr(self.inner, "gradient_divide_factor", None)
        return divisor

    @property
    def used(self) -> str:
        """Which of the parameters have a gradient now: 1 or 0 for each."""
        return "".join("0" if param.sharded_param.grad is None else "1" for param in self.inner.fsdp_params)

    def reduced(self) -> list[ShardedParameter]:
        """Returns the parameters that require a gradient now, in the order of FSDP's flat tensors."""
        inner = self.inner
        # torch 2.15 puts parameters whose gradients have one dtype together.
        order = getattr(inner, "_reduce_scatter_param_indices", None) or range(len(self.parameters))
        return [self.parameters[i] for i in order if inner.fsdp_params[i].sharded_param.requires_grad]

    def set_hooks(self, hooks: Sequence[Any]) -> None:
        """Set `hooks`; None leaves one as it is.

        FSDP's own setters refuse modules of which it reduces the parameters in several groups.
        """
        for name, hook in zip(_HOOKS, hooks, strict=True):
            if hook is not None:
                setattr(self.inner, name, hook)

    def weights(self, number: int, step: int) -> Weights | None:
        """Returns some weights of this rank's shard of a parameter, others in each step, for replicas to compare."""
        shard = dist.get_rank(self.shards)
        name = f"{self.parameters[number].name} (shard {shard})"
        return Weights.of(name, self.inner.fsdp_params[number].sharded_param.to_local(), step)

    def bit_sums(self) -> list[int]:
        """Returns the sum of the bits of this rank's shard of each parameter. Waits for the device."""
        return torch.stack([sum_of_bits(param.sharded_param.to_local()) for param in self.inner.fsdp_params]).tolist()


def shard_group(model: nn.Module, wanted: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the process group that the parameters of a model are divided among. If there are several, ``wanted`` is
    one of them.

    Raises:
        ConfigError: no module is sharded; hooks cannot be installed for the way in which modules are sharded; modules
            are sharded over several process groups, and ``wanted`` is None; or none is sharded over ``wanted``.
    """
    triples = _param_groups(model)
    if not triples:
        remedy = wrapped_otherwise(model)
        why = f" by fully_shard: {remedy}" if remedy else "; apply fully_shard first"
        raise ConfigError(f"no module of this {type(model).__name__} is sharded{why}")
    if any(not hasattr(inner.mesh_info, "shard_process_group") for _, _, inner in triples):
        raise ConfigError(f"no module of this {type(model).__name__} is sharded: {wrapped_otherwise(model)}")
    found = list(dict.fromkeys(inner.mesh_info.shard_process_group for _, _, inner in triples))
    ranks = " and ".join(str(dist.get_process_group_ranks(group)) for group in found)
    if wanted is None and len(found) > 1:
        raise ConfigError(
            f"the parameters are sharded over several process groups, here over the ranks {ranks}: call "
            "register_gqsgd_fsdp once for each of them, with mesh= as in fully_shard"
        )
    if wanted is not None and wanted not in found:
        raise ConfigError(
            f"mesh has the ranks {dist.get_process_group_ranks(wanted)}, and the parameters of this "
            f"{type(model).__name__} are sharded over the ranks {ranks}: give the mesh of their fully_shard"
        )
    return wanted or found[0]


def sharded_groups(model: nn.Module, config: GQSGDConfig, ranks: dist.ProcessGroup) -> list[ShardedGroup]:
    """Returns the groups of a model whose parameters are divided among some ranks, in order.

    Raises:
        ConfigError: a sharded parameter is not in the model; or an exclude pattern matches no parameter.
    """
    triples = _param_groups(model)
    # Parameters are numbered among all of the model, so that those that other ranks reduce have other numbers.
    parameters = _named(model, [inner for _, _, inner in triples])
    whole = {name: param.sharded_param for name, param in parameters.items()}
    sharded = {
        id(parameters[entry.name]): ShardedParameter(
            **vars(entry), share=parameters[entry.name].padded_sharded_param_size.numel()
        )
        for entry in number_parameters(whole, config)
    }
    return [
        ShardedGroup(index, name or "the root", module, inner, [sharded[id(param)] for param in inner.fsdp_params])
        for index, (name, module, inner) in enumerate(
            triple for triple in triples if triple[2].mesh_info.shard_process_group is ranks
        )
    ]


def seen_groups(model: nn.Module) -> weakref.WeakSet[Any]:
    """Returns FSDP's objects for the groups of a model, and does not keep the model alive."""
    return weakref.WeakSet(inner for _, _, inner in _param_groups(model))


def sharded_since(model: nn.Module, seen: weakref.WeakSet[Any]) -> list[str]:
    """Returns the names of the modules that were sharded since `seen_groups` was called."""
    return [name or "the root" for name, _, inner in _param_groups(model) if inner not in seen]


def not_averaged(group: ShardedGroup) -> list[str]:
    """Returns the names of trained modules under the same root that are sharded over the same ranks, and that neither
    FSDP nor a hook averages over replicas. FSDP knows a root's modules once its first forward pass has begun."""
    return [
        getattr(inner, "_module_fqn", None) or "the root"
        for state in getattr(_alive(group._state)._state_ctx, "all_states", [])
        for inner in _of_state(state)
        if getattr(inner.mesh_info, "shard_process_group", None) is group.shards
        and getattr(inner.mesh_info, "replicate_process_group", None) is None
        and getattr(inner, _HOOKS[0], None) is None
        and any(param.sharded_param.requires_grad for param in inner.fsdp_params)
    ]


def unreduced_parameters(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Returns the parameters whose gradients FSDP does not reduce: name and object of their module, and their name
    there."""
    reduced = {
        (id(module), name)
        for _, _, inner in _param_groups(model)
        for param in inner.fsdp_params
        for module, name in _owners(param)
    }
    return [
        (name, module, parameter)
        for name, module in model.named_modules()
        for parameter, value in module._parameters.items()
        if value is not None and (id(module), parameter) not in reduced
    ]


def row(parameters: list[ShardedParameter], shard: int, shards: int, choices: Mapping[int, int]) -> list[Segment]:
    """Returns the segments of the flat tensor of one rank's shards.

    Shards of a parameter are numbered apart, so that no two coordinates of a model have the same dither.

    Args:
        parameters: in order.
        shard: number of the rank among those that parameters are divided among.
        shards: number of those ranks.
        choices: number of the configuration by its bits, see `layout.Segment`.
    """
    return [
        Segment(p.number * shards + shard, p.share, p.raw, 0 if p.bits is None else choices[p.bits]) for p in parameters
    ]


def present(parameters: Sequence[ShardedParameter], numel: int) -> list[ShardedParameter] | None:
    """Returns the parameters whose shards are in a row of ``numel`` coordinates, if only one selection has this length;
    otherwise None.

    FSDP leaves out parameters that got no gradient, and does not tell which.

    Args:
        parameters: those that may be in the row, in order.
        numel: coordinates of the row.
    """
    places = _places(tuple(parameter.share for parameter in parameters), numel)
    return None if places is None else [parameters[place] for place in places]


@lru_cache(maxsize=1 << 12)  # each step asks again for each module
def _places(shares: tuple[int, ...], numel: int) -> tuple[int, ...] | None:
    """Returns the places of the shares, without empty ones, whose sum is ``numel``; None if several selections have
    this sum, if none has, or if there are too many sums to look at."""
    every = tuple(place for place, share in enumerate(shares) if share)
    if numel == sum(shares):  # no other selection is as long
        return every
    found: dict[int, list[tuple[int, ...]]] = {0: [()]}  # two selections of each length at most
    for place in every:
        for length in sorted(found, reverse=True):  # no selection takes a share twice
            longer = length + shares[place]
            known = found.get(longer, [])
            if longer <= numel and len(known) < 2:
                more = [(*selection, place) for selection in found[length]]
                found[longer] = [*known, *more][:2]
        if len(found) > MOST_LENGTHS:
            return None
    selections = found.get(numel, [])
    return selections[0] if len(selections) == 1 else None


def _param_groups(model: nn.Module) -> list[tuple[str, Any, Any]]:
    """Returns name, module and FSDP's object for each group of parameters that FSDP reduces together."""
    from torch.distributed.fsdp import FSDPModule

    triples = []
    seen = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        if id(state) in seen:  # several modules can be one group
            continue
        seen.add(id(state))
        # A module has several where a shard_placement_fn gives its parameters different meshes.
        for number, inner in enumerate(_of_state(state)):
            triples.append((f"{name or 'the root'}, group {number + 1}" if number else name, module, inner))
    return triples


def _of_state(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.9


def _named(model: nn.Module, inners: Sequence[Any]) -> dict[str, Any]:
    """Returns FSDP's object for each parameter by its name, in the model's order, whatever the groups are.

    Raises:
        ConfigError: a parameter of the groups is not in the model.
    """
    prefix = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}
    order = {name: number for number, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    by_name = {}
    aliases = set()
    absent = []
    for param in (param for inner in inners for param in inner.fsdp_params):
        every = [prefix[id(module)] + name for module, name in _owners(param) if id(module) in prefix]
        every = [name for name in every if name in order]
        if not every:
            absent.append(f"{param._module_info.param_name} of a {type(param._module_info.module).__name__}")
            continue
        by_name[every[0]] = param
        aliases.update(every)
    if absent:
        raise ConfigError(
            f"{counted(len(absent), 'parameter')} ({listed(absent)}) that fully_shard has divided among ranks cannot "
            f"be found in this {type(model).__name__}: change a model before fully_shard, and call register_gqsgd_fsdp "
            "on a model that has all modules of each fully_shard([...])"
        )
    others = [name for name, p in model.named_parameters() if p.requires_grad and name not in aliases]
    if others:
        logger.warning(
            "gqsgd: FSDP does not reduce the gradients of %s, so they are not averaged here either: %s",
            counted(len(others), "parameter"),
            ", ".join(others[:3]) + (", ..." if len(others) > 3 else ""),
        )
    return dict(sorted(by_name.items(), key=lambda entry: order[entry[0]]))


def _owners(param: Any) -> list[tuple[nn.Module, str]]:
    """Returns the modules that have a parameter, and its names there; the first is FSDP's own choice."""
    info = param._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _alive(reference: weakref.ref[Any]) -> Any:
    referred = reference()
    assert referred is not None
    return referred
