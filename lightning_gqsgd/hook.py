"""The DDP communication hook and its state.

DDP's contract, as far as it shapes this file: the hook is a plain function whose second parameter is called ``bucket``
and carries no annotation; the result is the bucket's own buffer, in place; buckets are rebuilt after the first step
(the first holds the whole model), so nothing is keyed by bucket index; the buffer is not divided by the number of
ranks beforehand.
"""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.compiling import compile_kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError, describe_difference
from lightning_gqsgd.layout import Segment
from lightning_gqsgd.memory import MemoryStore, kinds
from lightning_gqsgd.plan import Plan, check_gradient
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import Setting, new_store, resolve, setting_for, stages
from lightning_gqsgd.telemetry import Telemetry
from lightning_gqsgd.transport.communicator import Communicator
from lightning_gqsgd.transport.pipeline import Job, Runner, release, runner_for

logger = logging.getLogger(__name__)

STATE_SCHEMA = 1


@dataclass(frozen=True)
class _Parameter:
    number: int
    name: str
    numel: int
    raw: bool


class GQSGDState:
    """State of the hook on one DDP model.

    Creating one is a collective on the model's process group; `register_gqsgd` says what its arguments are.

    Attributes:
        config: the configuration, with its reducer chosen.
        step: number of reduced backward passes; numbers the dither.
        telemetry: counters of this process.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: GQSGDConfig,
        timeout: timedelta | None = None,
        post_local_sgd: PostLocalSGDState | None = None,
    ) -> None:
        _check_model(model)
        if post_local_sgd is not None:
            _check_group(post_local_sgd, model)
        self.requested = config
        self._post_local_sgd = post_local_sgd
        parameters = dict(model.module.named_parameters())
        self._parameters = {
            id(p): _Parameter(*entry)
            for entry, p in zip(number_parameters(parameters, config), parameters.values(), strict=True)
        }
        ranks = dist.get_world_size(model.process_group)
        self.config = resolve(config, ranks)
        tensor = next(p for p in parameters.values() if p.requires_grad)
        compile_kernels(self.config, tensor.dtype, tensor.device, ranks)
        self._group, self._device = model.process_group, tensor.device
        self._communicator = Communicator(
            tensor.device, model.process_group, timeout, stages=stages(self.config, ranks)
        )
        self._communicator.agree({**config.to_dict(), "parameters": _digest(self._parameters.values())})
        self._runner: Runner | None = runner_for(self._communicator)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        sizes = {p.number: p.numel for p in self._parameters.values() if not p.raw}
        self._store = new_store(self.config, ranks, sizes, tensor.dtype, tensor.device)
        self._remembered: set[int] = set()  # numbers of the parameters that have been compressed, or loaded
        self.step = 0
        self.telemetry = Telemetry()
        self._install(model)

    # --- the hook ----------------------------------------------------------------------------------------------------

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to replace a bucket's buffer by its mean over ranks: their sum, divided by the size of DDP's group.

        Under torch's `Join`, a rank that has run out of inputs takes part with zeros, and still counts in the divisor.
        After ``start_localSGD_iter`` steps of post-local SGD, the buffer is left to torch's hook.

        Raises:
            ConfigError: DDP does not reduce a parameter that requires a gradient, or `Join` asks for another divisor.
        """
        x, last, step = bucket.buffer(), bucket.is_last(), self.step
        self._check_divisor()
        if last:
            self._check_unreduced()
        local = self._post_local_sgd
        if local is not None:
            if local.iter >= local.start_localSGD_iter:
                return post_localSGD_hook(local, bucket)
            local.maybe_increase_iter(bucket)
        self.step += last
        counters = self.telemetry.bucket(bucket.index())
        communicator = self._communicator
        if communicator.size == 1 or not x.numel():
            starts = []
        else:
            plan = self._plan(x, bucket.parameters(), warming_up=step < self.config.warmup_steps)
            starts = plan.starts(x, communicator.rank, step, self._store, counters, self.telemetry)
        job = Job(x, starts, f"bucket {bucket.index()} of step {step}", counters, self.telemetry, last)
        if starts:
            if self._runner is None:
                raise RuntimeError("gqsgd: the hook was closed; register it on a new DistributedDataParallel model")
            self._runner.submit(communicator, job)
        else:
            job.finish()
        return job.future

    def _plan(self, x: Tensor, parameters: list[Tensor], warming_up: bool) -> Plan:
        key = (warming_up, x.dtype, *map(id, parameters))
        if key not in self._plans:
            check_gradient(x, "a gradient")
            known = [self._parameters[id(p)] for p in parameters]
            segments = [Segment(p.number, p.numel, p.raw or warming_up) for p in known]
            communicator = self._communicator
            setting = Setting(self.config, communicator.size, x.dtype, communicator.piece_numel)
            self._plans[key] = Plan(segments, setting_for(setting, compressed=not warming_up))
            assert self._plans[key].numel == x.numel()
        return self._plans[key]

    # --- which parameters are trained --------------------------------------------------------------------------------

    def changes(self) -> tuple[list[str], list[str]]:
        """Names of parameters that require a gradient now although DDP does not reduce them, and of the reverse.

        DDP reduces those that required one when it was built. Compares two flags for each parameter: cheap.
        """
        return self._unfrozen(), [name for name, p in self._reduced.items() if not p.requires_grad]

    def rewrap(self, build: Callable[[nn.Module], DistributedDataParallel]) -> DistributedDataParallel:
        """Go on with a new DDP model around the same module, because other parameters require a gradient now.

        A collective on the process group. Step, seed, counters and what is remembered of each parameter stay. The old
        DDP model cannot be trained any more: drop it.

        Args:
            build: makes the DDP model, as the old one was made, e.g. ``DistributedDataParallel``.

        Raises:
            ConfigError: ranks do not agree on which parameters require a gradient, the module has other parameters than
                before, or ``build`` gives a model of another module or process group.
            RuntimeError: the hook was closed, or other ranks do not call this.
        """
        old = self._model()
        if self._runner is None or old is None:
            raise RuntimeError("gqsgd: the hook was closed; register it on a new DistributedDataParallel model")
        module = old.module
        del old
        parameters = dict(module.named_parameters())
        infos = [_Parameter(*entry) for entry in number_parameters(parameters, self.requested)]
        if infos != list(self._parameters.values()):
            raise ConfigError("the module has other parameters than before; call register_gqsgd on a new model instead")
        self._agree_on_trained([info for info, p in zip(infos, parameters.values(), strict=True) if p.requires_grad])
        self._parameters = {id(p): info for info, p in zip(infos, parameters.values(), strict=True)}
        self._plans.clear()
        self._ends_with.detach()
        try:
            model = build(module)
            _check_model(model)
            if model.module is not module or model.process_group is not self._group:
                raise ConfigError("`build` wrapped another module, or for another process group; give both as before")
        except BaseException:
            self.close()
            raise
        self._install(model)
        return model

    def _agree_on_trained(self, trained: list[_Parameter]) -> None:
        try:
            self._communicator.agree({"parameters that require a gradient": _digest(trained)})
        except RuntimeError as error:
            raise RuntimeError(
                f"gqsgd: rank {self._communicator.rank} wraps its model anew, and not all other ranks do; freeze and "
                f"unfreeze the same parameters at the same batch on every rank ({error})"
            ) from error

    def _install(self, model: DistributedDataParallel) -> None:
        """Register the hook on a model, and end with that model."""
        model.register_comm_hook(self, gqsgd_hook)
        # Also at exit: Gloo groups that are still open then can abort the process.
        self._ends_with = weakref.finalize(model, self.close)
        self._model = weakref.ref(model)
        parameters = {n: p for n, p in model.module.named_parameters() if n not in model.parameters_to_ignore}
        self._reduced = {name: p for name, p in parameters.items() if p.requires_grad}
        self._unreduced = {name: p for name, p in parameters.items() if not p.requires_grad}
        self._trained = [self._parameters[id(p)] for p in self._reduced.values()]
        self._remembered |= {info.number for info in self._trained if not info.raw}

    def _unfrozen(self) -> list[str]:
        return [name for name, p in self._unreduced.items() if p.requires_grad]

    def _check_unreduced(self) -> None:
        unfrozen = self._unfrozen()
        if unfrozen:
            raise ConfigError(
                f"parameter {_listed(unfrozen)} requires a gradient, but did not when the model was wrapped in "
                "DistributedDataParallel, which therefore does not reduce it: each rank would train its own. Unfreeze "
                "it before the forward pass and wrap anew: `model = state.rewrap(DistributedDataParallel)`. (The "
                "Lightning strategy does this at the start of a batch, for what was unfrozen by then.)"
            )

    def _check_divisor(self) -> None:
        if getattr(self._model(), "_divide_by_initial_world_size", True) is False:
            raise ConfigError(
                "Join with divide_by_initial_world_size=False divides by the number of ranks that still have inputs, "
                "which a communication hook is not told; gqsgd divides by the number of all ranks: leave it at True"
            )

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs for the same bits; plain values and tensors.

        Equal on all ranks and no collective, unless the configuration has a memory. Then every rank has to call it, and
        only rank 0 gets all ranks' memory, tensors [ranks, numel] by kind and parameter number: save what rank 0 has.
        """
        state = {
            "schema": STATE_SCHEMA,
            "seed": self.config.seed,
            "step": self.step,
            "config": self.requested.to_dict(),
        }
        if self._post_local_sgd is not None:
            state["post_local_iter"] = self._post_local_sgd.iter
        return state if not self.config.remembers else {**state, "memory": self._gathered_memory(self._store)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the dither of a checkpoint, and what was remembered. Not a collective; every rank gets rank 0's.

        A checkpoint of another number of ranks, or without memory, starts with empty memory, and a warning.

        Raises:
            ConfigError: the state is of another schema, or of a model with other parameters.
        """
        if state.get("schema") != STATE_SCHEMA:
            raise ConfigError(
                f"gqsgd state of schema {state.get('schema')!r}; this version reads {STATE_SCHEMA}: "
                "resume with the version that wrote it, or drop the entry to start the dither anew"
            )
        warn_of_difference(state["config"], self.requested)
        if self.config.remembers:
            self._take_memory(self._store, state)
        self.config = replace(self.config, seed=state["seed"])
        self.requested = replace(self.requested, seed=state["seed"])
        self.step = state["step"]
        if self._post_local_sgd is not None:
            self._post_local_sgd.iter = state.get("post_local_iter", self._post_local_sgd.iter)
        self._plans.clear()

    def _gathered_memory(self, store: MemoryStore) -> dict[str, dict[int, Tensor]] | None:
        """All ranks' memory, on the CPU; None on all ranks but the first. A parameter at a time: peers keep nothing."""
        closed = self._runner is None  # Lightning closes the hook before users save a model that has been fitted
        communicator = Communicator(self._device, self._group) if closed else self._communicator
        found: dict[str, dict[int, Tensor]] = {}
        for kind in kinds(self.config):
            for number in sorted(self._remembered):
                rows = communicator.gather(store.row(kind, number))
                if communicator.rank == 0:
                    found.setdefault(kind.value, {})[number] = rows.cpu()
        if closed:
            communicator.close()
        return found if communicator.rank == 0 else None

    def _take_memory(self, store: MemoryStore, state: dict[str, Any]) -> None:
        saved, ranks = state.get("memory"), self._communicator.size
        if "memory" in state and saved is None:
            raise ConfigError("this gqsgd state has no memory because it is not rank 0's; load what rank 0 has saved")
        sizes = {rows.shape for tensors in (saved or {}).values() for rows in tensors.values()}
        counts = {shape[0] for shape in sizes}
        if not saved or set(saved) != set(kinds(self.config)) or counts != {ranks}:
            logger.warning(
                "gqsgd: the memory starts empty: the checkpoint has that of %s ranks (%s), this run has %s ranks (%s)",
                *(", ".join(map(str, counts)) or "no", ", ".join(saved or {}) or "nothing"),
                *(ranks, ", ".join(kinds(self.config))),
            )
            return
        store.take(saved, self._communicator.rank)
        known = {number for tensors in saved.values() for number in tensors}
        names = [info.name for info in self._trained if not info.raw and info.number not in known]
        if names:
            logger.warning("gqsgd: the memory of parameter %s starts empty: the checkpoint has none", _listed(names))
        self._remembered |= known

    # --- what the user sees ------------------------------------------------------------------------------------------

    def report(self) -> str:
        """One line: what is compressed, to how many bits, by which reducer; what is not, and why."""
        config, size = self.config, self._communicator.size
        if size == 1:
            return "gqsgd: one process, nothing to reduce"
        if config.reducer == "native":
            one_node = self.requested.reducer == "hierarchical"
            cause = f"all {size} ranks are on one node" if one_node else "reducer='native'"
            return f"gqsgd: native allreduce over {size} ranks, nothing compressed ({cause})"
        every = self._trained
        raw = [p for p in every if p.raw]
        coded = sum(p.numel for p in every) - sum(p.numel for p in raw)
        text = (
            f"gqsgd: {coded:,} gradient values in {len(every) - len(raw)} tensors at {config.describe()} "
            f"by {config.reducer} over {size} ranks"
        )
        if config.node_size:
            text += f" ({size // config.node_size} nodes of {config.node_size})"
        if raw:
            small = [p for p in raw if p.numel < config.min_numel]
            why = [f"{len(small)} smaller than {config.min_numel}"] if small else []
            why += [f"{len(raw) - len(small)} excluded by name"] if len(raw) > len(small) else []
            text += f"; uncompressed: {sum(p.numel for p in raw):,} values in {len(raw)} tensors ({', '.join(why)})"
        if config.warmup_steps > self.step:
            text += f"; uncompressed until step {config.warmup_steps}"
        return text

    def close(self) -> None:
        """Stop using threads and process groups. The model cannot be trained by this hook any more."""
        self._reduced, self._unreduced = {}, {}  # who keeps the counters does not keep the model
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close(self._communicator)
            release(runner)
            self._communicator.close()


def gqsgd_hook(state: GQSGDState, bucket):  # type: ignore[no-untyped-def]  # DDP rejects annotations that are strings
    """DDP communication hook; see `GQSGDState.reduce`."""
    return state.reduce(bucket)


def register_gqsgd(
    model: DistributedDataParallel,
    preset: str | None = None,
    *,
    timeout: timedelta | None = None,
    post_local_sgd: PostLocalSGDState | None = None,
    **fields: Any,
) -> GQSGDState:
    """Compress the gradient allreduce of a DDP model.

    A collective on the model's process group: every rank calls it. Returns the state (counters, checkpoints, `close`).

    Args:
        model: the DDP model, before its first backward pass.
        preset: name of a preset; see `presets.PRESETS`.
        timeout: of collectives; None takes that of the model's process group.
        post_local_sgd: torch's state of post-local SGD: from its ``start_localSGD_iter`` on, gradients are averaged as
            `post_localSGD_hook` does, uncompressed in its subgroup or not at all. Averaging the model is up to you.
        **fields: fields of `GQSGDConfig`.

    Raises:
        ConfigError: a configuration or model that cannot work, or ranks that do not agree.
    """
    return GQSGDState(model, make_config(preset, **fields), timeout, post_local_sgd)


def warn_of_difference(written: dict[str, Any], now: GQSGDConfig) -> None:
    """Log in which fields the configuration of a checkpoint differs, if in any."""
    difference = describe_difference(GQSGDConfig(**written).to_dict(), now.to_dict())
    if difference:
        logger.warning("gqsgd: the checkpoint was written under another configuration (%s)", difference)


def _check_model(model: DistributedDataParallel) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(f"{type(model).__name__} is not a DistributedDataParallel model; wrap it first")
    installed = model._get_ddp_logging_data().get("comm_hook")
    if installed:
        raise ConfigError(
            f"the model already has the communication hook {installed!r}, and DDP takes one only; "
            "remove the other registration, or wrap the module in a new DistributedDataParallel"
        )
    if getattr(model, "_use_python_reducer", False):
        raise ConfigError(
            'torch._dynamo.config.optimize_ddp="python_reducer" hands hooks single gradients, not buckets; '
            'set it to True or "ddp_optimizer"'
        )
    for name, module in model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"module {name!r} gives sparse gradients; quantised allreduce needs dense ones: "
                "build it with sparse=False"
            )
    devices = {p.device for p in model.module.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ConfigError(f"the model's parameters are on several devices ({', '.join(map(str, devices))}); use one")


def _check_group(post_local_sgd: PostLocalSGDState, model: DistributedDataParallel) -> None:
    group = post_local_sgd.process_group
    if (dist.group.WORLD if group is None else group) is not model.process_group:
        raise ConfigError(
            "PostLocalSGDState averages gradients over another process group than DistributedDataParallel; give both "
            "the same process_group"
        )


def _listed(names: list[str]) -> str:
    """A few names in quotes, and how many there are beside."""
    some = ", ".join(map(repr, names[:3]))
    return some if len(names) <= 3 else f"{some} and {len(names) - 3} more"


def number_parameters(parameters: dict[str, nn.Parameter], config: GQSGDConfig) -> list[tuple[int, str, int, bool]]:
    """Number, name, size of each parameter and whether it travels uncompressed."""
    unmatched = [one for one in config.exclude if not any(fnmatch.fnmatchcase(name, one) for name in parameters)]
    if unmatched:
        raise ConfigError(
            f"exclude patterns {unmatched} match no parameter; names look like {', '.join(list(parameters)[:3])}"
        )
    return [
        (
            number,
            name,
            p.numel(),
            p.numel() < config.min_numel or any(fnmatch.fnmatchcase(name, e) for e in config.exclude),
        )
        for number, (name, p) in enumerate(parameters.items())
    ]


def _digest(parameters: Any) -> str:
    text = "\n".join(f"{p.number} {p.name} {p.numel} {p.raw}" for p in parameters)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
