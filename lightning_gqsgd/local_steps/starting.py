"""The start of local steps: checks, facts that have to be equal on all ranks, and equal weights on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError, first_line
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.local_steps.fragments import Entry, Fragment, fragments_of
from lightning_gqsgd.local_steps.inner_state import compares_steps
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import describe_outer, make_outer
from lightning_gqsgd.local_steps.sharding import (
    WHOLE,
    Sharding,
    is_divided,
    number_of_part,
    own_part,
    reshard,
    sharding_of,
)
from lightning_gqsgd.predict.levels import fitted
from lightning_gqsgd.session.first_rank import take_from_first_rank
from lightning_gqsgd.session.nodes import nodes_of_groups
from lightning_gqsgd.session.opening import Side, digest_of_facts, facts_of, open_engines
from lightning_gqsgd.session.parameters import Parameter, digest, number_parameters, parameters_of, plain_name
from lightning_gqsgd.sparse.options import refuse_for
from lightning_gqsgd.wire.communicator import patience_of
from lightning_gqsgd.wire.engine import Engine, Words
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.plan import check_parameters

#: The words of errors about process groups and steps.
_WORDS = Words(
    "this LocalSteps",
    "make a new LocalSteps",
    "Ranks have made different numbers of optimizer steps, or a state was loaded, or parameters were frozen, or the "
    "outer optimizer changed, or layers of the model have changed places, on some ranks only: give every rank the same "
    "number of steps, the same state, the same frozen parameters, the same outer optimizer and the same model",
)

#: The same for rounds in which ranks may make different numbers of steps.
_WORDS_OF_MERGES = replace(
    _WORDS,
    differ="A state was loaded, or the outer optimizer changed, on some ranks only: give every rank the same state and "
    "the same outer optimizer",
)

#: Number of rounds of a schedule that ranks compare at the start.
_COMPARED_ROUNDS = 16

#: The largest change of weights before the first step, relative to their norm, that is considered rounding, for example
#: after weights were moved and moved back in fp32. The codec's error is a fraction of the change, so it is even
#: smaller.
ROUNDING = 1e-5

#: The error of weights that have changed between the start and the first step.
WEIGHTS_CHANGED = (
    "the model's weights were changed after local steps began and before the first step(), by more than "
    f"{ROUNDING:g} of their norm, and would travel quantised, as if they had been learnt. If weights were loaded "
    "since: load weights before LocalSteps is made (Fabric: by fabric.load; Trainer: before fit), or load what "
    "state_dict() has given. If sharpness-aware minimisation has moved them (SAM by hand): move them back before "
    "step(), in fp32, or give LocalSteps an optimizer that makes both passes in its own step(closure). If the inner "
    "optimizer's own step() was called: call step() of LocalSteps instead"
)


class Trained(NamedTuple):
    """The parts of a model that local steps train or average.

    Attributes:
        parameters: the averaged parameters.
        buffers: the averaged buffers, which are sent uncompressed.
        facts: the parameters, with the settings that a configuration gives them.
        fragments: parameters and buffers, with their anchors.
        outer: the outer optimizer of the parameters' anchors.
        sharding: how the parameters are divided among the ranks of a replica.
    """

    parameters: list[Entry]
    buffers: list[Entry]
    facts: list[Parameter]
    fragments: list[Fragment]
    outer: Optimizer
    sharding: Sharding

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.parameters[0].tensor.device

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The compute dtypes of the parameters, each once, in their order."""
        return list(dict.fromkeys(COMPUTE_DTYPES[entry.tensor.dtype] for entry in self.parameters))


class Started(NamedTuple):
    """Local steps that the ranks of a process group have started together.

    Attributes:
        trained: the parts of the model that are trained or averaged.
        config: the compression, with the chosen reducer.
        note: a note on the reducer.
        digest: digest of the facts that are equal on all ranks.
        engine: the engine of the ranks.
    """

    trained: Trained
    config: GQSGDConfig
    note: str
    digest: int
    engine: Engine


def open_meeting(model: object, group: dist.ProcessGroup, timeout: timedelta | None) -> Meeting:
    """Returns the meeting in which ranks agree on local steps. An error within it is raised on all ranks."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    device = torch.device("cpu") if parameter is None else parameter.device
    return Meeting("LocalSteps", [group], patience_of(timeout, group, device))


def start_together(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: LocalOptions,
    config: GQSGDConfig,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
    meeting: Meeting | None,
) -> Started:
    """Start local steps on the ranks of a process group, with the first rank's parameters and buffers. A collective.

    The arguments are those of `averages.LocalAverages`.

    Raises:
        ConfigError: on every rank, if the model, an optimizer or a value cannot work, or if ranks do not agree.
        CollectiveError: if not all ranks do this within the timeout.
    """
    words = _WORDS_OF_MERGES if options.is_merged else _WORDS
    with meeting or open_meeting(model, group, timeout) as start:
        trained = trained_by(model, optimizers, options, config, group)
        config, note = fitted_to_ranks(start, trained, config)
        options.check_compression(config)
        facts = facts_of(config, own_facts(options, model, trained))
        side = Side(group, facts, [config])
        with open_engines(start, [side], trained.device, timeout=timeout, words=words, dtypes=trained.dtypes) as (
            engine,
        ):
            # After the last round of the meeting, no rank can refuse any more, so none leaves others waiting in a
            # broadcast.
            reshard(model)
            take_from_first_rank(map(own_part, (*model.parameters(), *model.buffers())), group)
    return Started(trained, config, note, digest_of_facts(facts), engine)


def trained_by(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    options: LocalOptions,
    config: GQSGDConfig,
    group: dist.ProcessGroup | None,
) -> Trained:
    """Returns the parts of a model that local steps train. ``group`` has the ranks that average; None: they are not
    known yet.

    Raises:
        ConfigError: if the model, an optimizer or the configuration cannot work.
    """
    check_optimizers(optimizers, options)
    check_module(model)
    reshard(model)  # after a forward pass without a backward pass, FSDP2 shows whole parameters in place of shards
    trained = trained_parameters(model, optimizers)
    refuse_for(config, "local steps, which average whole models")
    check_anchor_device(options.anchor_device)
    sharding = _checked_sharding(model, options, config, group)
    facts, parameters, buffers = numbered(model, trained, config, sharding)
    fragments = fragments_of(parameters, buffers, options)
    anchors = [anchor for part in fragments for entry, anchor in part.entries() if not entry.is_buffer]
    return Trained(parameters, buffers, facts, fragments, make_outer(options.outer, anchors), sharding)


def _checked_sharding(
    model: nn.Module, options: LocalOptions, config: GQSGDConfig, group: dist.ProcessGroup | None
) -> Sharding:
    """Returns how the parameters are divided among ranks of a replica.

    Raises:
        ConfigError: if local steps with these options cannot average them.
    """
    divided = next((name for name, parameter in model.named_parameters() if is_divided(parameter)), None)
    if divided is None:
        return WHOLE
    if group is None or options.is_merged:
        raise ConfigError(
            f"parameter {divided!r} is sharded (a DTensor), and all ranks of a replica have to end a round together: "
            "rounds by the clock and elastic=True need whole parameters on each rank. Give every= a number of steps, "
            "or leave out fully_shard"
        )
    if config.remembers:
        raise ConfigError(
            f"parameter {divided!r} is sharded (a DTensor), and memories do not work with sharded parameters: give "
            "memory='none' and memory_down='none'"
        )
    return sharding_of(model, group)


def check_module(model: object) -> None:
    """Raise ConfigError for a model that local steps cannot train: no module, one that is wrapped in
    DistributedDataParallel, or one with an expanded buffer."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module; give the module that the optimizer trains"
        )
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                "the model is wrapped in DistributedDataParallel, which averages gradients in every step; give "
                "LocalSteps the module itself (model.module), and train that module"
            )
    for name, buffer in model.named_buffers():
        if any(size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ConfigError(
                f"buffer {name!r} of shape {tuple(buffer.shape)} is expanded, so that several of its elements are one "
                "number in memory, and no average can be put there; register a copy: buffer.clone("
                "memory_format=torch.contiguous_format)"
            )


def check_anchor_device(device: torch.device | str | None) -> None:
    """Raise ConfigError for a device on which this process cannot have anchors. None means the parameters' device."""
    if device is None:
        return
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError if this torch was built without it
        raise ConfigError(
            f"anchor_device={device!r} is not here ({first_line(error)}); give 'cpu', or the device of a GPU of this "
            "machine"
        ) from error


def check_optimizers(optimizers: Iterable[Optimizer], options: LocalOptions) -> None:
    """Raise ConfigError for an inner optimizer that does not train each rank separately, or that averages disturb."""
    for optimizer in optimizers:
        # Compared by name, because importing its module would import torch's RPC.
        if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
            raise ConfigError(
                "a ZeroRedundancyOptimizer gives the parameters that one rank has trained to all ranks in every step, "
                "and in local steps each rank trains all of its own; give LocalSteps the optimizer that it is made "
                "of, such as torch.optim.AdamW"
            )
        if compares_steps(optimizer) and options.inner_state != "reset":
            raise ConfigError(
                f"inner_state={options.inner_state!r}: {type(optimizer).__name__} compares the gradients of successive "
                "steps, and each average moves the weights between two of them, so it would take wrong curvatures, and "
                "may diverge; take inner_state='reset', with which it begins anew after each average"
            )


def trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, nn.Parameter]:
    """Returns the parameters that are averaged, by name: those that require a gradient and that the optimizers have.

    Raises:
        ConfigError: if the optimizers have parameters of another model, or no parameter that requires a gradient.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    own = list(parameters_of(optimizers))
    strangers = [parameter for parameter in own if id(parameter) not in names]
    if strangers:
        remedy = "give LocalSteps the model whose parameters the optimizer was made with"
        if any(map(is_divided, model.parameters())):
            remedy += (
                "; if the optimizer was made after fully_shard and a forward pass, it has whole parameters, which "
                "FSDP2 keeps until a backward pass: call model.reshard() before the optimizer is made"
            )
        raise ConfigError(
            f"the optimizer has {len(strangers)} of its {len(own)} parameters from another model; {remedy}"
        )
    wanted = {id(parameter) for parameter in own if parameter.requires_grad}
    trained = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}
    if not trained:
        raise ConfigError("no parameter of the optimizer requires a gradient; unfreeze some before LocalSteps is made")
    check_parameters(trained)
    return trained


def numbered(
    model: nn.Module, trained: Mapping[str, nn.Parameter], config: GQSGDConfig, sharding: Sharding = WHOLE
) -> tuple[list[Parameter], list[Entry], list[Entry]]:
    """Returns the trained parameters with the settings that a configuration gives them, and the parameters and
    floating-point buffers that are averaged.

    Parameters are numbered by their places in the model, and buffers after them; the shards of a parameter have
    different numbers, and so different dither. Buffers are sent uncompressed.
    """
    all_parameters = number_parameters(dict(model.named_parameters()), config)
    facts = [parameter for parameter in all_parameters if parameter.name in trained]
    parameters = [
        Entry(
            Segment(
                fact.number * sharding.size + number_of_part(trained[fact.name]),
                own_part(trained[fact.name]).numel(),
                fact.raw,
            ),
            plain_name(fact.name),
            trained[fact.name],
            is_buffer=False,
        )
        for fact in facts
    ]
    first_of_buffers = len(all_parameters) * sharding.size
    floating = {name: buffer for name, buffer in model.named_buffers() if _is_averaged(buffer) and buffer.numel()}
    buffers = [
        Entry(Segment(first_of_buffers + place, buffer.numel(), True), plain_name(name), buffer, True)
        for place, (name, buffer) in enumerate(floating.items())
    ]
    return facts, parameters, buffers


def fitted_to_ranks(start: Meeting, trained: Trained, config: GQSGDConfig) -> tuple[GQSGDConfig, str]:
    """Returns the compression with a reducer chosen for the ranks of a meeting, and a note on it."""
    (nodes,) = nodes_of_groups(start, trained.device)
    numel = sum(entry.segment.numel for entry in trained.parameters)
    fit = fitted(config, nodes, numel, trained.parameters[0].tensor.dtype)
    return resolve(fit.config, len(nodes.of_ranks)), fit.note


def own_facts(options: LocalOptions, model: nn.Module, trained: Trained) -> dict[str, Any]:
    """Returns the facts that must be equal on all ranks of local steps, in addition to the configuration: plain values
    by name."""
    averaged = [entry.segment for entry in (*trained.parameters, *trained.buffers)]
    # Ranks also take those that are not averaged from the first rank, at the start or in each average.
    named = (*model.named_parameters(), *model.named_buffers())
    # By plain names, because some ranks may have compiled the model, and others not.
    tensors = [(plain_name(name), tuple(tensor.shape), tensor.dtype) for name, tensor in named if tensor.numel()]
    own = {name: getattr(options, name) for name in options.field_names() if name != "anchor_device"}
    own |= {"every": _every(options), "rule": str(options.rule), "anchor_dtype": str(options.anchor_dtype)}
    own["outer"] = describe_outer(trained.outer)
    dtypes = ", ".join(sorted({str(tensor.dtype) for _, tensor in named}))
    return {"dtypes": dtypes, "parameters and buffers": digest(tensors), "averaged": digest(averaged), **own}


def _every(options: LocalOptions) -> int | str | list[int]:
    """Returns the steps of the first rounds, or the time of a round, as a plain value."""
    if callable(options.every):
        return [options.steps_of_round(number) for number in range(_COMPARED_ROUNDS)]
    return options.every if isinstance(options.every, int) else options.every_in_words()


def place_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Returns the shape, dtype and device of a tensor."""
    return tensor.shape, tensor.dtype, tensor.device


def in_words(place: tuple[torch.Size, torch.dtype, torch.device]) -> str:
    """Returns the result of `place_of` as text, e.g. ``(8, 3) torch.float32 on cpu``."""
    shape, dtype, device = place
    return f"{tuple(shape)} {dtype} on {device}"


class OwnBuffers:
    """The buffers of a model. The tensors that were its buffers when this was created are averaged."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}
        self._places = {name: place_of(buffer) for name, buffer in self._buffers.items()}

    @torch.no_grad()  # a value that was assigned may have a gradient's history
    def take_back(self) -> None:
        """If the model has assigned new tensors to buffers, copy their values to the averaged tensors.

        A module may do so in ``forward``: ``self.mean = 0.9 * self.mean + 0.1 * x.mean(0)``.

        Raises:
            ConfigError: if a buffer has another shape, dtype or device, because it was replaced, or resized in place.
        """
        model = self._model()
        now = {} if model is None else dict(model.named_buffers())
        for name, buffer in self._buffers.items():
            new = now.get(name, buffer)
            # A buffer that was resized in place is the same tensor as before.
            if place_of(new) != self._places[name]:
                raise ConfigError(
                    f"buffer {name!r} was {in_words(self._places[name])} when LocalSteps was made, and is "
                    f"{in_words(place_of(new))} now; make LocalSteps after the model has its shapes, dtype and device: "
                    "a module that gives a buffer its shape in its first forward pass, such as an observer of "
                    "quantisation-aware training, needs that pass before"
                )
            if new is buffer:
                continue
            buffer.copy_(new)
            module, _, own_name = name.rpartition(".")
            model.get_submodule(module)._buffers[own_name] = buffer  # type: ignore[union-attr]


def _is_averaged(buffer: Tensor) -> bool:
    """Returns whether a buffer's dtype is one whose mean is computed. That of 8 bits is not: it holds codes."""
    return buffer.dtype in COMPUTE_DTYPES


class IntegerBuffers:
    """Buffers that are not averaged, because of their dtype, such as counters, and weights of 8 bits."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [buffer for buffer in model.buffers() if not _is_averaged(buffer) and buffer.numel()]

    def start(self, group: dist.ProcessGroup) -> tuple[list[Tensor], list[dist.Work]]:
        """Start to broadcast the current values of a group's first rank. Returns the tensors that will hold them, and
        the works to wait for."""
        values = [buffer.clone(memory_format=torch.contiguous_format) for buffer in self._buffers]
        flats = [value.view(-1).view(torch.uint8) for value in values]
        works = [dist.broadcast(flat, dist.get_global_rank(group, 0), group, async_op=True) for flat in flats]
        return values, [work for work in works if work is not None]

    def take(self, values: Sequence[Tensor]) -> None:
        """Copy the first rank's values to the buffers."""
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)

    def read(self) -> Tensor:
        """Returns the buffers' bytes as int64 numbers on the CPU, [numel], which are sent with a merge; empty if there
        is no such buffer."""
        parts = [buffer.detach().cpu().contiguous().view(-1).view(torch.uint8) for buffer in self._buffers]
        if not parts:
            return torch.empty(0, dtype=torch.int64)
        together = torch.cat(parts)
        return F.pad(together, (0, -together.numel() % 8)).view(torch.int64)

    @torch.no_grad()
    def write(self, numbers: Tensor) -> None:
        """Copy the result of `read` to the buffers."""
        place = 0
        together = numbers.contiguous().view(torch.uint8)
        for buffer in self._buffers:
            # A copy, because the part may not be aligned for this dtype.
            part = together[place : place + buffer.nbytes].clone()
            buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
            place += buffer.nbytes
