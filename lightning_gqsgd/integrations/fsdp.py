"""FSDP2 (`fully_shard`): quantised means over replicas, and quantised reduce-scatters.

What torch does, as far as it shapes this file: a module's gradients are reduced when its backward pass is through. The
reduce-scatter leaves on each rank the mean of its shards over the ranks that parameters are divided among (of fp16, a
part of it, and FSDP divides by the rest afterwards); the all-reduce hook replaces that tensor in place. After
`set_gradient_divide_factor`, gradients are sums over all ranks divided by that factor, as in torch's own HSDP.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from lightning_gqsgd.compiling import compile_kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.functional import Reduction
from lightning_gqsgd.hook import STATE_SCHEMA, warn_of_difference
from lightning_gqsgd.integrations.fsdp_modules import ShardedGroup, digest, parameter_bits, row, sharded_groups
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.plan import Plan, ScatterPlan, check_gradient
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import Setting, new_store, resolve, setting_for, stages
from lightning_gqsgd.telemetry import Telemetry, moment
from lightning_gqsgd.transport.communicator import Communicator
from lightning_gqsgd.transport.pipeline import Job, Runner, release, runner_for

logger = logging.getLogger(__name__)

#: Characters of an error that are passed on to ranks that have not seen it.
ERROR_LENGTH = 500


@dataclass(eq=False)
class _Collective:
    """One of the collectives that a module's gradients go through.

    Attributes:
        name: for messages and checkpoints.
        communicator: the ranks that take part.
        config: the configuration, with its reducer chosen.
        plan: what is planned with.
        rows: which ranks' shards are in a flat tensor, see `fsdp_modules`.
        first_bucket: number of its first counters.
        plans: by what is reduced.
    """

    name: str
    communicator: Communicator
    config: GQSGDConfig
    plan: type[Plan]
    rows: Sequence[int]
    first_bucket: int
    plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict)


class GQSGDFSDPState:
    """State of the hooks on one model; see `register_gqsgd_fsdp`.

    Creating one is a collective over all ranks that the model is sharded and replicated over.

    Attributes:
        config: the configuration, as requested.
        telemetry: counters of this process; a bucket is a module's all-reduce or, after those, its reduce-scatter.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GQSGDConfig,
        replicate: dist.ProcessGroup | None,
        reduce_scatter: bool,
        timeout: timedelta | None = None,
    ) -> None:
        _check_request(config, replicate, reduce_scatter)
        self.config = config
        self._groups = sharded_groups(model, config)
        _check_groups(self._groups, replicate)
        device, shards = self._groups[0].device, self._groups[0].shards
        replicas = replicate or self._groups[0].replicas
        self._replica = dist.get_rank(replicas) if replicas is not None else 0

        scattered = _for_scatter(config, self._replica) if reduce_scatter else GQSGDConfig(reducer="native")
        self._shards = Communicator(device, shards, timeout, stages=stages(scattered, shards.size()))
        self._average: _Collective | None = None
        self._scatter: _Collective | None = None
        if replicate is not None:
            averaged = resolve(config, replicate.size())
            among = Communicator(device, replicate, timeout, stages=stages(averaged, replicate.size()))
            self._average = _Collective("all-reduce", among, averaged, Plan, [self._shards.rank], 0)
        if reduce_scatter:
            rows, before = range(self._shards.size), len(self._groups) if replicate is not None else 0
            self._scatter = _Collective("reduce-scatter", self._shards, scattered, ScatterPlan, rows, before)
        facts = {**config.to_dict(), "parameters": digest(self._groups), "reduce_scatter": reduce_scatter}
        self._agree({**facts, "place among replicas": self._replica}, {**facts, "shard": self._shards.rank})
        self._runner: Runner | None = runner_for(*self._communicators())
        self._reductions: defaultdict[str, int] = defaultdict(int)
        self._has_met: set[torch.dtype] = set()
        self._first_of_step: ShardedGroup | None = None
        self.telemetry = Telemetry()
        self._install()

    @property
    def step(self) -> int:
        """Number of times that a module's gradients have been reduced: of backward passes, unless some reduce the same
        module several times. (Each module counts its own, and that number is the dither's.)"""
        return max(self._reductions.values(), default=0)

    # --- what FSDP calls ---------------------------------------------------------------------------------------------

    def average(self, group: ShardedGroup, reduced: Tensor) -> None:
        """All-reduce hook: replace gradients by their mean over replicas.

        While `set_requires_all_reduce(False)` holds, they are kept, and zero is handed on instead.

        Raises:
            ConfigError: ranks do not agree, or replicas do not have the same parameters.
            CollectiveError: a collective failed; the gradients are all NaN.
        """
        assert self._average is not None
        if group.partial is not None:
            if group.partial.numel() != reduced.numel():
                raise ConfigError(
                    f"module {group.name!r} had other parameters with gradients in the last backward pass, which "
                    "did not all-reduce: call set_reduce_scatter_unused_params(True), or accumulate with "
                    "set_requires_gradient_sync(False)"
                )
            reduced += group.partial
            group.partial = None
        if not group.inner.all_reduce_grads:
            group.partial = reduced.clone()
            reduced.zero_()
            return
        self._run(self._average, group, reduced)
        if _divisor(group) is not None:
            reduced *= self._average.communicator.size

    def scatter(self, group: ShardedGroup, output: Tensor, gradients: Tensor, op: Any) -> None:
        """Reduce-scatter: set ``output`` to this rank's row of the mean of all ranks' ``gradients``, times what ``op``
        asks for. The gradients are left in any state.

        Raises:
            ConfigError: ranks do not agree.
            CollectiveError: a collective failed; the gradients are all NaN, and the output is not set.
        """
        assert self._scatter is not None
        self._run(self._scatter, group, gradients)
        output.copy_(gradients.view(self._shards.size, -1)[self._shards.rank])
        if op != dist.ReduceOp.AVG:
            divisor = None if op == dist.ReduceOp.SUM else _divisor(group)  # the third is a sum of what was divided
            output *= self._shards.size / (divisor or 1.0)

    def _run(self, collective: _Collective, group: ShardedGroup, x: Tensor) -> None:
        """Reduce ``x`` in place; wait for it (on a GPU, the current stream does)."""
        if self._runner is None:
            raise RuntimeError("gqsgd: the hooks were closed; shard a new model and register them there")
        if x.dtype not in self._has_met:
            self._meet(x)
        name = f"{collective.name} of {group.name}"
        step = self._reductions[name]
        self._reductions[name] += 1
        self._count(group)
        begun = moment(x.device)
        counters = self.telemetry.bucket(collective.first_bucket + group.index)
        starts = []
        if collective.communicator.size > 1 and x.numel():
            plan = self._plan(collective, group, x, warming_up=step < collective.config.warmup_steps)
            store = new_store(collective.config, collective.communicator.size, {}, x.dtype, x.device)
            starts = plan.starts(x, collective.communicator.rank, step, store, counters, self.telemetry)
        job = Job(x, starts, f"{name}, number {step}", counters, self.telemetry, last_of_step=False)
        if starts:
            self._runner.submit(collective.communicator, job)
        else:
            job.finish()
        Reduction(job, x, x).wait()
        self.telemetry.expose(begun, moment(x.device))

    def _plan(self, collective: _Collective, group: ShardedGroup, x: Tensor, *, warming_up: bool) -> Plan:
        parameters = group.reduced()
        key = (group.index, x.dtype, x.numel(), warming_up, *(p.number for p in parameters))
        if key not in collective.plans:
            check_gradient(x, "a gradient")
            rows, config = collective.rows, collective.config
            segments = [segment for one in rows for segment in row(parameters, one, self._shards.size)]
            known = sum(segment.numel for segment in segments) == x.numel()
            if not known:
                logger.warning(
                    "gqsgd: some parameters of %s got no gradient, and FSDP does not tell which: the others travel "
                    "uncompressed; set_reduce_scatter_unused_params(True) avoids this",
                    group.name,
                )
                segments = [Segment(0, x.numel() // len(rows), raw=True)] * len(rows)
            communicator = collective.communicator
            setting = Setting(config, communicator.size, x.dtype, communicator.piece_numel)
            if warming_up or not known:
                segments = [segment._replace(raw=True) for segment in segments]
                setting = setting_for(setting, compressed=False)
            collective.plans[key] = collective.plan(segments, setting)
        return collective.plans[key]

    def _count(self, group: ShardedGroup) -> None:
        """End telemetry's step with the backward pass or, where FSDP reduces outside of one, with the next round."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self._first_of_step is group and not in_backward:
            self._end_step()
        if self._first_of_step is None:
            self._first_of_step = group
            if in_backward:
                Variable._execution_engine.queue_callback(self._end_step)

    def _end_step(self) -> None:
        if self._first_of_step is not None:
            self._first_of_step = None
            self.telemetry.end_step()

    # --- agreement ---------------------------------------------------------------------------------------------------

    def _meet(self, x: Tensor) -> None:
        """Compile what the first reduction in a dtype needs; wait for ranks that take longer. Before the very first,
        compare the parameters of replicas, which nobody makes equal and nothing could bring together later."""
        for collective in (self._average, self._scatter):
            if collective is not None:
                compile_kernels(collective.config, x.dtype, x.device, collective.communicator.size)
        facts = {"dtype of gradients": str(x.dtype)}
        theirs = dict(facts)
        if self._average is not None and not self._has_met:
            theirs["values of parameters (replicas have to start alike)"] = parameter_bits(self._groups)
        self._agree(facts, theirs)
        self._has_met.add(x.dtype)

    def _agree(self, among_shards: dict[str, Any], among_replicas: dict[str, Any]) -> None:
        """Compare facts among the ranks that share a replica, and among those that hold the same shards.

        All ranks raise if two differ: who differs from none hears from another one of its shard, or replica.
        """
        meetings = [(self._shards, among_shards)]
        if self._average is not None:  # the second round of the first meeting is about what was found in the second
            meetings = [*meetings, (self._average.communicator, among_replicas), (self._shards, {})]
        found: ConfigError | None = None
        for communicator, facts in meetings:
            try:
                communicator.agree({**facts, "error of another rank": str(found)[:ERROR_LENGTH] if found else None})
            except ConfigError as error:
                found = found or error
        if found is not None:
            raise found

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs for the same bits; plain values, equal on all ranks, and no collective."""
        return {
            "schema": STATE_SCHEMA,
            "seed": self.config.seed,
            "step": self.step,
            "reductions": dict(self._reductions),
            "config": self.config.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the dither of a checkpoint. Not a collective.

        Modules that the checkpoint does not name, because others were sharded, continue from its step.

        Raises:
            ConfigError: the state is of another schema, or not of FSDP.
        """
        if state.get("schema") != STATE_SCHEMA or "reductions" not in state:
            raise ConfigError(
                f"not an FSDP state of schema {STATE_SCHEMA} (schema: {state.get('schema')!r}, entries: "
                f"{', '.join(state)}): resume with what wrote it, or drop the entry to start the dither anew"
            )
        warn_of_difference(state["config"], self.config)
        self.config = replace(self.config, seed=state["seed"])
        if self._average is not None:
            self._average.config = resolve(self.config, self._average.communicator.size)
            self._average.plans.clear()
        if self._scatter is not None:
            self._scatter.config = _for_scatter(self.config, self._replica)
            self._scatter.plans.clear()
        self._reductions = defaultdict(partial(int, state["step"]), state["reductions"])

    # --- what the user sees ------------------------------------------------------------------------------------------

    def report(self) -> str:
        """One line: what is compressed, to how many bits, on which ways; what is not."""
        every = [p for group in self._groups for p in group.parameters]
        raw = [p for p in every if p.raw]
        ways = []
        if self._scatter is not None and self._shards.size > 1:
            ways.append(f"reduce-scattered over {self._shards.size} shards")
        if self._average is not None and self._average.communicator.size > 1:
            name, replicas = self._average.config.reducer, self._average.communicator.size
            ways.append(f"averaged over {replicas} replicas by {name}")
        if not ways:
            return "gqsgd: one process on the way that is compressed, nothing to reduce"
        if self.config.reducer == "native":
            return f"gqsgd: gradients are {ways[0]}, nothing compressed (reducer='native')"
        text = f"gqsgd: {sum(p.numel for p in every) - sum(p.numel for p in raw):,} gradient values in "
        text += f"{len(every) - len(raw)} sharded tensors, {' and '.join(ways)}, at {self.config.describe()}"
        if raw:
            text += f"; uncompressed: {sum(p.numel for p in raw):,} values in {len(raw)} tensors"
        if self.config.warmup_steps > self.step:
            text += f"; uncompressed until step {self.config.warmup_steps}"
        return text

    def close(self) -> None:
        """Stop using threads and process groups. The model cannot be trained any more."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for communicator in self._communicators():
                runner.close(communicator)
            release(runner)
            for communicator in self._communicators():
                communicator.close()

    def _communicators(self) -> list[Communicator]:
        return [self._shards, *([self._average.communicator] if self._average is not None else [])]

    def _install(self) -> None:
        for group in self._groups:
            if self._average is not None:
                group.module.set_all_reduce_hook(partial(self.average, group))
            if self._scatter is not None:
                group.module.set_custom_reduce_scatter(_ReduceScatter(self, group))


class _ReduceScatter:
    """What FSDP calls instead of the backend's reduce-scatter: torch's `ReduceScatter` interface."""

    def __init__(self, state: GQSGDFSDPState, group: ShardedGroup) -> None:
        self._state, self._group = state, group

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a flat tensor."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """See `GQSGDFSDPState.scatter`. FSDP never asks for ``async_op``."""
        assert not async_op
        self._state.scatter(self._group, output_tensor, input_tensor, op)


def register_gqsgd_fsdp(
    model: nn.Module,
    *,
    replicate: dist.ProcessGroup | DeviceMesh | None = None,
    reduce_scatter: bool = False,
    preset: str | None = None,
    timeout: timedelta | None = None,
    **fields: Any,
) -> GQSGDFSDPState:
    """Compress the gradient communication of a model on which `fully_shard` has been called.

    A collective: every rank calls it, after the last `fully_shard` and before the first backward pass. Returns the
    state (counters, checkpoints, `close`).

    Hybrid sharding: on a mesh of two dimensions, shard over the inner one alone, and let the mean over the outer one be
    quantised; gradients are the mean over all ranks::

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        register_gqsgd_fsdp(model, replicate=mesh["replicate"], bits=4)

    Nothing is broadcast: replicas have to start with the same parameters, and this is checked in the first backward
    pass. Modules of which only some parameters get a gradient are reduced uncompressed.

    Args:
        model: a model with sharded modules, all over one process group.
        replicate: the ranks that hold the same shards as this one: a process group, or a mesh of one dimension. None:
            nothing is done over replicas.
        reduce_scatter: quantise the reduce-scatter over the ranks that parameters are divided among, too, or alone.
            Codes are added once, in full precision, so that no reducer other than "auto" or "two_shot" makes sense.
        preset: name of a preset; see `presets.PRESETS`.
        timeout: of collectives; None takes those of the model's process groups.
        **fields: fields of `GQSGDConfig`. Names, ``exclude`` and ``min_numel`` are about whole parameters,
            ``warmup_steps`` and ``sample_every`` about each module's reductions. There is no memory.

    Raises:
        ConfigError: a configuration, model or version of torch that cannot work, or ranks that do not agree.
    """
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ConfigError(
                f"replicate is a mesh of {replicate.ndim} dimensions; give the one of replicas: mesh['replicate']"
            )
        replicate = replicate.get_group()
    state = GQSGDFSDPState(model, make_config(preset, **fields), replicate, reduce_scatter, timeout)
    weakref.finalize(model, state.close)  # also at exit: Gloo groups that are still open then can abort the process
    return state


def _for_scatter(config: GQSGDConfig, replica: int) -> GQSGDConfig:
    """The configuration of a replica's reduce-scatters. With a seed of its own: their dither has to be independent of
    that of other replicas, and of the mean over replicas, which rounds their results."""
    text = f"{config.seed} reduce-scatter {replica}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"gqsgd-v1").digest(), "little") >> 1
    return replace(config, reducer="two_shot", memory_down="none", seed=seed)


def _divisor(group: ShardedGroup) -> float | None:
    """What the user wants sums to be divided by, instead of the number of ranks; torch 2.7 has no such thing."""
    return getattr(group.inner, "gradient_divide_factor", None)


def _check_request(config: GQSGDConfig, replicate: dist.ProcessGroup | None, reduce_scatter: bool) -> None:
    if replicate is None and not reduce_scatter:
        raise ConfigError(
            "nothing would be compressed: give replicate= (the group of ranks that hold the same shards), "
            "reduce_scatter=True, or both"
        )
    if reduce_scatter:
        if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigError(
                f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter, which reduce_scatter=True "
                "needs; the first that has it is torch 2.9"
            )
        if config.reducer not in ("auto", "two_shot"):
            raise ConfigError(
                f"reduce_scatter=True does not go with reducer={config.reducer!r}: take 'auto' or 'two_shot', or drop "
                "reduce_scatter to leave reduce-scatters to torch"
            )
    if config.up is not None or config.down is not None:
        raise ConfigError(
            "what sharded gradients lose is not remembered: give memory='none' and memory_down='none' (with a biased "
            "codec that is a bias), or train with DistributedDataParallel (register_gqsgd)"
        )


def _check_groups(groups: list[ShardedGroup], replicate: dist.ProcessGroup | None) -> None:
    for group in groups:
        if replicate is not None and group.replicas is not None:
            raise ConfigError(
                f"module {group.name!r} is sharded over a mesh of two dimensions, so that torch averages over replicas "
                "itself, uncompressed: apply fully_shard to mesh['shard'] only, and give replicate=mesh['replicate']"
            )
        if group.has_hook:
            raise ConfigError(
                f"module {group.name!r} already has an all-reduce hook or a custom reduce-scatter, and FSDP takes one "
                "of each: remove the other registration"
            )
