"""Local steps whose changes are merged with weights: each member makes as many steps as it can.

A member's parameters x are always the sum of the anchor that it knows and its change since. Between two of its steps,
it hands over this change, and may continue to train. When the merge is over, it sets x ← anchor′ + (x − x_h), where x_h
is the value of x at the time of the handover. So steps between the handover and the end of the merge are neither lost
nor counted twice. If a member was late for a merge and handed nothing over, it sets x ← x + (anchor′ − anchor), and its
change enters the next merge.

Buffers, such as running variances, are no sums of changes. Their anchors become the weighted mean of the members'
values. A member whose values are among them sets its buffers to the mean. A member that was late keeps its own ones.

Decoupled DiLoCo (arXiv 2604.21428) differs in three ways: it has a separate process, the syncer, to which learners send
fragments; it merges directions and lengths of changes separately; and it waits for a quorum with an adaptive grace
period. Here there is no syncer: members sum their messages with an all-reduce. A merge covers the whole model. Members
are weighted by their numbers of samples. The grace period is the duration of the fastest member's step (see `rounds`),
because the changes of late members are not lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import ConfigError, check_integer, counted, plain_integer
from lightning_gqsgd.local_steps.checking import check_kind, in_plain_names
from lightning_gqsgd.local_steps.fragments import kept, refuse_kept
from lightning_gqsgd.local_steps.inner_state import InnerState, all_or_nothing
from lightning_gqsgd.local_steps.merges.contribution import Contribution, learning_rate_of, parameters_in
from lightning_gqsgd.local_steps.merges.fixed import FixedMembers
from lightning_gqsgd.local_steps.merges.merge import Member, Merge
from lightning_gqsgd.local_steps.merges.preemption import PreemptionNotice
from lightning_gqsgd.local_steps.merges.rounds import rounds_of
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.local_steps.merges.thread import MergeThread
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import describe_outer
from lightning_gqsgd.local_steps.starting import (
    ROUNDING,
    WEIGHTS_CHANGED,
    IntegerBuffers,
    OwnBuffers,
    Started,
    Trained,
    own_facts,
    start_together,
    trained_by,
)
from lightning_gqsgd.local_steps.watching import WatchedModel, digest_of_tensors, samples_of_others
from lightning_gqsgd.local_steps.weights_in_state import WeightsInState
from lightning_gqsgd.membership.requirement import check_torchft
from lightning_gqsgd.session.checkpoint import STATE_SCHEMA, check_state
from lightning_gqsgd.session.opening import facts_of
from lightning_gqsgd.session.report import report
from lightning_gqsgd.wire.communicator import parent_group
from lightning_gqsgd.wire.engine import untraced
from lightning_gqsgd.wire.meeting import Meeting

if TYPE_CHECKING:
    from lightning_gqsgd.membership.manager import TorchftMembers

logger = logging.getLogger(__name__)

#: Seconds between two looks whether this process was sent SIGTERM while it waits for a merge.
_LOOK_S = 0.5

#: Entries of every state of merges, in addition to those of all hooks' states.
_ENTRIES: dict[str, type] = {"merged": Mapping}


class MergedAverages:
    """Merges the changes that the members' own optimizer steps make.

    Creating it is a collective on the process group. All members then have the same parameters and buffers. With
    ``options.elastic``, this process copies the state of a member that the lighthouse knows, and does not wait for the
    next merge.

    The arguments are those of `averages.LocalAverages`. With ``options.elastic``, there is no process group, and a
    timeout of None is 60 s.

    Attributes:
        options: when to merge, and how to use the mean.
        requested: the compression that was passed.
        outer: the outer optimizer; its tensors are the anchors.
        device: device of the model.
        step: number of this member's optimizer steps.
        telemetry: counters of this process.

    Raises:
        ConfigError: if the model, an optimizer or a value cannot work, or if members do not fit together.
        CollectiveError: if the others cannot be reached within the timeout.
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
        self.options = options
        self.requested = config
        self.step = 0
        self.skipped = 0
        self._optimizers = list(optimizers)
        self._rounds = rounds_of(options)
        member = Member(secrets.randbits(62), f"{socket.gethostname()}:{os.getpid()}")
        parent = None if options.elastic else parent_group(group)
        started: Started | None = None
        if parent is not None:
            started = start_together(model, optimizers, options, config, parent, timeout, meeting)
        trained = trained_by(model, optimizers, options, config, group=None) if started is None else started.trained
        self.device = trained.device
        (self._fragment,) = trained.fragments
        for bundle in self._fragment.bundles:
            bundle.take_anchors()  # a start together has replaced the tensors by the first rank's
        self._integers = IntegerBuffers(model)
        self._shared = SharedState(self._fragment, trained.outer, options, self._integers.read())
        self._note = "" if started is None else started.note
        members: FixedMembers | TorchftMembers
        if started is None:
            members = self._meet_elastic(model, trained, timeout)
        else:
            members = FixedMembers(started.engine, started.config)
        self._facts = trained.facts
        self.outer = trained.outer
        self._watched = WatchedModel(model, optimizers, trained.parameters, parent)
        self._weights_in_state = WeightsInState(optimizers, options)
        self._inner = InnerState(optimizers)
        self._buffers = OwnBuffers(model)
        self._contributions = 0
        self._pending: Contribution | None = None
        self._known_version = 0
        self._peak_rate = 0.0
        self._samples_before = 0  # those of the latest handover with steps
        self._finished_after: int | None = None
        self._has_started = False
        self._counts_samples = False
        self._has_said_lost = False
        self._members = members
        self.telemetry = members.telemetry
        self._thread = MergeThread(members, self._shared, member, self._rounds, self.device)
        try:
            self._thread.join()
        except BaseException:
            members.close()
            raise
        self._start_from_anchors()
        # The process keeps its handlers of signals, and they must not keep the model.
        thread = weakref.ref(self._thread)

        def is_over() -> bool:
            found = thread()
            return found is None or found.is_over

        self._notice = PreemptionNotice(is_over) if options.elastic else None
        # This also runs at exit, because Gloo groups that are still open then can abort the process.
        weakref.finalize(model, self._thread.close)

    # --- starting ----------------------------------------------------------------------------------------------------

    def _meet_elastic(self, model: nn.Module, trained: Trained, timeout: timedelta | None) -> TorchftMembers:
        """Returns the members that the lighthouse knows."""
        check_torchft("elastic=True")
        from lightning_gqsgd.membership.manager import TorchftMembers
        from lightning_gqsgd.membership.process_group import refuse_nodes

        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"elastic=True: this process is one of {dist.get_world_size()} of torch.distributed, which cannot "
                "leave or join; start each process by itself, with the lighthouse's address"
            )
        refuse_nodes(self.requested)
        self.options.check_compression(resolve(self.requested, 2))
        # Members have in common what they average. The rest of the model never travels, so it has to be equal.
        others = samples_of_others(model, {id(entry.whole) for entry in trained.parameters})
        own = {**own_facts(self.options, model, trained), "values of untrained parameters": digest_of_tensors(others)}
        facts = facts_of(self.requested, own)
        return TorchftMembers(
            self.requested,
            facts,
            self._shared.state_dict,
            device=self.device,
            min_replicas=self.options.min_replicas,
            timeout=timeout,
            patience=timedelta(seconds=self._rounds.patience_s),
        )

    def _count_anew(self) -> None:
        """Begin to count what the next change will be made of."""
        self._samples_since = 0
        self._steps_since = 0
        self._rate_since = 0.0  # the largest learning rate of these steps

    # --- what is known -----------------------------------------------------------------------------------------------

    @property
    def averages(self) -> int:
        """Number of merges so far, of all members."""
        return self._shared.merges

    @property
    def samples(self) -> int:
        """Number of samples that have entered the model, of all members together: the same on all of them after each
        merge. Without `add_samples`, each step counts as one."""
        return self._shared.samples

    @property
    def left_out(self) -> int:
        """Number of changes that were not used, because they were not finite or too large."""
        return self._shared.left_out

    @property
    def failed(self) -> int:
        """Number of merges that failed on this member, because another member has gone."""
        return self._thread.failed

    @property
    def rank(self) -> int:
        """This member's number in the latest merge; 0 before the first one."""
        return self._thread.latest.own if self._thread.latest else 0

    @property
    def world_size(self) -> int:
        """Number of members of the latest merge; 1 before the first one."""
        return len(self._thread.latest.rows) if self._thread.latest else 1

    def counts(self) -> dict[str, float]:
        """Returns the counters of the merges so far for a logger, by names prefixed with ``gqsgd/``."""
        return {
            "gqsgd/merges": float(self.averages),
            "gqsgd/members": float(self.world_size),
            "gqsgd/samples": float(self.samples),
            "gqsgd/left_out": float(self.left_out),
            "gqsgd/failed": float(self.failed),
        }

    @property
    def is_closed(self) -> bool:
        """True if this was closed, so that nothing can be merged any more."""
        return self._thread.is_closed

    # --- steps -------------------------------------------------------------------------------------------------------

    def add_samples(self, count: int) -> None:
        """Count the samples, or tokens, that the next step uses. They are the weight of this member's change.

        After the first call, a step without a call counts as no sample.

        Raises:
            ConfigError: if the count is not an integer of at least 0.
        """
        count = plain_integer(count)
        check_integer("count", count, 0, 2**62)
        self._counts_samples = True
        self._samples_since += count

    @untraced
    def advance(self) -> None:
        """Count an optimizer step. Use a merge that is over, and hand over the change when it is due.

        Raises:
            ConfigError: if the model or an optimizer was changed, or if members do not fit together.
            CollectiveError: if nothing can be merged any more.
            RuntimeError: if this was closed.
            SystemExit: with ``elastic``, if this process was sent SIGTERM. Its change has been merged, and this is
                closed.
        """
        refuse_kept([self._fragment])
        self.check_open()
        if not self.step:
            self._weights_in_state.check()
        self._thread.go_on()
        self.step += 1
        self._steps_since += 1
        self._rate_since = max(self._rate_since, learning_rate_of(self._optimizers))
        self._peak_rate = max(self._peak_rate, self._rate_since)
        if not self._counts_samples:
            self._samples_since += 1
        self._rounds.end_step()
        self._catch_up()
        if self._pending is None and self._rounds.is_due(self._steps_since):
            self._hand_over()
            if not self.options.delay:
                self._settle()
                self._rounds.begin_step()
        if self._must_leave:
            self._leave_and_exit()

    @untraced
    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the merge of the change that was handed over, and use it.

        Call this before weights are replaced by others, for example by their mean over steps. Otherwise, what the merge
        adds to this member's weights would be added to the new ones.

        Raises:
            ConfigError, CollectiveError, RuntimeError: see `advance`.
        """
        refuse_kept([self._fragment])
        self.check_open()
        if self._pending is not None:
            self._settle()

    @untraced
    @torch.no_grad()
    def finish(self) -> None:
        """Merge the changes since the last merge, and wait until all members have finished. All then have the same
        bits.

        Until then, this member takes part in the merges of the others, which continue to train. If parameters have
        changed without a step since the last merge, for example by a callback that sets averaged weights, this change
        has the weight of the round before. A second call in a row is a merge, too, because other members may have made
        steps in between. All members have to make it. With ``elastic``, the others wait for one that does not, and is
        not closed, for the lighthouse's ``--join-timeout``.

        A member that makes no steps, and does not finish, is waited for no longer than the timeout, or, with
        ``elastic``, than the patience of `rounds`. Then members end without it, or raise an error if it cannot leave.

        Raises:
            CollectiveError: if nothing can be merged any more, or if another rank of the process group makes no steps,
                and does not call this.
            SystemExit: with ``elastic``, if this process was sent SIGTERM; see `advance`.
        """
        refuse_kept([self._fragment])
        self.check_open()
        self._thread.go_on()  # after an earlier `finish`, also if no step was made since: others may have made some
        if self._pending is not None:
            self._settle()
        if not self._must_leave:
            self._hand_over(has_finished=True)
        while not (self._must_leave or self._thread.wait_finished(_LOOK_S)):
            pass
        if self._must_leave:
            self._leave_and_exit()
        self._catch_up()
        self._finished_after = self.step

    @untraced
    @torch.no_grad()
    def leave(self) -> None:
        """Merge the changes since the last merge with the current members, and close. Use this if the machine has to
        go. As with `finish`, parameters may also have changed without a step.

        If no merge succeeds within the timeout after the end of the round, for example because the lighthouse is gone,
        this gives up and logs that.

        Raises:
            ConfigError: without ``elastic``, because the others cannot continue without this rank.
        """
        if isinstance(self._members, FixedMembers):
            raise ConfigError(
                "leave() is for elastic=True: ranks of a process group merge together, and those that stay would fail "
                "without this one; call finish() on all ranks"
            )
        leaves_after_s = self._rounds.round_s + self._members.timeout.total_seconds()
        is_merged = self._pending is None or self._has_merged_within(leaves_after_s)
        # After `finish`, no merge would take a change without a step.
        has_more = self._steps_since or (self.step != self._finished_after and self._has_changed())
        if is_merged and has_more:
            self._hand_over()
            is_merged = self._has_merged_within(leaves_after_s)
        if not is_merged:
            logger.warning(
                "gqsgd: no merge has succeeded for %.0f s: this member leaves, and what it has learnt since the last "
                "one is lost",
                leaves_after_s,
            )
        self.close()

    def leave_if_told(self) -> None:
        """After SIGTERM, leave as `leave` does, unless this was closed. The caller ends the training."""
        if self._must_leave and not self.is_closed:
            self.leave()
            logger.warning("gqsgd: SIGTERM: this process has left")

    @property
    def _must_leave(self) -> bool:
        """Whether this process was sent SIGTERM."""
        return self._notice is not None and self._notice.was_given

    def _leave_and_exit(self) -> None:
        self.leave()
        logger.warning("gqsgd: SIGTERM: this process has left, and exits")
        raise SystemExit(0)

    def check_start(self) -> None:
        """Check before the very first step that parameters are equal to the anchors.

        Raises:
            ConfigError: if weights were loaded since this was created.
        """
        self.check_open()
        if not (self.step or self._has_started):
            self._has_started = True
            self._check_weights()

    @torch.no_grad()
    def _check_weights(self) -> None:
        self._watched.check()
        self._buffers.take_back()
        with self._shared.lock:
            # If a merge came before this member's first step, the member did not start from the current anchors.
            is_comparable = self._shared.version == self._known_version
            if is_comparable and any(bundle.has_changed(False, ROUNDING) for bundle in self._fragment.bundles):
                raise ConfigError(WEIGHTS_CHANGED)

    def start_anew(self) -> None:
        """Raise ConfigError: members share their weights from the start."""
        raise ConfigError(
            "weights were loaded after merges began, and the other members would not have them; load them before "
            "training begins"
        )

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Returns a context in which the model has the anchor's values, e.g. to validate.

        After the context, the model has this member's own values again. Do not make a step inside it.

        Raises:
            RuntimeError: in a forked process.
        """
        self._thread.check_process()
        self._buffers.take_back()
        with kept([self._fragment]):
            with torch.no_grad(), self._shared.lock:
                self._fragment.set_tensors()
            try:
                yield
            finally:
                self._buffers.take_back()  # the tensors that get their values back are the model's again

    def report(self) -> str:
        """Returns one line that says how often merges are made, and how changes are compressed."""
        if self._thread.latest is None:
            text = f"gqsgd: started from what another member had after merge {self.averages}"
        elif self.options.elastic and self.world_size == 1:
            text = "gqsgd: one member so far, nothing to reduce yet"
        else:
            text = report(self.requested, [self._members.config], self._facts, self.world_size, self.averages, "value")
        text += f"; changes are merged every {self.options.every_in_words()}, weighted by samples"
        if self.options.elastic:
            text += ", by the members that are there"
        after = f" after {counted(self.options.outer_after, 'step')}" if self.options.outer_after else ""
        return f"{text}; outer {describe_outer(self.outer)}{after}{self._note}"

    def check_open(self) -> None:
        """Raise the error that has ended the merges, if there is one."""
        self._thread.check()

    def close(self) -> None:
        """Release threads and connections. Changes since the last merge are lost; call `finish` before to merge
        them."""
        if self._notice is not None:
            self._notice.close()
        self._thread.close()

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that all members share: plain values and tensors. Not a collective.

        A member that loads it starts from the anchor: changes since the last merge are not in it.

        Raises:
            RuntimeError: in a forked process.
        """
        self._thread.check_process()
        return {
            "schema": STATE_SCHEMA,
            "seed": self.requested.seed,
            "step": self.step,
            "config": self.requested.to_dict(),
            "merged": self._shared.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], load_beside: Callable[[], object]) -> None:
        """Load a `state_dict`. Not a collective. All members have to load the same state, before their first step or
        after `finish`. The ranks of a process group have to do so within one round, because a merge compares anchors.

        Args:
            state: the result of `state_dict`.
            load_beside: a function that loads the rest of the checkpoint into the optimizers.

        Raises:
            ConfigError: if this is not such a state, if it is the state of another model, or if this member has a
                change that is not merged. Nothing is changed then.
            RuntimeError: in a forked process.
        """
        self._thread.check_process()
        check_kind(state, is_merged=True)
        check_state(state, self.requested, _ENTRIES)
        if self._pending is not None or self._steps_since:
            # Members may be merging it, and this one would go on as if the state had been its start.
            raise ConfigError(
                "a state of merges was loaded when steps had been made since the last merge; load it before the first "
                "step, or call finish() first"
            )
        with self._thread.between_merges:
            with all_or_nothing(self._optimizers):
                load_beside()
                self._shared.load_state_dict(in_plain_names(state["merged"]))
            self._members.start_after(self._shared.merges)
            self._rounds.start_after(self._shared.merges)
            self.requested = replace(self.requested, seed=state["seed"])
            self.step = state["step"]
            self._watched.forget_others()
            self._finished_after = None  # training may reach the step of an earlier `finish` again
            self._start_from_anchors()

    # --- one merge ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _hand_over(self, has_finished: bool = False) -> None:
        """Hand over the change since the last handover.

        Raises:
            ConfigError: if the model or an optimizer was changed. This member then leaves, so that the others do not
                wait.
        """
        with self._or_closed():
            self._watched.check()
            self._weights_in_state.check()
            self._buffers.take_back()
            if self._steps_since and not self._samples_since and not self._has_said_lost:
                self._has_said_lost = True
                logger.warning(
                    "gqsgd: add_samples has counted 0 samples in %s, and what they have learnt weighs nothing in the "
                    "merge: call add_samples for every step, or never, so that each step counts as one",
                    counted(self._steps_since, "step"),
                )
            weight = self._samples_since
            if self._steps_since:
                self._samples_before = weight
            elif self._has_changed():
                weight = max(weight, self._samples_before, 1)
                if not self.step:
                    logger.warning(
                        "gqsgd: no optimizer step was counted, and the model has changed: it is merged now, for the "
                        "first time. Call step() of LocalSteps, or of the optimizer that fabric.setup returns, and not "
                        "that of the inner optimizer"
                    )
            self._contributions += 1
            self._pending = Contribution(
                self._contributions,
                self._starts,
                [bundle.flat_tensors() for bundle in self._fragment.bundles],
                weight,
                self._steps_since,
                self._integers.read(),
                self._rate_since,
                self._peak_rate,
            )
            self._count_anew()
            self._thread.hand_over(self._pending, has_finished=has_finished)

    @contextmanager
    def _or_closed(self) -> Iterator[None]:
        """Returns a context for a handover, or for the use of a merge. If an exception leaves it, even from a signal
        handler, this member leaves: a second attempt would count a part of its change twice, or wait for what it never
        sent."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _has_changed(self) -> bool:
        """Returns whether a parameter has changed since this member has last followed the anchors. Waits for a GPU."""
        for bundle, start in zip(self._fragment.bundles, self._starts, strict=True):
            count = parameters_in(bundle)
            if not torch.equal(bundle.flat_tensors()[:count], start[:count]):
                return True
        return False

    def _settle(self) -> None:
        """Wait until the handed-over change is merged, and use the merge. After SIGTERM, `leave` waits instead, because
        its wait has an end."""
        while not (self._must_leave or self._has_merged_within(_LOOK_S)):
            pass

    def _has_merged_within(self, seconds: float) -> bool:
        """Wait until the handed-over change is merged, and use the merge. Returns whether it succeeded in time."""
        if self._thread.wait_settled(seconds) is None:
            return False
        self._catch_up()
        return True

    @torch.no_grad()
    def _catch_up(self) -> None:
        """If the anchors have moved, continue from them, and keep the change since the handover."""
        # Most steps end here, so without the lock: what this step does not see yet, the next one sees.
        if self._shared.version == self._known_version:
            return
        settled = self._thread.wait_settled(0.0) if self._pending is not None else None
        if self._pending is not None and settled is None:
            return  # its change starts at the previous anchors
        with self._or_closed(), self._shared.lock:
            self._buffers.take_back()
            if settled is not None and settled.is_left_out:
                self._start_from_anchors()
                self._say_left_out(settled)
            else:
                # The values of this member that the anchors already include.
                references = self._starts if self._pending is None else self._pending.positions
                self._go_on_from_anchors(references, is_merged=settled is not None)
            self._integers.write(self._shared.integers)
            self._known_version = self._shared.version
            self._pending = None
        if settled is not None and settled.is_used and self.options.inner_state == "reset":
            self._inner.forget(entry.whole for entry, _ in self._fragment.entries())

    def _go_on_from_anchors(self, references: Sequence[Tensor], *, is_merged: bool) -> None:
        """Set this member's parameters to the anchors plus its change since ``references``.

        Its buffers become the anchors if its own values are among those of which they are the mean. Otherwise, those
        that have changed keep its own values, which enter the next merge.

        Args:
            references: the values of this member that the anchors already include, [numel] for each bundle.
            is_merged: whether these values have entered the anchors in the latest merge.
        """
        self._inner.forget_steps()
        self._starts = [bundle.flat_starts() for bundle in self._fragment.bundles]
        for bundle, start, reference in zip(self._fragment.bundles, self._starts, references, strict=True):
            present = bundle.flat_tensors()
            moved = start + (present - reference)
            # A sum of changes may make a running variance negative.
            count = parameters_in(bundle)
            moved[count:] = start[count:] if is_merged else present[count:]
            # Exactly the anchor where there is no change, also where a buffer is infinite.
            bundle.put(torch.where(present == reference, start, moved))

    @torch.no_grad()
    def _start_from_anchors(self) -> None:
        """Copy the anchors to this member's tensors, and discard its change."""
        self._inner.forget_steps()
        with self._shared.lock:
            self._fragment.set_tensors()
            self._integers.write(self._shared.integers)
            self._starts = [bundle.flat_starts() for bundle in self._fragment.bundles]
            self._known_version = self._shared.version
        self._count_anew()

    def _say_left_out(self, settled: Merge) -> None:
        self.skipped += 1
        reason = settled.shares.left_out.get(settled.own, "made the mean not finite")
        cleared = self._inner.clear_what_is_not_finite()
        own = f", and cleared its optimizer's state of {counted(cleared, 'parameter')}" if cleared else ""
        logger.warning(
            "gqsgd: the change of member %s %s: all members left it out of merge %d (%d changes so far), and this "
            "member went back to the anchor%s",
            settled.rows[settled.own].name,
            reason,
            settled.rows[settled.own].merges + 1,
            self._shared.left_out,
            own,
        )
