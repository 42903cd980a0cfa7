"""Hugging Face Accelerate: the kwargs handler that installs the hook, and `enable_accelerator`, which adds the
handler."""

from __future__ import annotations

import dataclasses
import functools
import gc
import io
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.state import PartialState
from accelerate.utils import DistributedType, broadcast, gather
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.ddp.hook import GQSGDState, gqsgd_hook, register_gqsgd
from lightning_gqsgd.errors import ConfigError, counted, did_you_mean
from lightning_gqsgd.frameworks.distributed import HookStates, destroy_at_exit, start_anew
from lightning_gqsgd.frameworks.versions import check_version
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.watching import WITH_ACCELERATE
from lightning_gqsgd.presets import LOCAL_PRESETS, make_config
from lightning_gqsgd.session.ddp_models import is_in_ddp_model
from lightning_gqsgd.spec.fields import FieldArguments
from lightning_gqsgd.wire.announcing import print_to_stderr

if TYPE_CHECKING:
    from typing_extensions import Unpack

check_version("accelerate")

_BASE_FIELDS = tuple(field.name for field in dataclasses.fields(DistributedDataParallelKwargs))
_HOOK_FIELDS = ("comm_hook", "comm_wrapper", "comm_state_option")

#: Where an Accelerator finds the number of processes.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

_ONE_PROCESS = (
    "gqsgd: one process, so nothing is reduced. Several are started by torchrun, or by accelerate launch --multi_gpu; "
    "on CPUs, by ACCELERATE_USE_CPU=true torchrun (accelerate launch --cpu starts one)"
)

#: What Accelerate trains with instead of DDP, where a handler of DDP's is not looked at.
WITHOUT_DDP = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


class HandlerArguments(FieldArguments, total=False):
    """Keyword arguments of `GQSGDKwargs`: fields of a configuration, and those of DistributedDataParallelKwargs."""

    dim: int
    broadcast_buffers: bool
    bucket_cap_mb: int
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool


# The field `config` makes this class a dataclass of its own. So `dataclasses.replace` fails; otherwise it would make an
# object of the class that `__class__` names, which has no hook.
@dataclasses.dataclass(init=False, repr=False, eq=False)
class GQSGDKwargs(DistributedDataParallelKwargs):
    """Kwargs handler that makes an Accelerator compress the gradients of the models that it prepares.

    Pass it as ``Accelerator(kwargs_handlers=[GQSGDKwargs(bits=4)])``, or call `enable`. If Accelerate does not wrap
    models in DDP (one process, FSDP, DeepSpeed), it ignores the handler; `enable` says so.

    Start processes with ``torchrun``, or with ``accelerate launch --multi_gpu``. On CPUs, also set
    ``Accelerator(cpu=True)`` or ACCELERATE_USE_CPU=true; ``accelerate launch --cpu`` always starts one process,
    whatever ``--num_processes`` says.

    After ``accelerator.register_for_checkpointing(handler)``, ``save_state`` and ``load_state`` include the hook's
    state. (Accelerate refuses a folder that was saved with a different number of registered objects, so it cannot load
    the folder of a run without this call.)

    Args:
        preset: name of a preset (default ``gqsgd``), or a configuration.
        **fields: fields of `GQSGDConfig` and of DistributedDataParallelKwargs.

    Attributes:
        config: the configuration.

    Raises:
        ConfigError: for an unknown argument, a value that cannot work, or a communication hook of the user's.
    """

    config: GQSGDConfig

    def __init__(self, preset: str | GQSGDConfig | None = None, **fields: Unpack[HandlerArguments]) -> None:
        given = cast("dict[str, Any]", fields)
        _refuse_local_steps(preset, given)
        allowed = ("preset", *GQSGDConfig.field_names(), *_BASE_FIELDS)
        for name in given:
            if name not in allowed:
                raise ConfigError(
                    f"GQSGDKwargs has no argument {name!r}{did_you_mean(name, allowed)} "
                    f"(its own: preset, {', '.join(GQSGDConfig.field_names())}; all others are "
                    f"DistributedDataParallelKwargs': {', '.join(_BASE_FIELDS)})"
                )
        own = {name: value for name, value in given.items() if name not in _BASE_FIELDS}
        DistributedDataParallelKwargs.__init__(self, **{name: given[name] for name in given if name not in own})
        self._refuse_hooks()
        self.config = make_config(preset, **own)
        _say_that_nothing_is_reduced_by_one_process()
        self._hooks = HookStates()
        # The Accelerator that has forgotten a model, by the state of the hook, which may still exist.
        self._freed_by: weakref.WeakKeyDictionary[GQSGDState, weakref.ref[Accelerator]]
        self._freed_by = weakref.WeakKeyDictionary()
        self._loaded: list[dict[str, Any]] = []
        self._in_use_by: Accelerator | None = None  # the Accelerator that saves or loads the state now
        _WITHOUT_MODEL.add(self)
        _watch_optimizers()

    # Accelerate looks `handler.__class__` up in a dictionary of exact classes, which has no subclasses. `type(handler)`
    # and isinstance are not affected; the other methods that read `__class__` are overridden below.
    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> Any:
        return DistributedDataParallelKwargs

    @property
    def states(self) -> list[GQSGDState]:
        """The state of the hook on each model that still exists, in the order in which the models were prepared.

        A model that ``Accelerator.free_memory`` has forgotten counts only if that Accelerator has prepared it again.
        While an Accelerator saves or loads, only its own models count.
        """
        user = self._in_use_by
        listed = [] if user is None else self._listed_by(user)
        # In training, the Accelerator of a Trainer lists no model, see `keep_only`.
        return listed or self._all_states()

    def _all_states(self) -> list[GQSGDState]:
        return [state for state, model in self._hooks.with_models() if not self._is_freed(state, model)]

    def _listed_by(self, accelerator: Accelerator) -> list[GQSGDState]:
        return [state for state, model in self._hooks.with_models() if _lists(accelerator, model)]

    def freed(self, accelerator: Accelerator) -> None:
        """Note that an Accelerator is about to forget its models."""
        for state in self._listed_by(accelerator):
            self._freed_by[state] = weakref.ref(accelerator)

    @contextmanager
    def used_by(self, accelerator: Accelerator) -> Iterator[None]:
        """Returns a context in which an Accelerator saves or loads the state."""
        self._in_use_by = accelerator
        try:
            yield
        finally:
            self._in_use_by = None

    def _is_freed(self, state: GQSGDState, model: DistributedDataParallel) -> bool:
        """Returns whether an Accelerator has forgotten a model, and has not prepared it again."""
        if state not in self._freed_by:
            return False
        accelerator = self._freed_by[state]()
        return accelerator is None or not _lists(accelerator, model)

    def to_dict(self, ignore_keys: tuple[str, ...] = _HOOK_FIELDS) -> dict[str, Any]:
        """Returns only the arguments of DistributedDataParallel: the base class would deep-copy all attributes."""
        return {name: getattr(self, name) for name in _BASE_FIELDS if name not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> GQSGDState:
        """Install the hook on a DDP model. Accelerate calls this after it has wrapped a model. A collective.

        Raises:
            ConfigError: if the model cannot work, if ranks do not agree, or if the user has set a communication hook.
        """
        self._refuse_hooks()
        destroy_at_exit()
        _watch_local_sgd()
        _watch_free_memory()
        _watch_checkpoints()
        _WITHOUT_MODEL.discard(self)
        state = register_gqsgd(model, self.config)
        if self._loaded:
            state.load_state_dict(self._loaded.pop(0))
        self._hooks.add(state)
        # Accelerate's loggers show warnings only, and that compression is on should be seen.
        state.announce(print_to_stderr)
        return state

    def keep_only(self, model: DistributedDataParallel) -> GQSGDState | None:
        """Forget the hooks of all models except one, and the states that are loaded for further models. Other models
        may still exist, and their hooks would be saved with it.

        Returns:
            The state of the hook on ``model``; None if this handler has no hook on it.
        """
        state = next((state for state, own in self._hooks.with_models() if own is model), None)
        self._hooks.keep_only(state)
        # A Trainer frees the memory of its Accelerator when training begins. It does not prepare a model again that is
        # wrapped already, so the Accelerator does not list the model in training.
        self._freed_by.clear()
        self._loaded = []
        return state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs for the same bits; see `GQSGDState.state_dict`.

        Call it on all ranks, and save the result of rank 0. Accelerate does both. If it saves on each node, all ranks
        get the result of rank 0.
        """
        gc.collect()  # models that are in cycles end here at the latest, so that all ranks count the same ones
        states = [*(state.state_dict() for state in self.states), *self._loaded]
        if self._in_use_by is not None and self._in_use_by.project_configuration.save_on_each_node:
            states = as_on_first_rank(states)  # memories come to rank 0 only
        return {"states": states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the states of the hooks on the prepared models, in the order of the models.

        If a model is not prepared yet, its state is loaded when the model is prepared.

        Raises:
            ConfigError: if ``state`` does not come from `state_dict`, or has fewer models; or see
                `GQSGDState.load_state_dict`.
        """
        gc.collect()
        saved = state.get("states") if isinstance(state, dict) else None
        states = self.states
        if isinstance(saved, list) and len(saved) == len(self._all_states()):
            states = self._all_states()  # earlier versions saved the models of all Accelerators with each of them
        if not isinstance(saved, list):
            raise ConfigError(
                "the state of GQSGDKwargs is a dictionary with the key 'states', as state_dict gives it, not "
                f"{str(state):.200}; register the same objects for checkpointing as the run that wrote it, in the same "
                "order"
            )
        if not saved:
            warnings.warn("gqsgd: the checkpoint has no state of gqsgd's hook, which starts anew", stacklevel=2)
            start_anew(states)
        elif len(saved) < len(states):
            raise ConfigError(
                f"the checkpoint has the state of {counted(len(saved), 'hook')}, and {counted(len(states), 'model')} "
                "prepared; prepare the same models as the run that wrote it, in the same order"
            )
        for mine, theirs in zip(states, saved, strict=False):
            mine.load_state_dict(theirs)
        self._loaded = saved[len(states) :]

    def __repr__(self) -> str:
        return f"GQSGDKwargs({', '.join(f'{name}={value!r}' for name, value in self._arguments().items())})"

    def __reduce__(self) -> Any:
        """Returns how to copy the handler: from its arguments. Hooks and their memories stay with the models."""
        return functools.partial(GQSGDKwargs, **self._arguments()), ()

    def __eq__(self, other: object) -> bool:
        """Returns whether this is the same object. The base would compare its own fields only."""
        return self is other

    __hash__ = object.__hash__

    def _arguments(self) -> dict[str, Any]:
        """Returns the arguments that give an equal handler."""
        config = self.config
        usual = make_config()
        own = {name: getattr(config, name) for name in config.field_names()}
        return {**{name: own[name] for name in own if own[name] != getattr(usual, name)}, **self.to_kwargs()}

    def _refuse_hooks(self) -> None:
        usual = DistributedDataParallelKwargs()
        given = [name for name in _HOOK_FIELDS if getattr(self, name) not in (getattr(usual, name), None, "no")]
        if given:
            raise ConfigError(
                f"GQSGDKwargs installs a communication hook of its own, and DDP takes one only; drop "
                f"{', '.join(given)}, or use DistributedDataParallelKwargs for that hook"
            )


def enable_accelerator(
    accelerator: Accelerator,
    preset: str | GQSGDConfig | None = None,
    trained: nn.Module | None = None,
    **fields: Unpack[HandlerArguments],
) -> GQSGDKwargs:
    """Enable compression on an ``Accelerator``; see `enable.enable`. ``trained`` is the model of a Trainer."""
    existing = accelerator.ddp_handler
    kind = DistributedType(accelerator.distributed_type).value
    if accelerator.is_fsdp2:
        raise ConfigError(
            "this Accelerator shards models by FSDP2, and enable is for DistributedDataParallel: call "
            "register_gqsgd_fsdp(model, reduce_scatter=True, all_gather_bits=8) on the model that `prepare` returns, "
            "and accelerator.register_for_checkpointing on its result"
        )
    if kind in WITHOUT_DDP:
        raise ConfigError(
            f"this Accelerator trains with {kind}, and gqsgd compresses the gradients of DistributedDataParallel; "
            f"leave {kind} out, or gqsgd"
        )
    of_fsdp = [name for name in ("reduce_scatter", "all_gather_bits") if name in fields]
    if of_fsdp:
        raise ConfigError(
            f"{' and '.join(of_fsdp)}: for models that FSDP2 shards, and this one is trained with "
            "DistributedDataParallel; leave it out, or set fsdp_version=2"
        )
    prepared = prepared_to_train(accelerator, trained)
    if prepared:
        raise ConfigError(
            f"this Accelerator has prepared {counted(len(prepared), 'model')} already, without gqsgd; "
            "enable it before `prepare`, and for a transformers Trainer between its construction and `evaluate` or "
            "`train`"
        )
    if isinstance(existing, GQSGDKwargs):
        raise ConfigError(f"gqsgd is enabled already, as {existing!r}; enable it once, with all fields")
    if existing is not None and type(existing) is not DistributedDataParallelKwargs:
        raise ConfigError(
            f"the Accelerator has a handler of type {type(existing).__name__}, which gqsgd would replace; leave it "
            "out, and give the arguments of DistributedDataParallel to enable"
        )
    kept = {} if existing is None else {name: getattr(existing, name) for name in _BASE_FIELDS}
    handler = GQSGDKwargs(preset, **{**kept, **fields})
    if accelerator.num_processes == 1:
        say_that_there_is_one_process()
        _WITHOUT_MODEL.discard(handler)  # it has been said
    accelerator.ddp_handler = handler
    accelerator.register_for_checkpointing(handler)
    return handler


def prepared_to_train(accelerator: Accelerator, trained: nn.Module | None) -> list[nn.Module]:
    """Returns the models that an Accelerator has prepared, without those that a Trainer only evaluates.

    The Trainers of TRL prepare reference models and reward models when they are constructed.

    Args:
        accelerator: the Accelerator.
        trained: the model of its Trainer, which may have been prepared for an evaluation; None: it has no Trainer, and
            whoever prepares models can enable compression earlier.
    """
    if trained is None:
        return list(accelerator._models)
    own = {id(parameter) for parameter in trained.parameters()}
    prepared = []
    for model in accelerator._models:
        parameters = set(map(id, model.parameters()))
        if not own.isdisjoint(parameters) or is_in_ddp_model(parameters):
            prepared.append(model)
    return prepared


def _refuse_local_steps(preset: str | GQSGDConfig | None, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments of local steps, which do without DistributedDataParallel and its handler."""
    asked = [name for name in ("local_steps", *LocalOptions.field_names()) if name in fields]
    if isinstance(preset, str) and preset in LOCAL_PRESETS:
        asked.append(f"preset={preset!r}")
    if asked:
        raise ConfigError(
            f"{', '.join(asked)} is for local steps, which train without DistributedDataParallel, and GQSGDKwargs is "
            f"its handler; leave GQSGDKwargs out: {WITH_ACCELERATE}"
        )


@functools.cache
def _watch_local_sgd() -> None:
    """From now on, let Accelerate's LocalSGD warn where it begins with a model that has the hook.

    It leaves all gradients on their ranks (``no_sync``) and averages whole parameters uncompressed by itself. The hook
    never hears of it.
    """
    begin = LocalSGD.__enter__

    @functools.wraps(begin)
    def __enter__(self: LocalSGD) -> LocalSGD:
        model = getattr(self, "model", None)
        hook = model._get_ddp_logging_data().get("comm_hook") if isinstance(model, DistributedDataParallel) else None
        if self.enabled and hook == gqsgd_hook.__qualname__:
            warnings.warn(
                "gqsgd: LocalSGD averages whole parameters uncompressed, and takes no gradient to gqsgd's hook, "
                "whatever its report says. For compressed local steps, leave GQSGDKwargs, enable and LocalSGD out: "
                f"{WITH_ACCELERATE}",
                stacklevel=2,
            )
        return begin(self)

    LocalSGD.__enter__ = __enter__


@functools.cache
def _watch_free_memory() -> None:
    """From now on, let ``Accelerator.free_memory`` tell the handler that it forgets its models.

    A user may keep the models, for example for an ensemble of folds. A later checkpoint must not have their states.
    """
    free = Accelerator.free_memory

    @functools.wraps(free)
    def free_memory(self: Accelerator, *objects: Any) -> Any:
        if isinstance(self.ddp_handler, GQSGDKwargs):
            self.ddp_handler.freed(self)
        return free(self, *objects)

    Accelerator.free_memory = free_memory


@functools.cache
def _watch_checkpoints() -> None:
    """From now on, let an Accelerator tell the handler when it saves or loads the handler's state."""
    for name in ("save_state", "load_state"):
        setattr(Accelerator, name, _telling_handler(getattr(Accelerator, name)))


def _telling_handler(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def save_or_load(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        handler = self.ddp_handler
        if not isinstance(handler, GQSGDKwargs):
            return method(self, *args, **kwargs)
        _warn_of_lost_memory(handler, self)
        with handler.used_by(self):
            return method(self, *args, **kwargs)

    return save_or_load


def _warn_of_lost_memory(handler: GQSGDKwargs, accelerator: Accelerator) -> None:
    """Warn if a checkpoint is without the memory of the hook."""
    if handler.config.remembers and not any(one is handler for one in accelerator._custom_objects):
        warnings.warn(
            "gqsgd: the memory of the hook is not part of this checkpoint, so it starts empty in a run that resumes: "
            "call accelerator.register_for_checkpointing(handler) before the first save_state, in every run",
            stacklevel=4,
        )


def _lists(accelerator: Accelerator, model: DistributedDataParallel) -> bool:
    """Returns whether an Accelerator lists a model that it has prepared."""
    # It lists models as they came: users' own, or those in DDP that it is given once more. A user's model may have a
    # submodule that is called "module", as DDP has.
    listed = [(one, ddp_in(one)) for one in accelerator._models]
    return any(model.module is (one if wrapped is None else wrapped.module) for one, wrapped in listed)


def say_that_there_is_one_process() -> None:
    started = _started()
    if started == 1:
        _say_once(_ONE_PROCESS)
        return
    warnings.warn(_on_its_own(started), stacklevel=4)


def _started() -> int:
    """Returns the number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _on_its_own(started: int) -> str:
    """Returns the words for an Accelerator that is alone although there are other processes."""
    return (
        f"gqsgd: {started} processes were started (WORLD_SIZE), but this Accelerator is on its own, so each process "
        "trains a model of its own and nothing is reduced; without a GPU, set ACCELERATE_USE_CPU=true, or pass "
        "cpu=True to Accelerator or use_cpu=True to TrainingArguments"
    )


def _say_that_nothing_is_reduced_by_one_process() -> None:
    """Say so where an Accelerator would find itself alone, which wraps nothing in DDP and never asks the handler.

    The handler looks at what an Accelerator would look at.
    """
    sizes = {os.environ.get(name, "1") for name in _WORLD_SIZES}
    has_others = bool(PartialState._shared_state) and PartialState().num_processes > 1
    if sizes == {"1"} and not has_others:  # an Accelerator that does not find the others is warned of
        _say_once(_ONE_PROCESS)


#: The handlers that no Accelerator has asked for a hook, until an optimizer steps.
_WITHOUT_MODEL: weakref.WeakSet[GQSGDKwargs] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    """From now on, warn once where an optimizer steps before any model has the hook."""
    register_optimizer_step_pre_hook(_warn_of_handlers_without_model)


def _warn_of_handlers_without_model(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _WITHOUT_MODEL:
        return
    _WITHOUT_MODEL.clear()
    started = _started()
    if started > 1 and PartialState._shared_state and PartialState().num_processes == 1:
        warnings.warn(_on_its_own(started), stacklevel=4)
    elif dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"gqsgd: {type(optimizer).__name__} steps, and no model has the hook of GQSGDKwargs, so nothing is "
            "compressed, and each process may train a model of its own: pass the model to accelerator.prepare, and "
            "call what it returns. (Without DistributedDataParallel, as with evaluation_mode=True, FSDP or local "
            "steps, leave GQSGDKwargs out)",
            stacklevel=4,
        )


@functools.lru_cache
def _say_once(text: str) -> None:
    print_to_stderr(text)


def ddp_in(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DDP model that is called where ``model`` is, which may be a compiled one; None: there is none."""
    called = getattr(model, "_orig_mod", model)
    return called if isinstance(called, DistributedDataParallel) else None


def read_by_all(file: Path | None, accelerator: Any) -> Any:
    """Returns what `write_whole` has written; None if no process sees the file, or none resumes. A collective.

    With dither that differs among ranks, no rank could decode the messages of the others. So what one process cannot
    read, none takes.

    Args:
        file: the path in this process; None: it does not resume.
        accelerator: the `accelerate.Accelerator` of the training.

    Raises:
        ConfigError: some processes resume, or see the file, and others do not; or a process cannot read it.
    """
    found = file if file is not None and file.is_file() else None
    content = None
    problem = ""
    if found is not None:
        try:
            content = torch.load(found, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises what it comes across; all of it is told to the others
            problem = f": {type(error).__name__}: {error!s:.200}"
    own = [file is not None, found is not None, bool(problem)]
    rows = gather(torch.tensor([own], dtype=torch.int64, device=accelerator.device)).tolist()
    ranks = range(len(rows))
    resuming, seeing, failing = ([rank for rank in ranks if rows[rank][column]] for column in range(len(own)))
    if resuming and len(resuming) < len(ranks):
        raise ConfigError(
            f"of {len(ranks)} ranks only {resuming} resume from a checkpoint; give every rank the same "
            "resume_from_checkpoint, from a folder that all see"
        )
    if file is None:
        return None
    if seeing and len(seeing) < len(ranks):
        raise ConfigError(
            f"of {len(ranks)} ranks only {seeing} see {file}, and all have to continue from it; "
            "resume from a folder that all see, or that was copied to every machine"
        )
    if failing:
        raise ConfigError(
            f"of {len(ranks)} ranks {failing} cannot read {file}{problem}. It is damaged, or was not written to its "
            f"end. Resume from another checkpoint, or delete {file.name} on every machine: what it holds starts anew"
        )
    return content


def as_on_first_rank(content: Any) -> Any:
    """Returns rank 0's plain values and tensors in every process, with tensors on the CPU. A collective."""
    state = PartialState()
    file = io.BytesIO()
    if state.is_main_process:
        torch.save(content, file)
    size = broadcast(torch.tensor([len(file.getvalue())], device=state.device))
    # The other processes have an empty file, and receive into zeros.
    message = torch.frombuffer(bytearray(file.getvalue().ljust(int(size), b"\0")), dtype=torch.uint8)
    received: torch.Tensor = broadcast(message.to(state.device)).cpu()
    return torch.load(io.BytesIO(received.numpy().tobytes()), map_location="cpu", weights_only=True)


def write_whole(content: Any, file: Path) -> None:
    """Write plain values and tensors into a file, which is there once all of it is written, and not before."""
    partial = file.with_name(f"{file.name}.part")
    torch.save(content, partial)
    partial.replace(file)
