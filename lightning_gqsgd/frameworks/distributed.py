"""Code that all adapters share: the arguments of Lightning's strategies, and the end of the process group."""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.hook import GQSGDState
from lightning_gqsgd.errors import ConfigError, did_you_mean
from lightning_gqsgd.local_steps.options import LocalOptions, parse_time
from lightning_gqsgd.presets import Preset, make_config
from lightning_gqsgd.session.checkpoint import STATE_SCHEMA
from lightning_gqsgd.spec.fields import FieldArguments

#: Where checkpoints have the state of the hook, or of several models' hooks.
CHECKPOINT_KEY = "gqsgd"


class StrategyArguments(FieldArguments, total=False):
    """The keyword arguments of both strategies, beside Lightning's own and those of DistributedDataParallel."""

    local_steps: int | str
    outer: str | Callable[..., Any]
    outer_after: int
    fragments: int
    delay: int
    mixing: float
    inner_state: str
    rule: str | dict[str, Any]
    elastic: bool
    min_replicas: int
    outlier: float


class HookStates:
    """The states of the hooks on models, in the order in which they were installed. Each is kept as long as its model.

    They are looked up by their current models, because `GQSGDState.rewrap` replaces the model. The models stay in their
    process, so a pickle is empty.
    """

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[GQSGDState, None] = WeakKeyDictionary()

    def add(self, state: GQSGDState) -> None:
        """Add the state of a hook."""
        self._states[state] = None

    def keep_only(self, state: GQSGDState | None) -> None:
        """Forget all states except one; None means all."""
        self._states = WeakKeyDictionary({} if state is None else {state: None})

    def with_models(self) -> list[tuple[GQSGDState, DistributedDataParallel]]:
        """Returns the states whose models still exist, each with its model."""
        return [(state, state.model) for state in self._states if state.model is not None]

    def __reduce__(self) -> Any:
        return HookStates, ()


def start_anew(states: Iterable[GQSGDState]) -> None:
    """Set the steps of hooks to zero and empty their memories, which belong to weights that are no more.

    The seeds stay. Every rank has to call this.
    """
    for state in states:
        config = state.requested.to_dict()
        state.load_state_dict({"schema": STATE_SCHEMA, "seed": state.config.seed, "step": 0, "config": config})


def takes(arguments: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a constructor with ``**kwargs`` the keys of a TypedDict as keyword arguments, None by default.

    `inspect.signature`, ``help`` and LightningCLI's parser, jsonargparse, then show each of them with its type.
    """

    def decorate(constructor: Callable[..., None]) -> Callable[..., None]:
        shown = inspect.signature(constructor)
        types = {name: kind | None for name, kind in get_type_hints(arguments).items()}
        keyword = inspect.Parameter.KEYWORD_ONLY
        made = [inspect.Parameter(name, keyword, default=None, annotation=kind) for name, kind in types.items()]
        # Keyword arguments stand behind all others but ``**kwargs``, and sorting keeps the order of equal kinds.
        parameters = sorted([*made, *shown.parameters.values()], key=lambda parameter: parameter.kind)
        constructor.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        constructor.__annotations__ |= types
        return constructor

    return decorate


def split_arguments(
    strategy: type, preset: str | GQSGDConfig | Preset | None, arguments: dict[str, Any]
) -> tuple[GQSGDConfig, dict[str, Any]]:
    """Returns the configuration among a strategy's keyword arguments, and the rest, which is Lightning's and DDP's.

    Args:
        strategy: the class, which has a DDPStrategy of Lightning's among its ancestors.
        preset: name of a preset, or a configuration, whose values the fields among the arguments replace.
        arguments: keyword arguments, without those of local steps. A field that is None keeps the preset's value. The
            timeout may be a text, such as ``"5min"``.

    Raises:
        ConfigError: a name that is no argument, a value that cannot work, a timeout that is no time, or a communication
            hook of the user's. (The state of torch's post-local SGD is welcome where Lightning's strategy averages
            models.)
    """
    (base,) = (ancestor for ancestor in strategy.__mro__ if ancestor.__name__ == "DDPStrategy")
    given = {name: arguments.pop(name) for name in GQSGDConfig.field_names() if name in arguments}
    fields = {name: value for name, value in given.items() if value is not None}
    _check_hooks(strategy, base, arguments)
    own = [name for name in parameter_names(strategy) if name not in parameter_names(base)]
    own += [name for name in LocalOptions.field_names() if name not in (*own, "every")]
    allowed = {*own, *parameter_names(base), *parameter_names(DistributedDataParallel)}
    for name in arguments:
        if name not in allowed:
            raise ConfigError(
                f"{strategy.__name__} has no argument {name!r}{did_you_mean(name, allowed)} "
                f"(its own: {', '.join(own)}; all others are DDPStrategy's)"
            )
    if "timeout" in arguments:
        arguments["timeout"] = as_timeout(arguments["timeout"])
    return make_config(preset, **fields), arguments


def as_timeout(value: object) -> timedelta | None:
    """Returns a timeout that may be a text, such as ``"5min"``: YAML, which LightningCLI reads, has no timedelta.

    Raises:
        ConfigError: if it is no time.
    """
    if value is None or isinstance(value, timedelta):
        return value
    return parse_time("timeout", str(value))


def _check_hooks(strategy: type, base: type, arguments: dict[str, Any]) -> None:
    """Refuse other communication hooks, and a period of averaging without the state of post-local SGD.

    Our hook also takes the place of torch's hook for post-local SGD, whose state it needs.
    """
    averages = "model_averaging_period" in parameter_names(base)
    given = {name: arguments.get(name) for name in ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper")}
    local = averages and isinstance(given["ddp_comm_state"], PostLocalSGDState)
    hooks = [name for name, value in given.items() if value is not None and not (local and name == "ddp_comm_state")]
    if hooks:
        raise ConfigError(
            f"{strategy.__name__} installs a communication hook of its own, and DDP takes one only; "
            f"drop {', '.join(hooks)}, or use DDPStrategy for that hook"
        )
    period = arguments.get("model_averaging_period")
    if not averages or not (local or period is not None):
        return
    if not local:
        raise ConfigError(
            f"model_averaging_period={period} alone does nothing: models are averaged with post-local SGD only; give "
            "ddp_comm_state=PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=..., "
            "post_local_gradient_allreduce=False) as well (torch.distributed.algorithms.ddp_comm_hooks."
            "post_localSGD_hook), or drop it"
        )
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ConfigError(
            f"model_averaging_period={period!r} must be a number of steps, 1 or more: with a PostLocalSGDState, each "
            "rank trains its own model in between"
        )


def after_setup(world_size: int) -> None:
    """Check the process group that Lightning has set up or reused, and destroy the group at exit.

    Raises:
        RuntimeError: the process group is that of an earlier run, with another number of ranks.
    """
    destroy_at_exit()
    size = dist.get_world_size()
    if size != world_size:
        raise RuntimeError(
            f"this run asks for {world_size} processes, but the process group of an earlier run in this process has "
            f"{size}: training would go on without the others. Start a new Python process for each number of devices"
        )


def destroy_at_exit() -> None:
    """Destroy the process group at exit, because a group of Gloo that is still alive sometimes aborts the interpreter.

    This happens at exit and not at teardown, because later runs in this process use the group again. Lightning destroys
    groups of NCCL only, and Accelerate destroys them where users call ``end_training``.
    """
    atexit.unregister(_destroy)
    atexit.register(_destroy)


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def parameter_names(callable_: Any) -> list[str]:
    """Returns the names of a function's or class's arguments, without those that are taken as ``**kwargs``."""
    return [
        parameter.name
        for parameter in inspect.signature(callable_).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
