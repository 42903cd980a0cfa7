"""FSDP2 (`fully_shard`): quantised means over replicas, reduce-scatters of gradients, and all-gathers of weights.

This behaviour of torch shapes this file: FSDP reduces a module's gradients at the end of the module's backward pass.
The reduce-scatter leaves on each rank the mean of its shards over the ranks among which parameters are sharded (for
fp16, only a part of the divisor is applied, and FSDP divides by the rest afterwards). The all-reduce hook replaces that
tensor in place. After `set_gradient_divide_factor`, gradients are sums over all ranks divided by that factor, as in
torch's own HSDP.

Before a module's forward pass, and again before its backward pass, FSDP gathers the module's weights. With codes, the
model computes with unbiased roundings of the weights, and the optimizer moves the exact shards (QSDP, arXiv
2302.02390). The dither depends on the number of the module's reductions, so the forward and the backward pass of a step
have the same rounded weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve_each
from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.frameworks.fsdp_changes import ModelChanges
from lightning_gqsgd.frameworks.fsdp_hooks import check_hooks, set_hooks
from lightning_gqsgd.frameworks.fsdp_modules import (
    Partial,
    ShardedGroup,
    ShardedParameter,
    not_averaged,
    present,
    row,
    shard_group,
    sharded_groups,
)
from lightning_gqsgd.frameworks.fsdp_starting import check_groups, check_replicas, check_request
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.kernels.wire import COMPUTE_DTYPES
from lightning_gqsgd.predict.levels import Fit, fitted, fitted_scatter
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import REDUCERS
from lightning_gqsgd.session.checkpoint import REMEDY, STATE_SCHEMA, check_state, is_count
from lightning_gqsgd.session.nodes import Nodes, nodes_of_groups
from lightning_gqsgd.session.opening import Side, digest_of_facts, facts_of, open_engines
from lightning_gqsgd.session.parameters import digest
from lightning_gqsgd.session.report import in_tensors, in_words, ring_bytes_in_fp32, summary
from lightning_gqsgd.sparse.options import refuse_for
from lightning_gqsgd.wire.agreement import Stamp, digest_of
from lightning_gqsgd.wire.communicator import patience_of
from lightning_gqsgd.wire.engine import Engine, Request, Words, untraced
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan, Segments
from lightning_gqsgd.wire.telemetry import Telemetry, moment

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.spec.fields import FieldArguments

logger = logging.getLogger(__name__)

_WORDS = Words(
    remedy="shard a new model and register the hooks there",
    differ="A state was loaded, or parameters were frozen, unfrozen or left without a gradient, on some ranks only, or "
    "weights were cast or set_gradient_divide_factor was called there: do the same on every rank "
    "(set_reduce_scatter_unused_params(True) is for parameters without a gradient), and register the hooks on a new "
    "model",
)


@dataclass(eq=False)
class _Collective:
    """One of the collectives that a module's gradients or weights go through.

    Attributes:
        name: for messages and checkpoints.
        engine: the ranks that take part.
        configs: the configuration, with its reducer chosen; or that of each number of bits that is given by name. They
            have seeds of their own, see `reseed`.
        rows: which ranks' shards are in a flat tensor, see `fsdp_modules`.
        first_bucket: number of its first counters.
        plan: what is done with a flat tensor.
        dither: a text that no other collective of the same ranks has; empty for the one whose seed is the user's.
    """

    name: str
    engine: Engine
    configs: list[GQSGDConfig]
    rows: Sequence[int]
    first_bucket: int
    plan: type[Plan] = Plan
    dither: str = ""

    @property
    def to_compile(self) -> list[GQSGDConfig]:
        """The configurations whose kernels are compiled. Those of gradients begin with a step without compression,
        because modules of which some parameters got no gradient are reduced uncompressed in any step."""
        if self.plan is GatherPlan:
            return self.configs
        return [replace(one, warmup_steps=max(1, one.warmup_steps)) for one in self.configs]

    def reseed(self, seed: int) -> None:
        """Derive the seed from that of the user's configuration. The dither has to be independent of that of other
        replicas, of the mean over replicas, which rounds the results of reduce-scatters, and of other tensors."""
        if self.dither:
            text = f"{seed} {self.dither}".encode()
            digest = hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest()
            seed = int.from_bytes(digest, "little") >> 1
        self.configs = [replace(one, seed=seed) for one in self.configs]


class GQSGDFSDPState:
    """State of the hooks on one model, which `register_gqsgd_fsdp` creates.

    Attributes:
        config: the configuration, as requested.
        telemetry: counters of this process. The buckets are the modules' all-reduces, followed by their
            reduce-scatters and their all-gathers.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GQSGDConfig,
        shards: dist.ProcessGroup,
        replicate: dist.ProcessGroup | None,
        reduce_scatter: bool,
        all_gather_bits: int | None,
        timeout: timedelta | None,
        meeting: Meeting,
    ) -> None:
        self.config = config
        self._model = weakref.ref(model)
        self._groups = sharded_groups(model, config, shards)
        self._places = [(group, number) for group in self._groups for number in range(len(group.parameters))]
        device = self._groups[0].device
        replicas = replicate or self._groups[0].replicas
        replica = dist.get_rank(replicas) if replicas is not None else 0
        self._shards = shards
        self._replicas = replicate
        self._timeout = patience_of(timeout, shards, device)
        check_replicas(shards, replicate)
        check_request(config, replicate, reduce_scatter, all_gather_bits)
        check_groups(self._groups, replicate, gathers=all_gather_bits is not None)
        gathered = []
        if all_gather_bits is not None:
            gathered = [replace(make_config(None, bits=all_gather_bits), reducer="two_shot", sample_every=0)]
        of_shards, *of_replicas = nodes_of_groups(meeting, device)
        numel = sum(p.numel for group in self._groups for p in group.parameters)
        fit = fitted_scatter(config, of_shards, numel) if reduce_scatter else Fit(config)
        self._note = fit.note
        widths = fit.config.by_bits().values() if reduce_scatter else ()
        scattered = [replace(one_width, memory_down="none") for one_width in widths]
        shard_numel = numel // dist.get_world_size(shards)
        averaged = [one for nodes in of_replicas for one in _for_average(config, nodes, shard_numel)]
        own = {
            "parameters": digest(f"{g.name} {g.parameters}" for g in self._groups),
            "reduce_scatter": reduce_scatter,
            "all_gather_bits": all_gather_bits,
        }
        facts = facts_of(config, own)
        # Each group has the reducers that fit its own nodes. The dither of reduce-scatters depends on the replica, so
        # the shards of one must agree on its place.
        of_group = {"reducers of reduce-scatters": _reducers_of(scattered), "place among replicas": replica}
        sides = [Side(shards, {**facts, **of_group}, [*scattered, *gathered])]
        if replicate is not None:
            sides.append(Side(replicate, {**facts, "reducers over replicas": _reducers_of(averaged)}, averaged))
        self._choices = {bits: number for number, bits in enumerate(config.by_bits())}
        self._digest = digest_of_facts(facts)
        self._known_rows: dict[tuple[str, tuple[int, ...]], Segments] = {}
        self._reductions: defaultdict[str, int] = defaultdict(int)
        self._has_met: set[torch.dtype] = set()
        self._first_of_step: ShardedGroup | None = None
        self._graphs: set[int] = set()  # graphs of backward passes at whose ends `_after_graph` is called
        self._left: dict[int, Partial | None] = {}  # what modules had kept at the end of the step, by their index
        self._is_checked = False  # whether the forward pass of this step has looked for changes of the model
        self._trained = ""  # which parameters required a gradient in the latest step; see `ShardedGroup.trained`
        self._used = ""  # which of them had one at its end
        self._changes = ModelChanges(model, replicate is not None)
        # Kernels are compiled in `_meet`: FSDP's mixed precision decides on the dtype of gradients.
        with open_engines(meeting, sides, device, timeout=timeout, words=_WORDS, streams=1) as engines:
            self._sharded = engines[0]
            self._average = None
            self._scatter = None
            self._gather = None
            every = range(self._sharded.world_size)
            count = len(self._groups)
            if replicate is not None:
                self._average = _Collective("all-reduce", engines[1], averaged, [engines[0].rank], 0)
            if reduce_scatter:
                first = count * len(self._collectives)
                dither = f"reduce-scatter {replica}"
                self._scatter = _Collective(
                    "reduce-scatter", self._sharded, scattered, every, first, ScatterPlan, dither
                )
            if gathered:
                first = count * len(self._collectives)
                self._gather = _Collective(
                    "all-gather", self._sharded, gathered, every, first, GatherPlan, "all-gather"
                )
                # Unlike gradients, weights are always all of a module's, and all have one number of bits.
                whole = [self._rows(self._gather, group.parameters) for group in self._groups]
                self._weights_segments = [Segments(one._replace(choice=0) for one in some) for some in whole]
                self._weights_numels = [sum(one.numel for one in some) for some in whole]
            for collective in self._collectives:
                collective.reseed(config.seed)
            self.telemetry: Telemetry = self._sharded.telemetry
            self._install(model)

    @property
    def step(self) -> int:
        """Number of times that a module's gradients have been reduced. This is the number of backward passes, unless a
        backward pass reduces a module several times. (Each module has its own count, from which its dither is
        derived.)"""
        return max(self._reductions.values(), default=0)

    def is_on(self, model: nn.Module) -> bool:
        """Returns True for the model that the hooks were registered on."""
        return self._model() is model

    def __reduce__(self) -> Any:
        """Raise TypeError, for copies and pickles."""
        raise TypeError(
            "the state of register_gqsgd_fsdp belongs to its model and to the process groups of this process, so it is "
            "not copied or pickled: save state_dict(), and register the hooks on the other model"
        )

    # --- called by FSDP -----------------------------------------------------------------------------------------------

    def average(self, group: ShardedGroup, reduced: Tensor) -> None:
        """All-reduce hook: replace gradients by their mean over replicas.

        While `set_requires_all_reduce(False)` is set, gradients are kept for later, and FSDP gets zeros instead.

        Raises:
            ConfigError: if ranks do not agree, or if replicas do not have the same parameters.
            CollectiveError: a collective failed; the gradients are all NaN.
        """
        assert self._average is not None
        partial = group.partial
        if partial is not None or not group.inner.all_reduce_grads:
            parameters = group.reduced()
            # FSDP does not tell which parameters are in the tensor, and another backward pass may have others.
            has_all = reduced.numel() == sum(parameter.share for parameter in parameters)
            if not has_all or (partial is not None and partial.parameters != parameters):
                raise ConfigError(_lacks_gradients(group.name))
        if partial is not None:
            reduced += partial.gradients
            group.keep(None)
        if not group.inner.all_reduce_grads:
            group.keep(reduced.clone())
            reduced.zero_()
            return
        self._run(self._average, group, reduced)
        if group.divisor is not None:
            reduced *= self._average.engine.world_size

    def scatter(self, group: ShardedGroup, output: Tensor, gradients: Tensor, op: Any) -> None:
        """Reduce-scatter: set ``output`` to this rank's row of the mean of all ranks' ``gradients``, scaled as ``op``
        says. The contents of ``gradients`` are undefined afterwards.

        Raises:
            ConfigError: ranks do not agree.
            CollectiveError: a collective failed; the gradients are all NaN, and the output is not set.
        """
        assert self._scatter is not None
        self._run(self._scatter, group, gradients)
        shards = self._sharded.world_size
        output.copy_(gradients.view(shards, -1)[self._sharded.rank])
        if op != dist.ReduceOp.AVG:
            divisor = None if op == dist.ReduceOp.SUM else group.divisor  # the third is a sum of what was divided
            output *= shards / (divisor or 1.0)

    def gather(self, group: ShardedGroup, weights: Tensor, own: Tensor, ranks: dist.ProcessGroup) -> None:
        """All-gather: set ``weights`` to all ranks' shards of a module's weights, rounded, in rank order. FSDP has
        copied this rank's shard, ``own``, there.

        Raises:
            ConfigError: if ranks do not agree.
            CollectiveError: if a collective failed; ``weights`` are all NaN then, and the shards are as they were.
        """
        assert self._gather is not None
        engine = self._gather.engine
        segments = self._weights_segments[group.index]
        is_usual = weights.dtype in COMPUTE_DTYPES and weights.numel() == self._weights_numels[group.index]
        if not is_usual:
            self._say_once("gathered", group, "the weights of %s are gathered as they are, because FSDP packs them")
        # FSDP may keep the weights on the few ranks of one node after the forward pass (reshard_after_forward=8). A
        # model can still be evaluated after `close`, with exact weights.
        if not is_usual or ranks is not self._shards or engine.is_closed:
            dist.all_gather_into_tensor(weights, own, group=ranks)
            return
        if weights.dtype not in self._has_met:
            self._meet(weights)
        # Where several backward passes accumulate, all-reduces may be fewer than reduce-scatters.
        counted_by = self._average or self._scatter
        assert counted_by is not None  # see `fsdp_starting.check_request`
        begun = moment(weights.device)
        # Reductions compare the ranks' counts before an optimizer uses what was computed with these weights.
        request = Request(
            name=f"all-gather of {group.name}",
            configs=tuple(self._gather.configs),
            segments=segments,
            step=self._reductions[f"{counted_by.name} of {group.name}"],
            bucket=self._gather.first_bucket + group.index,
            plan=GatherPlan,
            is_held=True,  # FSDP keeps the weights until its streams have used them
        )
        engine.reduce(weights, request).wait()
        self.telemetry.expose(begun, moment(weights.device))

    def _run(self, collective: _Collective, group: ShardedGroup, x: Tensor) -> None:
        """Reduce ``x`` in place; wait for it (on a GPU, the current stream does)."""
        collective.engine.check_open()
        if x.dtype not in self._has_met:
            self._meet(x)
        name = f"{collective.name} of {group.name}"
        step = self._reductions[name]
        is_first = self._count(group)
        before = self._trained
        if is_first:
            self._check_changes()
            self._trained = " ".join(group.trained for group in self._groups)
        self._reductions[name] += 1
        begun = moment(x.device)
        segments, is_known = self._segments(collective, group, x)
        stamp = self._stamp(collective, step) if is_first else None
        if stamp is not None and before != self._trained:
            # Messages of a rank where other parameters were frozen may have other sizes.
            collective.engine.compare_first(stamp)
            stamp = None
        request = Request(
            name=f"{name}, number {step}",
            configs=tuple(collective.configs),
            segments=segments,
            step=step,
            agreement=stamp,
            bucket=collective.first_bucket + group.index,
            compressed=is_known and step >= self.config.warmup_steps,
            plan=collective.plan,
            # FSDP keeps the input of a reduce-scatter until its streams have used it; older versions of torch do not
            # keep the input of the all-reduce hook.
            is_held=collective is self._scatter,
        )
        collective.engine.reduce(x, request).wait()
        self.telemetry.expose(begun, moment(x.device))

    def _segments(self, collective: _Collective, group: ShardedGroup, x: Tensor) -> tuple[tuple[Segment, ...], bool]:
        """Returns the parameters in a flat tensor, and whether they are known. If they are not, the tensor is one
        uncompressed segment for each row."""
        rows = len(collective.rows)
        parameters = present(group.reduced(), x.numel() // rows)
        if parameters is not None:
            return self._rows(collective, parameters), True
        text = "some parameters of %s got no gradient, and FSDP does not tell which: the others travel uncompressed; "
        self._say_once("reduced", group, text + "set_reduce_scatter_unused_params(True) avoids this")
        return (Segment(0, x.numel() // rows, raw=True),) * rows, False

    def _say_once(self, about: str, group: ShardedGroup, text: str) -> None:
        """Log a warning about a module, whose name replaces ``%s``, if there was none about it."""
        if (about, group.index) not in self._said:
            self._said.add((about, group.index))
            logger.warning("gqsgd: " + text, group.name)

    def _rows(self, collective: _Collective, parameters: list[ShardedParameter]) -> Segments:
        """Returns the segments of a flat tensor of a collective that has these parameters."""
        # With thousands of shards, a module has so many segments that making them takes a tenth of a second.
        key = (collective.name, tuple(parameter.number for parameter in parameters))
        if key not in self._known_rows:
            shards = self._sharded.world_size
            rows = [row(parameters, rank, shards, self._choices) for rank in collective.rows]
            self._known_rows[key] = Segments(chain.from_iterable(rows))
        return self._known_rows[key]

    def _stamp(self, collective: _Collective, step: int) -> Stamp | None:
        """Returns the stamp that ranks compare in the first reduction of each step. Its digest has the number of
        reductions of each module. None if nothing is compressed."""
        if not any(REDUCERS[config.reducer].compresses for config in collective.configs):
            return None
        counts = json.dumps(self._reductions, sort_keys=True)
        facts = f"{self._digest} {counts} {self._trained} {self._used}"
        stamp = Stamp(collective.configs[0].seed, step, digest_of(facts))
        if collective is not self._average:
            return stamp  # ranks of one replica have other shards, and nothing more to compare
        # Training keeps weights equal on all replicas. Those of another parameter are compared in each step.
        group, number = self._places[self.step % len(self._places)]
        return stamp._replace(weights=group.weights(number, self.step))

    def _count(self, group: ShardedGroup) -> bool:
        """End telemetry's step with the backward pass; where FSDP reduces outside of one, with the next round of
        modules.

        Returns:
            Whether the group is the first of its step.
        """
        graph = torch._C._current_graph_task_id()
        in_backward = graph != -1
        if self._first_of_step is group and not in_backward:
            self._end_step()
        if in_backward and graph not in self._graphs:
            self._graphs.add(graph)
            Variable._execution_engine.queue_callback(partial(self._after_graph, graph))
        if self._first_of_step is None:
            self._first_of_step = group
        return self._first_of_step is group

    def _after_graph(self, graph: int) -> None:
        """End the step if the backward pass is over. With reentrant checkpoints, it has graphs within its graph."""
        self._graphs.discard(graph)
        if not self._is_in_backward():
            self._end_step()

    def _is_in_backward(self) -> bool:
        """Returns whether FSDP has begun a backward pass and has not ended it."""
        return any(group.awaits_end for group in self._groups)

    def _end_step(self) -> None:
        if self._first_of_step is None:
            return
        self._first_of_step = None
        self._is_checked = False
        self._used = " ".join(group.used for group in self._groups)
        self.telemetry.end_step()
        for engine in {collective.engine for collective in self._collectives}:
            engine.plans.end_step()  # tensors have other sizes where other parameters have a gradient
        # Another loss of the same step may reduce these in a backward pass of its own.
        self._left = {group.index: group.partial for group in self._groups if group.inner.all_reduce_grads}

    def _check_left(self) -> None:
        """Raise ConfigError if a module has kept gradients in a step that should have reduced all of them."""
        for group in self._groups:
            left = self._left.get(group.index)
            if left is not None and left is group.partial:
                raise ConfigError(_lacks_gradients(group.name))  # the hook was not called for it
        self._left = {}

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _meet(self, x: Tensor) -> None:
        """Compile what the first collective in a dtype needs, and wait for ranks that take longer.

        Before the very first one, compare the parameters of replicas: nobody makes them equal, and training does
        not make them equal later.
        """
        with self._meeting("the first collective in a dtype") as meeting:
            facts = {"dtype of gradients or weights": str(x.dtype)}
            replicas = dict(facts)
            if self._average is not None and not self._has_met:
                sums = (group.bit_sums() for group in self._groups)
                replicas["values of parameters (replicas have to start alike)"] = digest(sums)
                self._say_what_is_not_averaged()
            meeting.agree([facts, *([replicas] if self._replicas is not None else [])])
            with meeting.preparing():
                for one in self._collectives:
                    one.engine.compile(one.to_compile, [x.dtype], one.plan)
        self._has_met.add(x.dtype)

    def _say_what_is_not_averaged(self) -> None:
        """Warn of modules around this model that replicas train apart."""
        names = not_averaged(self._groups[0])
        if names:
            logger.warning(
                "gqsgd: nobody averages the gradients of %s (%s) over replicas: they are sharded as this model is, and "
                "are no part of it; call register_gqsgd_fsdp on the root of the model, or average them yourself",
                counted(len(names), "module"),
                listed(names),
            )

    @property
    def _collectives(self) -> list[_Collective]:
        every = (self._average, self._scatter, self._gather)
        return [collective for collective in every if collective is not None]

    def _meeting(self, purpose: str) -> Meeting:
        groups = [self._shards, *([self._replicas] if self._replicas is not None else [])]
        return Meeting(purpose, groups, self._timeout)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs for the same bits: plain values, equal on all ranks. Not a
        collective."""
        return {
            "schema": STATE_SCHEMA,
            "seed": self.config.seed,
            "step": self.step,
            "reductions": dict(self._reductions),
            "config": self.config.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, so that the dither continues. Not a collective.

        If other modules were sharded when the state was saved, modules that it does not name continue from its step. If
        ranks load different states, the next backward pass raises ConfigError on all of them.

        Raises:
            ConfigError: if ``state`` is not a state of hooks for FSDP, or has another schema.
        """
        check_state(state, self.config, {"reductions": dict})
        for name, count in state["reductions"].items():
            if not (isinstance(name, str) and is_count(count)):
                raise ConfigError(f"the gqsgd state's entry 'reductions' has {count!r:.200} for {name!r}; {REMEDY}")
        self.config = replace(self.config, seed=state["seed"])
        for collective in self._collectives:
            collective.reseed(state["seed"])
        self._reductions = defaultdict(partial(int, state["step"]), state["reductions"])

    # --- reports ---------------------------------------------------------------------------------------------------

    def report(self) -> str:
        """Returns one line that says what is compressed, to how many bits and in which collectives, and what is sent
        uncompressed."""
        ways = []
        if self._scatter is not None and self._sharded.world_size > 1:
            levels = " by hierarchical" if self._scatter.configs[0].reducer == "hierarchical" else ""
            ways.append(f"reduce-scattered over {self._sharded.world_size} shards{levels}")
        if self._average is not None and self._average.engine.world_size > 1:
            names = dict.fromkeys(config.reducer for config in self._average.configs)
            ways.append(f"averaged over {self._average.engine.world_size} replicas by {' and '.join(names)}")
        if not ways:
            return "gqsgd: one process on the way that is compressed, nothing to reduce"
        widths = self.config.by_bits().values()
        if not any(REDUCERS.get(config.reducer, REDUCERS["two_shot"]).compresses for config in widths):
            return f"gqsgd: gradients are {ways[0]}, nothing compressed (reducer={self.config.reducer!r})"
        trained = [p for group in self._groups for p in group.reduced()]
        raw = [p.numel for p in trained if p.raw]
        coded = [p.numel for p in trained if not p.raw]
        # One rank that has the whole model gathers nothing, and computes with exact weights.
        gathers = self._gather is not None and self._sharded.world_size > 1
        weights = [p.numel for group in self._groups for p in group.parameters if gathers and not p.raw]
        if not coded and not weights:
            return (
                f"gqsgd: NOTHING IS COMPRESSED: all parameters are smaller than min_numel={self.config.min_numel}, or "
                "excluded by name; lower min_numel, or exclude fewer"
            )
        parts = []
        kind = "sharded tensor"
        if coded:
            parts.append(
                f"{in_tensors(coded, 'gradient value', kind)}, {' and '.join(ways)}, at {self.config.describe()}"
            )
        if raw:
            parts.append(f"uncompressed: {in_tensors(raw, 'gradient value', kind)}")
        if self.config.warmup_steps > self.step:
            parts.append(f"uncompressed until step {self.config.warmup_steps}")
        if self._gather is not None and gathers:
            parts.append(f"{in_tensors(weights, 'weight', kind)}, gathered at {self._gather.configs[0].describe()}")
        return f"gqsgd: {'; '.join(parts)}{self._note}"

    def summary(self) -> dict[str, float]:
        """Returns bytes, bits, errors and waiting times since the hooks were registered, by name; see
        `report.summary`."""
        return summary(self.telemetry, sum(map(self._fp32_bytes, self._collectives)))

    def summary_line(self) -> str:
        """Returns the summary as one line: bytes compared with fp32, bits, the error of gradients, and the share of
        time spent waiting."""
        return in_words(self.summary(), "gradients" if self._gather is None else "gradients and weights")

    def _fp32_bytes(self, collective: _Collective) -> float:
        """Returns the bytes that this rank would have sent in one of the collectives in fp32."""
        own = range(collective.first_bucket, collective.first_bucket + len(self._groups))
        counters = (bucket for number, bucket in self.telemetry.buckets.items() if number in own)
        of_reduction = ring_bytes_in_fp32(counters, collective.engine.world_size)
        # A reduce-scatter or an all-gather is half of an all-reduce.
        return of_reduction if collective is self._average else of_reduction / 2

    def close(self) -> None:
        """Release threads and process groups. After that, the model cannot be trained any more, and computes with exact
        weights."""
        self._checks.remove()
        if self._average is not None:
            self._average.engine.close()
        self._sharded.close()

    def _install(self, model: nn.Module) -> None:
        self._said: set[tuple[str, int]] = set()  # warnings, and groups about which users have had them
        self._hooks = [one is not None for one in (self._average, self._scatter, self._gather)]
        if self._average is not None:
            for group in self._groups:
                group.leave_replicas_to_hook()
        set_hooks(self, self._groups, self._hooks)
        # Reductions check the same, but there are none where all hooks were replaced.
        self._checks = model.register_forward_pre_hook(self._before_forward, prepend=True)

    @untraced
    def _before_forward(self, *_: Any) -> None:
        # A checkpointed model computes its forward pass again in the backward pass.
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        if self._is_in_backward():
            raise ConfigError(
                "an exception has ended an earlier backward pass. FSDP2 still waits for its end and reduces no further "
                "gradients, so the model would not be trained any more: call the root's reset_iter_state() on all "
                "ranks, where torch has it, or shard a new model, and load a checkpoint there"
            )
        self._end_step()  # if its last graph had no reduction
        self._check_left()
        self._is_checked = False
        self._check_changes()
        self._is_checked = True

    def _check_changes(self) -> None:
        """Raise ConfigError if not all gradients would go through these hooks; see `check_hooks`, `ModelChanges`."""
        check_hooks(self, self._groups, self._hooks)
        model = self._model()
        if model is not None and not self._is_checked:  # not twice in a step
            self._changes.check(model)


def register_gqsgd_fsdp(
    model: nn.Module,
    *,
    replicate: dist.ProcessGroup | DeviceMesh | None = None,
    reduce_scatter: bool = False,
    all_gather_bits: int | None = None,
    mesh: dist.ProcessGroup | DeviceMesh | None = None,
    preset: str | GQSGDConfig | None = None,
    timeout: timedelta | None = None,
    **fields: Unpack[FieldArguments],
) -> GQSGDFSDPState:
    """Compress the gradient communication of a model on which `fully_shard` has been called.

    This is a collective: every rank has to call it, after the last `fully_shard` and before the first backward pass.
    Returns the state of the hooks, which has counters, checkpoints and `close`.

    For hybrid sharding, create a mesh of two dimensions, and shard over both, or over the inner dimension only. The
    mean over the outer dimension is then quantised, and gradients are the mean over all ranks::

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        register_gqsgd_fsdp(model, replicate=mesh["replicate"], bits=4)

    Parameters are not broadcast: replicas have to start with the same parameters, which is checked in the first
    backward pass. Modules of which only some parameters get a gradient are reduced uncompressed.

    Args:
        model: a model with sharded modules.
        replicate: the ranks that have the same shards as this one, as a process group or a mesh of one dimension. If
            the model is sharded over two dimensions, torch no longer averages over them itself. None: means over
            replicas are not quantised.
        reduce_scatter: whether to quantise the reduce-scatter over the ranks among which parameters are sharded, in
            addition to ``replicate`` or alone. Codes are added only once, in full precision, so ``reducer`` may be
            "two_shot", "hierarchical" (with two levels: uncompressed inside a node, and quantised between nodes), or
            "auto", which takes two levels where that is predicted to be faster.
        all_gather_bits: number of bits of the weights, 2 to 8, in the all-gathers before a module's forward and
            backward pass (QSDP, arXiv 2302.02390). The model then computes with rounded weights, also in evaluation,
            and the optimizer and checkpoints have the exact ones. Weights need more bits than gradients, 8 or 6. None:
            FSDP gathers them as they are.
        mesh: the mesh that `fully_shard` was given, for a model whose parameters have different ones, such as the
            experts of a mixture. This call then compresses the gradients of the parameters that are sharded over this
            mesh, and other calls those of the others. None: all parameters are sharded over the same ranks.
        preset: name of a preset (see `presets.PRESETS`), or a configuration.
        timeout: timeout of collectives. None takes those of the model's process groups.
        **fields: fields of `GQSGDConfig`. Names, ``exclude`` and ``min_numel`` refer to whole parameters,
            ``warmup_steps`` and ``sample_every`` to the reductions of each module. Memories are not supported.

    Raises:
        ConfigError: if the configuration, the model or the version of torch cannot work, or if ranks do not agree.
        CollectiveError: if not all ranks call this within the timeout.
    """
    replicate = _group_of(replicate, "replicate", 1, "the mesh of replicas: mesh['replicate']")
    # `fully_shard` shards parameters over the last dimension of a mesh.
    shards = shard_group(model, _group_of(mesh, "mesh", 2, "the one that fully_shard was given, which has one or two"))
    groups = [shards, *([replicate] if replicate is not None else [])]
    patience = patience_of(timeout, shards, next(model.parameters()).device)
    with Meeting("register_gqsgd_fsdp", groups, patience) as meeting:
        config = make_config(preset, **fields)
        refuse_for(config, "FSDP2, which has dense gradients only")
        state = GQSGDFSDPState(model, config, shards, replicate, reduce_scatter, all_gather_bits, timeout, meeting)
    weakref.finalize(model, state.close)  # also at exit: Gloo groups that are still open then can abort the process
    return state


def _group_of(given: Any, name: str, most: int, instead: str) -> dist.ProcessGroup | None:
    """Returns a process group as it is, or that of the last dimension of a mesh, which has ``most`` at most.

    ``name`` and ``instead`` are for errors.
    """
    if isinstance(given, DeviceMesh):
        if given.ndim > most:
            raise ConfigError(f"{name} has {given.ndim} dimensions; give {instead}")
        return given.get_group(given.ndim - 1)
    if given is not None and not isinstance(given, dist.ProcessGroup):
        raise ConfigError(f"{name}={given!r:.100} is neither a process group nor a mesh; give {instead}")
    return given


def _for_average(config: GQSGDConfig, nodes: Nodes, numel: int) -> list[GQSGDConfig]:
    """Returns the configurations of means over replicas, in the order of their bits in ``bits``; ``numel`` is the
    number of coordinates that a rank reduces in a step."""
    # The dtype of the gradients is known in the first step only.
    fit = fitted(config, nodes, numel, torch.float32)
    return list(resolve_each(fit.config, len(nodes.of_ranks)).values())


def _lacks_gradients(name: str) -> str:
    """Returns the error for a module whose gradients of several backward passes cannot be added."""
    return (
        f"module {name!r} had parameters without a gradient in one of the backward passes that accumulate under "
        "set_requires_all_reduce(False): call set_reduce_scatter_unused_params(True), and freeze and unfreeze "
        "parameters between steps only, or accumulate with set_requires_gradient_sync(False)"
    )


def _reducers_of(configs: Sequence[GQSGDConfig]) -> list[list[Any]]:
    """Returns the reducers that were chosen for the ranks of a group, as plain values."""
    return [[config.reducer, config.node_size] for config in configs]
