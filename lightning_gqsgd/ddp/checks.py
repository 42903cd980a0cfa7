"""Checks of a DDP model before the hook is registered, and the facts that have to be equal on all ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive.plain import obstacle
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.session.parameters import Parameter, digest
from lightning_gqsgd.wire.plan import check_parameters

#: Classes that average gradients, and what to do with a model that has one.
_WRAPPED = {
    r"torch\.nn\.parallel\.distributed\.DistributedDataParallel": (
        "is one: call register_gqsgd on that DistributedDataParallel model itself"
    ),
    r"torch\.nn\.parallel\.data_parallel\.DataParallel": (
        "is torch's DataParallel, of one process: start a process for each GPU (torchrun), and wrap the module inside "
        "of it instead: DistributedDataParallel(model.module)"
    ),
    r"torch\.distributed\._composable\.replicate\w*\.(DDP|ReplicateModule)": (
        "averages its gradients by replicate() already, which takes no quantised hook: leave replicate() out, wrap the "
        "module in DistributedDataParallel instead, and call register_gqsgd"
    ),
    r"torch\.distributed\.fsdp\.(\w+\.)*FullyShardedDataParallel": (
        "is sharded by FullyShardedDataParallel (FSDP1) already, which takes no quantised hook: leave that wrapper "
        "out, and use fully_shard (FSDP2) with register_gqsgd_fsdp, or DistributedDataParallel with register_gqsgd"
    ),
    r"torch\.distributed\.fsdp\.(\w+\.)*FSDPModule": (
        "is sharded by fully_shard already: call register_gqsgd_fsdp instead, without DistributedDataParallel"
    ),
}


def own_facts(
    requested: GQSGDConfig,
    model: DistributedDataParallel,
    parameters: Sequence[Parameter],
    post_local_sgd: PostLocalSGDState | None,
) -> dict[str, Any]:
    """Returns what ranks that register the hook must have in common beside the configuration: plain values by name.

    Args:
        requested: the configuration as it was given.
        model: the DDP model.
        parameters: those of its module.
        post_local_sgd: see `register_gqsgd`.
    """
    trained = trained_by(model)
    facts = {
        "parameters": digest(parameters),
        "parameters that require a gradient": digest(entry for entry in parameters if entry.name in trained),
        "dtypes": ", ".join(sorted({str(p.dtype) for p in trained.values()})),
        "bucket_cap_mb": model.bucket_bytes_cap / 2**20,
        "find_unused_parameters": model.find_unused_parameters,
        "post_local_sgd": _in_words(post_local_sgd),
    }
    if requested.auto:
        facts["what keeps the hook in its place"] = obstacle(model)
    return facts


def _in_words(local: PostLocalSGDState | None) -> str:
    """Returns the numbers of post-local SGD that decide who averages a gradient."""
    if local is None:
        return "None"
    names = ("iter", "start_localSGD_iter", "post_local_gradient_allreduce")
    return ", ".join(f"{name}={getattr(local, name)}" for name in names)


def check_is_ddp(model: object) -> None:
    """Raise ConfigError for an object that is no DDP model."""
    if isinstance(model, DistributedDataParallel):
        return
    inner = getattr(model, "_orig_mod", None)
    remedy = wrapped_otherwise(model) or "wrap it first: DistributedDataParallel(model)"
    if isinstance(inner, DistributedDataParallel):
        remedy = "register the hook on the DistributedDataParallel model before torch.compile (or on model._orig_mod)"
    raise ConfigError(f"{type(model).__name__} is not a DistributedDataParallel model; {remedy}")


def wrapped_otherwise(model: object) -> str:
    """Returns a remedy for a model whose gradients something averages already; empty where nothing is known to.

    Another wrapper around the model would average them twice.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else []:
        # By name, because each of these is slow to import, or missing in some versions of torch.
        kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
        found = (text for kind, text in _WRAPPED.items() if any(re.fullmatch(kind, one) for one in kinds))
        remedy = next(found, None)
        if remedy:
            return f"{f'its module {name!r}' if name else 'it'} {remedy}"
    return ""


def check_model(model: DistributedDataParallel) -> None:
    """Raise ConfigError for a DDP model that cannot have the hook."""
    installed = model._get_ddp_logging_data().get("comm_hook")
    hooks = [(hook, state) for hook, state in getattr(model, "_comm_hooks", ()) if hasattr(state, "is_on")]
    # While plain DDP has its place, the hook is not registered with DDP.
    installed = installed or next((hook.__qualname__ for hook, state in hooks if state.is_on(model)), None)
    if installed:
        states = [state for _, state in getattr(model, "_comm_hooks", ())]
        was = " (which was closed)" if any(getattr(state, "is_closed", False) for state in states) else ""
        raise ConfigError(
            f"the model already has the communication hook {installed!r}{was}, and DDP takes one only; "
            "remove the other registration, or wrap the module in a new DistributedDataParallel"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp="python_reducer" hands hooks single gradients, not buckets; '
            'set it to True or "ddp_optimizer"'
        )
    trained = trained_by(model)
    stepping = [name for name, p in trained.items() if hasattr(p, "_in_backward_optimizers")]
    if stepping:
        raise ConfigError(
            f"parameter {listed(stepping)} has an optimizer that steps in the backward pass, for which DDP needs a "
            "communication hook of its own, and DDP takes one only; leave _apply_optimizer_in_backward out, and call "
            "optimizer.step() after backward()"
        )
    check_parameters(trained)
    check_unchanged(model)


def check_unchanged(model: DistributedDataParallel) -> None:
    """Raise ConfigError if the module was changed since it was wrapped, so that DDP does not reduce all of it."""
    trained = trained_by(model)
    wrapped = set(map(id, getattr(model, "_module_parameters", trained.values())))
    new = [name for name, p in trained.items() if id(p) not in wrapped]
    built = model._get_ddp_logging_data()
    number = built.get("num_parameter_tensors", len(trained))
    nbytes = sum(p.numel() * p.element_size() for p in trained.values())
    change = ""
    if new:
        change = f"parameter {listed(new)} was added to the module, or took the place of another one,"
    elif len(trained) > number:
        change = f"{counted(len(trained) - number, 'parameter')} of the module began to require a gradient"
    elif len(trained) == number and nbytes != built.get("total_parameter_size_bytes", nbytes):
        change = f"the module's parameters were cast to {listed(sorted({str(p.dtype) for p in trained.values()}))}"
    if change:
        raise ConfigError(
            f"{change} after the model was wrapped in DistributedDataParallel, which would not reduce it; change the "
            "module first, then wrap it, then register the hook"
        )


def check_group(post_local_sgd: PostLocalSGDState | None, model: DistributedDataParallel) -> None:
    """Raise ConfigError if post-local SGD averages over other ranks than DDP does, or could not count its steps."""
    if post_local_sgd is None:
        return
    if not isinstance(post_local_sgd, PostLocalSGDState):
        raise ConfigError(f"post_local_sgd={post_local_sgd!r:.100} must be torch's PostLocalSGDState, or None")
    group = post_local_sgd.process_group
    if (dist.group.WORLD if group is None else group) is not model.process_group:
        raise ConfigError(
            "PostLocalSGDState averages gradients over another process group than DistributedDataParallel; give both "
            "the same process_group"
        )
    if getattr(model, "skip_all_reduce_unused_params", False):
        # Torch's hook counts a step in the last bucket, which DDP leaves out where nothing in it is used.
        raise ConfigError(
            "skip_all_reduce_unused_params=True may leave out the bucket in which post-local SGD counts its steps; "
            "leave it False with post_local_sgd, or average models with LocalSteps"
        )


def unignored(module: nn.Module, ignored: Collection[str]) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module, by name, without those that DDP was told to ignore.

    An ignored parameter is each rank's own, so ranks may have different ones.
    """
    return {name: p for name, p in module.named_parameters() if name not in ignored}


def trained_by(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """Returns the parameters that require a gradient, by name, without those that DDP was told to ignore.

    There is at least one, because DDP refuses models without any.
    """
    return {name: p for name, p in unignored(model.module, model.parameters_to_ignore).items() if p.requires_grad}


def device_of(model: DistributedDataParallel) -> torch.device:
    """Returns the device of the gradients."""
    return next(iter(trained_by(model).values())).device


def dtypes_of(model: DistributedDataParallel) -> list[torch.dtype]:
    """Returns the dtypes of the gradients, that of the first parameter first."""
    return list(dict.fromkeys(p.dtype for p in trained_by(model).values()))
