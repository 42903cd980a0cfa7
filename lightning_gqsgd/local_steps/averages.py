"""Counts optimizer steps, starts the averages of local steps, and moves the anchor by them.

One average of a fragment has these steps. Each rank computes the change of its parameters since the anchor, Δ_i =
anchor − x_i. The engine replaces the changes by their mean over ranks, Δ = mean of Q(Δ_i), with the same bits on every
rank. The outer optimizer makes a step in which Δ is the gradient of the anchor. Then all ranks continue from the anchor
(DiLoCo, arXiv 2311.08105, algorithm 1; with SGD of learning rate 1: FedPAQ, arXiv 1909.13014).

With a delay of τ steps, the average of the changes after step t is used after step t + τ. By then, a rank has
parameters x_i(t + τ), and sets x_i ← α x_i(t + τ) + (1 − α) anchor (arXiv 2501.18512, algorithm 2). The anchor itself
has the same bits on all ranks at all times.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.errors import ConfigError, counted, listed
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.local_steps.averaging_loop import AveragingLoop, Pending
from lightning_gqsgd.local_steps.fragments import kept, refuse_kept
from lightning_gqsgd.local_steps.inner_state import InnerState
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import describe_outer
from lightning_gqsgd.local_steps.preserved import (
    errors_by_parameter,
    gathered_errors,
    is_preserved,
    own_errors,
    preserved,
)
from lightning_gqsgd.local_steps.rules import Exchanges, PendingMean, RuleRequest
from lightning_gqsgd.local_steps.schedule import Rounds
from lightning_gqsgd.local_steps.sharding import own_part, reshard
from lightning_gqsgd.local_steps.starting import ROUNDING, WEIGHTS_CHANGED, IntegerBuffers, OwnBuffers, start_together
from lightning_gqsgd.local_steps.watching import WatchedModel
from lightning_gqsgd.local_steps.weights_in_state import WeightsInState
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.memory import Keeps
from lightning_gqsgd.session.first_rank import take_from_first_rank
from lightning_gqsgd.session.report import report
from lightning_gqsgd.wire.agreement import Card, Stamp, Weights, digest_of
from lightning_gqsgd.wire.communicator import parent_group
from lightning_gqsgd.wire.engine import Request, untraced
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.pipeline import Job
from lightning_gqsgd.wire.telemetry import moment

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Average(Pending):
    """The average of a fragment's changes between processes, which is under way or not used yet.

    Attributes:
        frozen: names of the parameters that did not require a gradient when it was started.
        changes: the mean change of each bundle of the fragment, a flat tensor; empty while the average is under way.
        pending_means: for each bundle, the object that computes its mean change; empty once the means are complete.
        integers: the first rank's values of buffers that are not averaged.
        waits: functions that wait for these values and for the inner optimizers' tensors; empty once they have come.
        inner: the inner optimizers' tensors, and their mean as one flat tensor; None if they are not averaged.
        errors: the error memories before the average, by kind and parameter number; empty once the mean is complete.
    """

    frozen: tuple[str, ...]
    changes: list[Tensor] = field(default_factory=list)
    pending_means: list[PendingMean] = field(default_factory=list)
    integers: list[Tensor] = field(default_factory=list)
    waits: list[Callable[[], object]] = field(default_factory=list)
    inner: tuple[list[Tensor], Tensor] | None = None
    errors: dict[tuple[Keeps, int], Tensor] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait for the mean.

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed.
        """
        self.changes = [pending.wait() for pending in self.pending_means]
        for wait in self.waits:
            wait()
        self.pending_means = []
        self.waits = []


class LocalAverages(AveragingLoop[Average]):
    """Averages the changes that the ranks' own optimizer steps make.

    Creating it is a collective on the process group. All ranks then have the first rank's parameters and buffers.

    Args:
        model: the module that each rank trains.
        optimizers: the inner optimizers. A parameter is averaged if one or more of them have it.
        options: when to average, and how to use the mean.
        config: the compression.
        group: process group; None is the default group.
        timeout: timeout of collectives. None uses the timeout of the group.
        meeting: a meeting that the caller has opened; None opens one.

    Attributes:
        requested: the compression that was passed.
        config: the same compression, with the chosen reducer.
        outer: the outer optimizer; its tensors are the anchors.
        device: device of the model.
        rank: this process's rank.
        world_size: number of ranks.
        telemetry: counters of this process. They count one step per average, and exposed seconds are the time that
            steps waited.
        store: this rank's memory of the compressed parameters.
        averagers: this rank's averagers, by bundle, in order.
        compressed_numbers: numbers of the compressed parameters.
        watched: the parts of the model that must not change.
        sharding: how the parameters are divided among the ranks of a replica.
        expected_digest: the digest of this rank's parameters that were saved beside the loaded state; None if the state
            has none.
        expected_sum: the same for a state of the replica: its `sum_of_weights`.

    Raises:
        ConfigError: on every rank, if the model, an optimizer or a value cannot work, or if ranks do not agree.
        CollectiveError: if not all ranks do this within the timeout.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        options: LocalOptions,
        config: GQSGDConfig,
        *,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        self.group = parent_group(group)
        self.requested = config
        started = start_together(model, optimizers, options, config, self.group, timeout, meeting)
        self.config = started.config
        self._note = started.note
        self._digest = started.digest
        self._engine = started.engine
        trained = started.trained
        super().__init__(options, trained.fragments)
        parameters = trained.parameters
        self.device = trained.device
        self._facts = trained.facts
        self.outer = trained.outer
        self.rank = self._engine.rank
        self.world_size = self._engine.world_size
        self.telemetry = self._engine.telemetry
        self.sharding = trained.sharding
        self._sizes = {entry.segment.parameter: entry.segment.numel for entry in parameters if not entry.segment.raw}
        self._dtype = trained.dtypes[0]
        self.compressed_numbers = tuple(self._sizes)
        self._model = weakref.ref(model)
        self._inner = InnerState(optimizers)
        # A single rank differs from no other one.
        self._weights_in_state = WeightsInState(optimizers if self.world_size > 1 else [], options)
        self.watched = WatchedModel(model, optimizers, parameters, self.group)
        self._buffers = OwnBuffers(model)
        self._integers = IntegerBuffers(model)
        self._has_started = False
        self.expected_digest: int | None = None
        self.expected_sum: int | None = None
        self._was_loaded = False
        self._begin_at_anchors()
        # This also runs at exit, because Gloo groups that are still open then can abort the process.
        weakref.finalize(model, self._engine.close)

    @property
    def is_closed(self) -> bool:
        """True if nothing can be averaged any more."""
        return self._engine.is_closed

    @untraced
    def advance(self) -> None:
        """Count an optimizer step. Use the averages whose delay is over, and start those that are due.

        Every rank has to call this after each optimizer step, including steps that a GradScaler has skipped.

        Raises:
            ConfigError: if ranks are not at the same step, or if an optimizer trains a parameter that is not averaged.
            CollectiveError: if a collective failed. The parameters are then unchanged.
            RuntimeError: if this was closed.
        """
        refuse_kept(self.fragments)
        self.check_open()
        if not self.step:
            self._weights_in_state.check()  # after one step, state that holds weights is closest to the parameters
        super().advance()

    @untraced
    @torch.no_grad()
    def settle(self) -> None:
        """Use the averages under way now, although their delay is not over.

        Every rank has to call this after the same step, before it replaces its weights by others, for example by their
        mean over steps. An average that is used later would be mixed with the new weights.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `advance`.
        """
        refuse_kept(self.fragments)
        self.check_open()
        self._use(self.under_way)

    @untraced
    @torch.no_grad()
    def finish(self) -> None:
        """Use the averages under way, and average the changes since. All ranks then have the same bits.

        Every rank has to call this at the end of training. It ends the current round early; if training continues, the
        next round begins. The anchor becomes the mean of the ranks' models. The outer optimizer is not used, because
        its momentum is meant for whole rounds and would move the anchor too far. If there is a preserved model (see
        `preserved`), the anchor becomes that model. A second call in a row changes nothing, unless parameters have
        changed in between, for example by a callback that sets averaged weights.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `advance`.
        """
        refuse_kept(self.fragments)
        self.check_open()
        self._look_at_loaded_weights()
        self._check_changes()
        self._notice_changes()
        super().finish()
        if is_preserved(self.config, self.outer):
            with self._or_broken():
                for anchor, _, value in preserved(self.fragments, self._errors()):
                    anchor.copy_(value)
                self.store.forget(Keeps.DOWN_ERROR)
                self.start_from_anchors()

    def check_start(self) -> None:
        """Check before the very first step that parameters are equal to the anchors on all ranks. A collective; it runs
        once.

        If weights were loaded after this object was created, they would count as a change of the first round and be
        quantised.

        Raises:
            ConfigError: on every rank, if a rank's parameters have changed since this was created.
        """
        self.check_open()
        self._look_at_loaded_weights()
        if not (self._has_started or self.step):
            self._has_started = True
            self._check_weights()

    @torch.no_grad()
    def _check_weights(self) -> None:
        self._reshard()
        self.watched.check()
        self._buffers.take_back()
        numbers = list(range(len(self.fragments)))
        if any(self._leaves_anchor(numbers, buffers=False, tolerance=ROUNDING)):
            raise ConfigError(WEIGHTS_CHANGED)

    @torch.no_grad()
    def start_anew(self) -> None:
        """Start again from the first rank's current parameters and buffers, as if this were created now. A collective.

        Averages under way, memories and the outer optimizer's state are lost, and steps count from 0.
        """
        self.check_open()
        self.wait_for_all()
        self.under_way.clear()
        self._buffers.take_back()
        self._reshard()
        take_from_first_rank(map(own_part, self.watched.tensors().values()), self.group)
        self.watched.forget_others()
        self._was_loaded = False
        self.outer.state.clear()
        self._engine.plans.clear()  # they hold the old memory
        self.step = 0
        self.rounds = Rounds(self.options)
        self._has_started = False
        self._begin_at_anchors()

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Returns a context in which the model has the anchor's values, which are the same on all ranks, e.g. to
        validate.

        After the context, the model has this rank's own values again. Do not make a step inside it.
        """
        self._buffers.take_back()
        with kept(self.fragments):
            self.start_from_anchors()
            try:
                yield
            finally:
                self._buffers.take_back()  # the tensors that get their values back are the model's again
                self._reshard()

    @contextmanager
    def at_preserved(self) -> Iterator[None]:
        """Returns a context in which the model has the values of the preserved model (see `preserved`), e.g. to
        validate.

        This is a collective: every rank has to enter it after the same step. If there is no preserved model, or while
        an average is under way, the values are those of the anchor.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `advance`.
        """
        self.check_open()
        with self.at_anchor():
            if is_preserved(self.config, self.outer) and not self.under_way:
                with torch.no_grad():
                    for _, tensor, value in preserved(self.fragments, self._errors()):
                        tensor.copy_(value)
            yield

    def report(self) -> str:
        """Returns one line that says how often averages are made, and how changes are compressed."""
        options = self.options
        text = report(self.requested, [self.config], self._facts, self.world_size, self.averages, "value")
        text += f"; changes are averaged every {options.every_in_words()}"
        if options.fragments > 1:
            text += f" in {options.fragments} fragments"
        if options.delay:
            text += f", and used {counted(options.delay, 'step')} later"
        after = f" after {counted(options.outer_after, 'step')}" if options.outer_after else ""
        return f"{text}; outer {describe_outer(self.outer)}{after}{self._note}"

    def check_open(self) -> None:
        """Raise RuntimeError if this was closed, or if an error or a signal has ended an average on this rank only."""
        self._engine.check_open()
        if self.is_broken:
            raise RuntimeError(
                "gqsgd: an exception has ended an average on this rank (its start, the wait for it or its use), and "
                "other ranks may have used it; close this LocalSteps, and make a new LocalSteps on every rank"
            )

    def close(self) -> None:
        """Release threads and process groups. Averages under way are lost; call `finish` before to use them."""
        self._engine.close()

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    def wait_for_all(self) -> None:
        """Wait for the averages under way."""
        for average in self.under_way:
            with self._or_broken():
                self._wait(average)

    def succeeded(self) -> list[Average]:
        """Wait for the averages under way, and return those that have not failed, e.g. because a rank has died.

        The anchors do not include a failed average, and never will, because this object is broken then. What it would
        have compensated is put back into the error memories.
        """
        succeeded = []
        for average in self.under_way:
            try:
                with self._or_broken():
                    self._wait(average)
                succeeded.append(average)
            except (ConfigError, RuntimeError) as error:  # a CollectiveError is a RuntimeError
                self.store.put_back(average.errors)
                logger.warning("gqsgd: the state does not include an average that has failed: %s", error)
        return succeeded

    def take_counters(self, state: Mapping[str, Any]) -> None:
        """Load the seed and the counters of a state (see `checkpoint.state_of`)."""
        self.config = replace(self.config, seed=state["seed"])
        self.requested = replace(self.requested, seed=state["seed"])
        self.step = state["step"]
        self.averages = state["averages"]
        self.skipped = state["skipped"]
        self.rounds.load_state_dict(state["rounds"], self.step)
        self._was_loaded = True
        self._engine.plans.clear()

    def mix_into_digest(self, number: int) -> None:
        """Add a number to the facts that ranks compare in every average, so that they detect different loaded
        states."""
        self._digest = digest_of(f"{self._digest} {number}")

    @torch.no_grad()
    def sum_of_weights(self) -> int:
        """Returns a sum over the bits of the replica's averaged parameters. A collective on the ranks of the
        replica."""
        entries = (entry for fragment in self.fragments for entry, _ in fragment.entries())
        return self.sharding.sum_of_bits(entry.whole for entry in entries if not entry.is_buffer)

    @torch.no_grad()
    def is_at_anchor(self) -> bool:
        """Returns whether this rank's parameters equal the anchors."""
        bundles = [bundle for fragment in self.fragments for bundle in fragment.bundles]
        return not any(bundle.has_changed(buffers=False, tolerance=0.0) for bundle in bundles)

    @torch.no_grad()
    def start_from_anchors(self) -> None:
        """Copy the anchors to this rank's parameters and buffers."""
        self._reshard()
        for fragment in self.fragments:
            fragment.set_tensors()
        self._inner.forget_steps()

    def _reshard(self) -> None:
        """Let the next forward pass gather the shards, which are about to change."""
        model = self._model()
        if self.sharding.is_divided and model is not None:
            reshard(model)

    def _look_at_loaded_weights(self) -> None:
        """After a state was loaded, warn if the weights are not those that were saved with it."""
        if not self._was_loaded:
            return
        self._was_loaded = False
        self._agree_on_averages()
        digest = self.expected_digest
        if digest is not None and not self.is_at_anchor() and digest != self.watched.digest():
            logger.warning(
                "gqsgd: a state of local steps was loaded, and this rank's weights are not those that it was saved "
                "beside, so what the rank had learnt since the last average is lost. Making LocalSteps gives all ranks "
                "the first rank's weights: load each rank's own weights after that, and then the state"
            )
        if self.expected_sum is not None and self.expected_sum != self.sum_of_weights():
            self.start_from_anchors()
            logger.warning(
                "gqsgd: a state of local steps was loaded, and the weights of this replica are not those that it was "
                "saved beside: of tensors that replicas save under one name, torch.distributed.checkpoint keeps some "
                "of each. This replica starts from the anchor, and what it had learnt since the last average is lost. "
                "Save the weights and the state of each replica under a name of its own"
            )

    def _agree_on_averages(self) -> None:
        """Leave out the averages under way if shards have loaded different ones. A collective on the ranks of a
        replica.

        When a rank dies, the averages of its shard fail, and those of other shards may succeed.
        """
        under_way = [(average.fragment, average.use_after) for average in self.under_way]
        if not self.sharding.agree(digest_of(str(under_way))):
            self.under_way.clear()
            logger.warning(
                "gqsgd: the loaded states of a replica's shards have different averages under way, as after the death "
                "of a rank: all shards leave them out, and what was learnt in them is lost"
            )

    def _check_changes(self) -> None:
        """Raise ConfigError if this rank has changed the model or an optimizer so that an average would not make ranks
        equal.

        If the other ranks made the same change, they raise the same error; otherwise, their error names this rank.
        """
        self._reshard()  # FSDP2 shows whole parameters in place of shards otherwise
        self.watched.check()
        self._weights_in_state.check()

    def _notice_changes(self) -> None:
        """Find the fragments whose tensors have left the anchor on some rank since the last average. A collective."""
        self._buffers.take_back()
        settled = [number for number, part in enumerate(self.fragments) if part.settled_after == self.step]
        if not settled:
            return
        changed = self._leaves_anchor(settled)
        for number, has_changed in zip(settled, changed, strict=True):
            if has_changed:
                self.fragments[number].settled_after = None
        if not self.step and any(changed):
            logger.warning(
                "gqsgd: no optimizer step was counted, and the models have changed: they are averaged now, for the "
                "first time. Call step() of LocalSteps, or of the optimizer that fabric.setup returns, and not that of "
                "the inner optimizer"
            )

    def _leaves_anchor(self, numbers: list[int], buffers: bool = True, tolerance: float = 0.0) -> list[bool]:
        """Returns, for each of some fragments, by their numbers, True if its tensors have left the anchor on some rank
        of any shard (see `Bundle.has_changed`). A collective."""
        parts = [self.fragments[number].bundles for number in numbers]
        changed = [float(any(bundle.has_changed(buffers, tolerance) for bundle in bundles)) for bundles in parts]
        sums = torch.tensor(changed, device=self.device)
        # Other ranks may be averaging in a step, so steps are compared before this is sent.
        segments = (Segment(0, len(numbers), raw=True),)
        request = self._request(segments, numbers[0], self.watched.frozen())._replace(varies=True)
        with self._or_broken():
            self._engine.reduce(sums, request).wait()
        # The ranks of a replica go on alike, also if only one of its shards has changed.
        return [not self.sharding.all_have(not share) for share in sums.tolist()]

    @torch.no_grad()
    def _errors(self) -> dict[int, Tensor]:
        """Returns the errors that owners remember for the way back, by parameter number. A collective."""
        if not self.compressed_numbers:
            return {}
        own = own_errors(self.store, self.compressed_numbers)
        everyone = own.repeat(self.world_size, 1)
        exchanges = gathered_errors(own, everyone)
        # Other ranks may be averaging in a step, so steps are compared before this is sent.
        request = self._request((), 0, self.watched.frozen())._replace(varies=True)
        with self._or_broken():
            self._engine.run(exchanges.x, request, exchanges.counted).wait()
        return errors_by_parameter(self.store, self.compressed_numbers, everyone)

    def _begin_at_anchors(self) -> None:
        """Set the anchors to the current tensors, which are equal on all ranks, and start with empty memories."""
        for fragment in self.fragments:
            fragment.settled_after = 0
            for bundle in fragment.bundles:
                bundle.take_anchors()
        self.start_from_anchors()  # anchors of fewer bits are rounded
        self.store = new_store(setting_of(self.config, self.world_size, self._dtype), self._sizes, self.device)
        self.averagers = {
            bundle: self.options.averaging.averager(bundle, self.world_size)
            for fragment in self.fragments
            for bundle in fragment.bundles
        }

    # --- one average -------------------------------------------------------------------------------------------------

    def _start(self, number: int, delay: int) -> Average:
        self._check_changes()
        self._buffers.take_back()
        fragment = self.fragments[number]
        numbers = [entry.segment.parameter for entry, _ in fragment.entries() if not entry.segment.raw]
        average = Average(number, self.step + delay, self.watched.frozen(), errors=self.store.errors(numbers))
        put = partial(self._put, average=average)
        with self._or_broken():
            for bundle in fragment.bundles:
                average.pending_means.append(PendingMean(self.averagers[bundle].requests(bundle.change()), put))
            if self.options.inner_state == "average":
                self._start_inner(average)
            if number == len(self.fragments) - 1:
                average.integers, works = self._integers.start(self.group)
                average.waits += [work.wait for work in works]
        return average

    def _start_inner(self, average: Average) -> None:
        """Start to average the inner optimizers' state of a fragment, uncompressed."""
        tensors = self._inner.tensors(entry.whole for entry, _ in self.fragments[average.fragment].entries())
        one = torch.zeros(1, device=self.device)  # so that the message is not empty
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        flat = torch.cat([tensor.flatten().to(self.device, dtype) for tensor in [*tensors, one]])
        # If a rank has not used a parameter, its state is missing there, and messages would differ in size.
        facts = {"values of the inner optimizer's state": flat.numel(), "dtype of their mean": str(dtype)}
        card = Card("LocalSteps(inner_state='average')", facts)
        average.inner = (tensors, flat)
        request = self._request((Segment(0, flat.numel(), raw=True),), average.fragment, average.frozen)
        average.waits.append(self._engine.reduce(flat, request._replace(agreement=card)).wait)

    def _put(self, asked: RuleRequest, count: int, average: Average) -> Job:
        """Start to answer a rule's request; ``count`` is the number of the request in one bundle's average."""
        if isinstance(asked, Exchanges):
            request = self._request((), average.fragment, average.frozen)
            return self._engine.run(asked.x, request._replace(varies=True), asked.counted)
        return self._engine.reduce(asked.x, self._request(asked.segments, average.fragment, average.frozen, count))

    def _request(
        self, segments: tuple[Segment, ...], fragment: int, frozen: tuple[str, ...], count: int = 0
    ) -> Request:
        # Each rank moves its anchors itself, so anchors stay equal only if the outer optimizers are equal and leave out
        # the same frozen parameters.
        digest = digest_of(f"{self._digest} {describe_outer(self.outer)} {frozen} {self.watched.order}")
        entry, anchor = next(self.fragments[fragment].entries())
        weights = Weights.of(entry.name, anchor, self.averages)
        return Request(
            name=f"average {self.averages} (fragment {fragment}, after step {self.step})",
            configs=(self.config,),
            segments=segments,
            step=self.averages * self.options.averaging.most_requests + count,
            store=self.store,
            # The step, not the number of the average, so that different numbers of steps are detected.
            agreement=Stamp(self.config.seed, self.step, digest, weights=weights),
            bucket=fragment,
            compressed=self.averages >= self.config.warmup_steps,
        )

    def _wait(self, average: Average) -> None:
        """Wait for an average, and count the wait as exposed."""
        if average.pending_means:
            since = moment(self.device)
            average.wait()
            if average.errors and not self._is_finite(average):
                # All ranks leave it out, so what it would have compensated is still to be sent.
                self.store.put_back(average.errors)
            average.errors = {}
            self.telemetry.expose(since, moment(self.device))
            self.telemetry.end_step()

    def _is_finite(self, average: Average) -> bool:
        means = average.changes if average.inner is None else [*average.changes, average.inner[1]]
        return self.sharding.all_have(all(bool(mean.isfinite().all()) for mean in means))

    def _apply(self, average: Average, weight: float) -> None:
        fragment = self.fragments[average.fragment]
        self._buffers.take_back()
        self._reshard()
        plain = self._is_plain(average)
        fragment.move_anchors(average.changes, self.outer, plain=plain, frozen=average.frozen)
        fragment.set_tensors(weight)
        self._inner.forget_steps()
        if average.integers:
            self._integers.take(average.integers)
        if average.inner is not None:
            tensors, mean = average.inner
            for tensor, part in zip(tensors, mean[:-1].split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        if self.options.inner_state == "reset":
            self._inner.forget(entry.whole for entry, _ in fragment.entries())

    def _go_back(self, average: Average) -> None:
        self.start_from_anchors()
        cleared = self._inner.clear_what_is_not_finite()
        own = f" and cleared its optimizer's state of {counted(cleared, 'parameter')}" if cleared else ""
        logger.warning(
            "gqsgd: the mean change of fragment %d is not finite after step %d (%s), because some rank's is not: all "
            "ranks left this average out (%d so far) and went back to the anchor; rank %d did so%s",
            average.fragment,
            self.step,
            self._names_of_not_finite(average),
            self.skipped,
            self.rank,
            own,
        )

    def _names_of_not_finite(self, average: Average) -> str:
        """Returns the names of tensors whose mean change is not finite, for a message."""
        names = [
            entry.name
            for bundle, mean in zip(self.fragments[average.fragment].bundles, average.changes, strict=True)
            for entry, part in zip(bundle.entries, bundle.split(mean), strict=True)
            if not bool(part.isfinite().all())
        ]
        return listed(names) if names else "in the inner optimizer's state"
