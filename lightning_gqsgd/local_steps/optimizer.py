"""`LocalSteps`: an optimizer around an optimizer, which averages seldom what ranks learn by themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.local_steps.averages import LocalAverages, open_meeting
from lightning_gqsgd.local_steps.checkpoint import load_state, state_of
from lightning_gqsgd.local_steps.choosing import make_local, split_fields
from lightning_gqsgd.local_steps.distributed_checkpoint import STATE_KEY, is_called_by_it, packed, unpacked
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.options import Every, LocalOptions
from lightning_gqsgd.local_steps.outer import OuterOptimizer
from lightning_gqsgd.wire.communicator import parent_group
from lightning_gqsgd.wire.engine import untraced
from lightning_gqsgd.wire.telemetry import Telemetry

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from lightning_gqsgd.local_steps.options import LocalArguments


class LocalSteps(Optimizer):
    """Trains a model on each rank by itself, and averages the changes every so many steps, quantised.

    Use it in the place of the optimizer, with the module itself (not wrapped in DistributedDataParallel)::

        optimizer = LocalSteps(model, torch.optim.AdamW(model.parameters()), every=32)
        for batch in batches:               # each rank has its own, and all ranks have equally many
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()                  # the last average: all ranks have the same bits
        optimizer.close()

    Creating one is a collective on the process group: all ranks take the first rank's parameters and buffers, and must
    agree on everything below. Load a model's weights before: the first step refuses weights that were changed since.
    The formulas are in `averages`.

    A rank whose change is NaN or infinite makes all ranks leave that average out and go back to the anchor; a warning
    says so, and ``averages.skipped`` counts it. Gradients are clipped and accumulated on each rank by itself. With a
    GradScaler, a rank that skips a step counts it all the same. Floating-point buffers are averaged uncompressed with
    the last fragment, and other buffers are taken from the first rank.

    Args:
        model: the module that is trained.
        optimizer: the inner optimizer of the model's parameters, or of some of them, which are then averaged.
        every: optimizer steps between two averages, 1 or more; or a function of the number of rounds so far; or a time,
            e.g. ``"20s"``, in which each rank makes as many steps as it can (see `merges.averages`). None: the preset's
            number, which is 32 unless the preset says otherwise.
        outer: what moves the anchor by the mean change: ``"nesterov"`` (DiLoCo, arXiv 2311.08105; it begins after 256
            steps, see ``outer_after`` of `options.LocalOptions`), ``"sgd"`` (FedPAQ, arXiv 1909.13014), a torch.optim
            class, or a function that makes an optimizer of tensors. None: the preset's.
        preset: ``"gqsgd_diloco"``, ``"gqsgd_fedpaq"``, or the name of a compression's preset, or a configuration. None:
            ``"gqsgd_diloco"``, which has 4 bits.
        fragments: number of parts of the parameters that are averaged at different steps of a round.
        delay: steps between the start of an average and its use, so that no step waits for the network; less than
            ``every``. By the clock, and with ``elastic``: 1 or more lets training go on beside each merge.
        elastic: whether ranks may leave and join while training runs; see docs/elastic.md.
        group: process group; None is the default group. Not with ``elastic``, whose ranks meet at a lighthouse.
        timeout: of collectives; None takes that of the group.
        **fields: further fields of `options.LocalOptions` and fields of `GQSGDConfig`, e.g. ``bits=2``.

    Attributes:
        inner: the inner optimizer.
        averages: counters, anchors and the outer optimizer; see `averages.LocalAverages`, and for rounds by the clock
            and ``elastic``, `merges.averages.MergedAverages`.

    Raises:
        ConfigError: a value, a model or an optimizer that cannot work, or ranks that do not agree; on every rank.
        CollectiveError: not all ranks call this within the timeout.
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
        # Optimizer.__init__ is not called: everything that it would make is the inner optimizer's.
        own, rest = split_fields(fields)
        own.update(every=every, outer=outer, fragments=fragments, delay=delay, elastic=elastic)
        self.averages: LocalAverages | MergedAverages
        if elastic:
            if group is not None:
                raise ConfigError("elastic=True has no process group: ranks meet at a lighthouse; leave group out")
            options, config = self._made(optimizer, preset, own, rest)
            self.averages = MergedAverages(model, [optimizer], options, config, timeout=timeout)
            return
        parent = parent_group(group)
        with open_meeting(model, parent, timeout) as meeting:
            options, config = self._made(optimizer, preset, own, rest)
            kind = MergedAverages if options.is_merged else LocalAverages
            self.averages = kind(model, [optimizer], options, config, group=parent, timeout=timeout, meeting=meeting)

    def _made(
        self, optimizer: Optimizer, preset: str | GQSGDConfig | None, own: dict[str, Any], rest: dict[str, Any]
    ) -> tuple[LocalOptions, GQSGDConfig]:
        """Returns options and compression, and takes the inner optimizer."""
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LocalSteps):
            raise ConfigError(f"LocalSteps goes around a torch optimizer, not a {type(optimizer).__name__}")
        options, config = make_local(preset, own, rest)
        self._inner = optimizer
        return options, config

    @property
    def inner(self) -> Optimizer:
        """See the class."""
        return self._inner

    @inner.setter
    def inner(self, optimizer: Optimizer) -> None:
        raise AttributeError(
            "LocalSteps has an inner optimizer that cannot be replaced, because averages know its parameters; call "
            "finish() and close(), and make a new LocalSteps around the other optimizer"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the inner optimizer."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the inner optimizer."""
        return self.inner.defaults

    @property
    def telemetry(self) -> Telemetry:
        """Counters of this process; see `LocalAverages.telemetry`."""
        return self.averages.telemetry

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the inner optimizer; start and use the averages that are due.

        Args:
            closure: see `torch.optim.Optimizer.step`.

        Returns:
            What the inner optimizer returns.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `LocalAverages.check_start` and `LocalAverages.advance`.
        """
        if is_called_by_it():  # a step of zeros that makes the inner optimizer's state, perhaps on one rank only
            return self._step_inner(closure)
        self.averages.check_start()
        result = self._step_inner(closure)
        self.averages.advance()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients as `torch.optim.Optimizer.zero_grad` does."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: what is averaged is fixed.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "LocalSteps averages the parameters that it was made with; call finish() and close(), add the group to the "
            "inner optimizer, and make a new LocalSteps"
        )

    def finish(self) -> None:
        """Average what was learnt since the last average; see `LocalAverages.finish`, and `MergedAverages.finish`."""
        self.averages.finish()

    @property
    def samples(self) -> int:
        """Number of samples that have entered the model, of all ranks together; the same on all ranks after a merge.

        Rounds by the clock and ``elastic`` only: ranks make different numbers of steps, and this says how far training
        has come. Without `add_samples`, each step counts as one.
        """
        return self._merged("samples").samples

    def add_samples(self, count: int) -> None:
        """Count samples, or tokens, that the next step has seen; see `MergedAverages.add_samples`."""
        self._merged("add_samples").add_samples(count)

    def leave(self) -> None:
        """Merge what was learnt since the last merge, and close, without waiting for ranks that go on."""
        self._merged("leave").leave()

    def _merged(self, name: str) -> MergedAverages:
        if isinstance(self.averages, MergedAverages):
            return self.averages
        raise ConfigError(
            f"LocalSteps.{name} is for rounds by the clock (every='20s') and for elastic=True; with "
            f"every={self.averages.options.every!r}, all ranks make equally many steps"
        )

    def close(self) -> None:
        """Stop using threads and process groups. The optimizer makes no step after that."""
        self.averages.close()

    def report(self) -> str:
        """One line that says what is averaged how often, and how it is compressed."""
        return self.averages.report()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: that of the inner optimizer, and under ``"local_steps"`` that of the averages.

        Not a collective; waits for averages under way. To continue with the same bits, each rank saves its own model
        and its own state. A state of another rank is the start from the anchor.

        torch.distributed.checkpoint's ``get_state_dict`` and ``set_state_dict`` keep it, too; see
        `distributed_checkpoint`.
        """
        inner = self.inner.state_dict()
        own = self.averages.state_dict() if isinstance(self.averages, MergedAverages) else state_of(self.averages)
        return packed(inner, own) if is_called_by_it() else {**inner, STATE_KEY: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Not a collective; every rank does this, after its model has loaded its weights.

        Raises:
            ConfigError: the state was written without local steps; or see `checkpoint.load_state`.
        """
        if not isinstance(state_dict, Mapping):
            raise ConfigError(f"the state is {state_dict!r:.50}, not a mapping; load what state_dict() has given")
        state_dict = unpacked(state_dict)
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
        """Everything else that torch keeps in an optimizer, such as its hooks, is the inner optimizer's."""
        if name in ("_inner", "inner", "averages"):  # not made yet, because the constructor has failed
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"LocalSteps({self.inner!r}, {self.averages.options!r})"

    def __deepcopy__(self, memo: Any) -> DetachedLocalSteps:
        return DetachedLocalSteps()

    def __reduce__(self) -> Any:
        return DetachedLocalSteps, ()

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """The inner optimizer's step, with what a GradScaler has asked for."""
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
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(inverse.to(parameter.grad.device))


class DetachedLocalSteps:
    """A copy of `LocalSteps`. It knows neither the copied model nor the other ranks, and makes no step."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"gqsgd: this is a copy of a LocalSteps (by copy or pickle), which has no {name!r}: a copy knows neither "
            "the copied model nor the other ranks; make a new LocalSteps around the copied model's optimizer"
        )
