"""`LocalSteps`: wraps an optimizer so that each rank trains on its own, and all ranks average their changes now and
then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.averages import LocalAverages
from lightning_gqsgd.local_steps.checkpoint import load_state, state_of
from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.local_steps.distributed_checkpoint import STATE_KEY, is_called_by_it, packed, unpacked
from lightning_gqsgd.local_steps.divided_state import names_of
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.options import Every, LocalArguments
from lightning_gqsgd.local_steps.outer import OuterOptimizer
from lightning_gqsgd.local_steps.starting import open_meeting
from lightning_gqsgd.session.parameters import parameters_of
from lightning_gqsgd.wire.communicator import parent_group
from lightning_gqsgd.wire.engine import untraced
from lightning_gqsgd.wire.telemetry import Telemetry

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LocalSteps(Optimizer):
    """Trains a model separately on each rank, and averages the quantised changes every ``every`` steps.

    Use it in place of the optimizer, with the module itself (not wrapped in DistributedDataParallel)::

        optimizer = LocalSteps(model, torch.optim.AdamW(model.parameters()), every=32)
        for batch in batches:               # each rank has its own, and all ranks have equally many
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()                  # the last average: all ranks have the same bits
        optimizer.close()

    Creating it is a collective on the process group. All ranks get the first rank's parameters and buffers, and must
    have equal values for all arguments below. Load the weights of the model before: the first step raises an error if
    weights have changed since. The formulas are in `averages`.

    If a rank's change is NaN or infinite, all ranks skip that average and go back to the anchor; a warning says so, and
    ``averages.skipped`` counts it. Each rank clips and accumulates its own gradients. If a GradScaler skips a step on a
    rank, the step still counts. Floating-point buffers are averaged uncompressed with the last fragment, and other
    buffers are taken from the first rank.

    Args:
        model: the module that is trained. Give several modules as `torch.nn.ModuleList`.
        optimizer: the inner optimizer of all or some of the model's parameters. Only its parameters are averaged.
        every: number of optimizer steps between two averages, 1 or more; or a function of the number of rounds so far;
            or a time, e.g. ``"20s"``, in which each rank makes as many steps as it can (see `merges.averages`). None
            takes the preset's number, which is 32 unless the preset says otherwise.
        outer: the outer optimizer, which moves the anchor by the mean change: ``"nesterov"`` (DiLoCo, arXiv 2311.08105;
            it begins after 256 steps, see ``outer_after`` of `options.LocalOptions`), ``"sgd"`` (FedPAQ, arXiv
            1909.13014), a torch.optim class, or a function that takes a list of tensors and returns an optimizer. None
            takes the preset's.
        preset: ``"gqsgd_diloco"``, ``"gqsgd_fedpaq"``, the name of a preset for gradients, or a configuration. None
            takes ``"gqsgd_diloco"``, which has 4 bits.
        fragments: number of parts of the parameters that are averaged at different steps of a round.
        delay: number of steps between the start of an average and its use, so that no step waits for the network; less
            than ``every``. If ``every`` is a time, and with ``elastic``, 1 or more lets training continue during each
            merge.
        elastic: whether ranks may leave and join while training runs; see docs/elastic.md.
        group: process group; None is the default group. If `fully_shard` has divided the model inside of each replica,
            these are the ranks with the same shard, ``mesh["replicate"].get_group()``. With ``elastic``, leave it out:
            ranks meet at a lighthouse.
        timeout: timeout of collectives. None uses the timeout of the group, or 60 s with ``elastic``.
        **fields: further fields of `options.LocalOptions` and fields of `GQSGDConfig`, e.g. ``bits=2``.

    Attributes:
        inner: the inner optimizer.
        averages: counters, anchors and the outer optimizer; see `averages.LocalAverages`, or
            `merges.averages.MergedAverages` if ``every`` is a time or with ``elastic``.

    Raises:
        ConfigError: on every rank, if a value, the model or the optimizer cannot work, or if ranks do not agree.
        CollectiveError: if not all ranks call this within the timeout.
    """

    # GradScaler then calls `step` in every step, so that all ranks count the same steps, and tells it what to skip.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        every: Every | None = None,
        outer: OuterOptimizer | None = None,
        preset: str | GQSGDConfig | None = None,
        fragments: int = 1,
        delay: int = 0,
        elastic: bool | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        **fields: Unpack[LocalArguments],
    ) -> None:
        # Optimizer.__init__ is not called, because the inner optimizer has everything that it would create.
        given = {"every": every, "outer": outer, "fragments": fragments, "delay": delay, "elastic": elastic}
        self.averages: LocalAverages | MergedAverages
        # Averages end with the model, and nobody else may keep it: LocalSteps(nn.ModuleList([encoder, decoder]), ...).
        self._model = model
        if elastic and group is not None:
            raise ConfigError("elastic=True has no process group: ranks meet at a lighthouse; leave group out")
        parent = None if elastic else parent_group(group)
        with nullcontext() if parent is None else open_meeting(model, parent, timeout) as meeting:
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LocalSteps):
                raise ConfigError(
                    f"optimizer is a {type(optimizer).__name__}, not a torch optimizer; give the one of the model, "
                    "e.g. LocalSteps(model, torch.optim.AdamW(model.parameters()))"
                )
            options, config = make_local(preset, given, fields)
            self._inner = optimizer
            kind = MergedAverages if options.is_merged else LocalAverages
            self.averages = kind(model, [optimizer], options, config, group=parent, timeout=timeout, meeting=meeting)

    @property
    def inner(self) -> Optimizer:
        """The inner optimizer."""
        return self._inner

    @inner.setter
    def inner(self, optimizer: Optimizer) -> None:
        raise AttributeError(
            "LocalSteps has an inner optimizer that cannot be replaced, because averages know its parameters; call "
            "finish() and close(), and make a new LocalSteps around the other optimizer"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the inner optimizer."""
        return self.inner.defaults

    @property
    def telemetry(self) -> Telemetry:
        """Counters of this process; see `LocalAverages.telemetry`."""
        return self.averages.telemetry

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the inner optimizer. Start the averages that are due, and use those that are ready.

        Args:
            closure: see `torch.optim.Optimizer.step`.

        Returns:
            The return value of the inner optimizer's step.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `LocalAverages.check_start` and `LocalAverages.advance`.
            SystemExit: with ``elastic``, after SIGTERM. The change has been merged, if a merge succeeded in time.
        """
        if is_called_by_it():  # a step of zeros that creates the inner optimizer's state, perhaps on one rank only
            return self._step_inner(closure)
        try:
            self.averages.check_start()
            result = self._step_inner(closure)
            self.averages.advance()
        except BaseException:
            # GradScaler deletes them after a step that succeeds, and would multiply the next step's scale by this one.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as `torch.optim.Optimizer.zero_grad` does."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConfigError: the parameters that are averaged cannot change."""
        raise ConfigError(
            "LocalSteps averages the parameters that it was made with; call finish() and close(), add the group to the "
            "inner optimizer, and make a new LocalSteps"
        )

    def finish(self) -> None:
        """Average the changes since the last average; see `LocalAverages.finish` and `MergedAverages.finish`."""
        self.averages.finish()

    @property
    def samples(self) -> int:
        """Number of samples that have entered the model, of all ranks together; the same on all ranks after a merge.

        This is only for ``elastic``, and for an ``every`` that is a time: ranks then make different numbers of steps,
        and this number says how far training has come. Without `add_samples`, each step counts as one sample.
        """
        return self._merged("samples").samples

    def add_samples(self, count: int) -> None:
        """Count the samples, or tokens, that the next step uses; see `MergedAverages.add_samples`."""
        self._merged("add_samples").add_samples(count)

    def leave(self) -> None:
        """Merge the changes since the last merge, and close, while the other ranks continue."""
        self._merged("leave").leave()

    def _merged(self, name: str) -> MergedAverages:
        if isinstance(self.averages, MergedAverages):
            return self.averages
        raise ConfigError(
            f"LocalSteps.{name} is for rounds by the clock (every='20s') and for elastic=True; with "
            f"every={self.averages.options.every!r}, all ranks make equally many steps"
        )

    def close(self) -> None:
        """Release threads and process groups. After that, the optimizer cannot make a step."""
        self.averages.close()

    def report(self) -> str:
        """Returns one line that says how often averages are made, and how changes are compressed."""
        return self.averages.report()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state: the inner optimizer's state and, under ``"local_steps"``, the state of the
        averages.

        This is no collective, but it waits for averages under way. If a rank has died, it still returns the latest
        anchor. To resume with the same bits, each rank has to save its own model and its own state. A rank that loads
        the state of another rank starts from the anchor.

        ``get_state_dict`` and ``set_state_dict`` of torch.distributed.checkpoint keep this state, too; see
        `distributed_checkpoint`. If the model is divided among the ranks of a replica, ``get_state_dict`` is a
        collective on these ranks.
        """
        inner = self.inner.state_dict()
        packs = is_called_by_it()
        if isinstance(self.averages, MergedAverages):
            own = self.averages.state_dict()
        else:
            own = state_of(self.averages, in_parts=packs and self.averages.sharding.is_divided)
        return packed(inner, own, self._names()) if packs else {**inner, STATE_KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`. Every rank calls this after it has loaded the weights of its model. This is no
        collective.

        Raises:
            ConfigError: if the state was written without local steps; or see `checkpoint.load_state`.
        """
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"the state is {state_dict!r:.50}, not a mapping; load what state_dict() has given")
        state_dict = unpacked(state_dict, self._names())
        if STATE_KEY not in state_dict:
            raise ConfigError(
                "the state was written without local steps, and has no anchor; load it into the inner optimizer, and "
                "the weights into the model, before LocalSteps is made"
            )
        inner = {name: value for name, value in state_dict.items() if name != STATE_KEY}
        if isinstance(self.averages, MergedAverages):
            self.averages.load_state_dict(state_dict[STATE_KEY], lambda: self.inner.load_state_dict(inner))
        else:
            load_state(self.averages, state_dict[STATE_KEY], lambda: self.inner.load_state_dict(inner))

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the inner optimizer: all other attributes, such as hooks, are delegated to it."""
        if name in ("_inner", "inner", "averages"):  # not set yet, because the constructor has failed
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"LocalSteps({self.inner!r}, {self.averages.options!r})"

    def __deepcopy__(self, memo: Any) -> DetachedLocalSteps:
        return DetachedLocalSteps()

    def __reduce__(self) -> Any:
        return DetachedLocalSteps, ()

    def _names(self) -> list[str | None]:
        """Returns the names of the inner optimizer's parameters; see `names_of`."""
        return [] if isinstance(self.averages, MergedAverages) else names_of(self.averages, self.inner)

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """Make a step of the inner optimizer, as a GradScaler has requested."""
        found_inf = self.__dict__.get("found_inf")
        grad_scale = self.__dict__.get("grad_scale")
        if found_inf is None:
            return self.inner.step(closure) if closure is not None else self.inner.step()
        if getattr(self.inner, "_step_supports_amp_scaling", False):
            self.inner.grad_scale = grad_scale  # type: ignore[attr-defined]
            self.inner.found_inf = found_inf  # type: ignore[attr-defined]
            try:
                return self.inner.step()
            finally:
                del self.inner.grad_scale, self.inner.found_inf  # type: ignore[attr-defined]
        if bool(found_inf):
            return None
        if grad_scale is not None:
            self._unscale(grad_scale)
        return self.inner.step()

    @torch.no_grad()
    def _unscale(self, scale: torch.Tensor) -> None:
        inverse = scale.double().reciprocal().float()
        for parameter in parameters_of([self.inner]):
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))


class DetachedLocalSteps:
    """A copy of `LocalSteps`. It has no model and no process group, and cannot make a step."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"gqsgd: this is a copy of a LocalSteps (by copy or pickle), which has no {name!r}: a copy knows neither "
            "the copied model nor the other ranks; make a new LocalSteps around the copied model's optimizer"
        )
