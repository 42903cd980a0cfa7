"""The thread that merges during training, so that a member answers the others even in the middle of a step."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.local_steps.merges.contribution import Contribution
from lightning_gqsgd.local_steps.merges.merge import Member, Merge, merge
from lightning_gqsgd.local_steps.merges.rounds import MergeRounds
from lightning_gqsgd.local_steps.merges.rows import Flag
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.membership.members import Members, MergeFailed
from lightning_gqsgd.wire.staging import make_current

logger = logging.getLogger(__name__)

#: Seconds from a failed merge to the next attempt.
_PAUSE_S = 0.2

#: Seconds between two looks whether all members have finished.
_LOOK_S = 0.5

#: Seconds that `MergeThread.close` waits at most until the thread has ended.
_CLOSE_S = 3.0

#: Seconds without a merge after which a warning gives the reason.
_SAY_AFTER_S = 15.0


class MergeThread:
    """Makes one merge after the other.

    Args:
        members: the members that take part.
        shared: the state that all members share.
        member: this member.
        rounds: the rounds, which say when merges are due.
        device: device of the model.

    Attributes:
        between_merges: a lock that is held during each merge.
        latest: the latest merge; None before the first one.
        failed: number of failed merges.
    """

    def __init__(
        self,
        members: Members,
        shared: SharedState,
        member: Member,
        rounds: MergeRounds,
        device: torch.device,
    ) -> None:
        self._members = members
        self._device = device
        self._shared = shared
        self._member = member
        self._rounds = rounds
        self._changed = threading.Condition()
        self.between_merges = threading.Lock()
        self._contribution: Contribution | None = None
        self._settled_by: Merge | None = None
        self._has_finished = False
        self._rests = False
        self._is_closing = False
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._failing_since: float | None = None
        self._others_wait_since: float | None = None  # those that have finished
        self._has_said_why = False
        self.latest: Merge | None = None
        self.failed = 0
        self._thread = threading.Thread(target=self._run, name="gqsgd-merges", daemon=True)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called, an error has ended the merges, or this process was forked."""
        return self._is_closing or self._error is not None or self._process != os.getpid()

    @property
    def is_over(self) -> bool:
        """Returns whether nothing is merged any more, or not before the next step because all members have finished."""
        return self.is_closed or self._rests

    def join(self) -> None:
        """Load the others' state, and begin the rounds.

        If members join and leave, this is the state that one of them had a moment ago, and this member trains during
        its first merge. Otherwise, this makes the first merge.

        Raises:
            ConfigError: if this member does not fit the others.
            CollectiveError: if the others cannot be reached.
        """
        self._failing_since = time.monotonic()  # so that the first merge is due at once
        if self._has_taken(self._members.present_state()):
            self._rounds.wait()
        else:
            while (found := self._merge(None, Flag(0))) is None:
                pass
            self._take(found, None)
        self._thread.start()

    def hand_over(self, contribution: Contribution, *, has_finished: bool) -> None:
        """Merge a contribution as soon as the others merge. The previous contribution must be settled.

        ``has_finished``: whether this member makes no more steps.
        """
        with self._changed:
            assert self._contribution is None
            self._contribution = contribution
            self._has_finished = has_finished
            self._rests = False  # if the others have left this member behind
            self._settled_by = None
            self._changed.notify_all()

    def go_on(self) -> None:
        """Begin further rounds after the last merge of `finish`. Does nothing if that merge has not taken place."""
        # Called after every step, so without the lock: `finish` has waited for that merge in this thread.
        if self._rests:
            with self._changed:
                self._rests = False
                self._has_finished = False
                self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that has ended the merges, if there is one. Takes no lock, so it is for every step.

        Raises:
            ConfigError, CollectiveError: if no further merge is possible.
            RuntimeError: if this was closed.
        """
        if self._error is not None:
            raise self._error
        self.check_process()
        if self._is_closing:
            raise RuntimeError("gqsgd: this LocalSteps was closed; make a new LocalSteps")

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process: the thread may have held locks, which nobody releases there."""
        if self._process != os.getpid():
            raise RuntimeError(
                "gqsgd: this LocalSteps belongs to the process that this one was forked from; call it there, before "
                "the fork if the result is for this process"
            )

    def wait_settled(self, within_s: float) -> Merge | None:
        """Wait for the merge that settles the latest contribution. Returns None if it has not come within so many
        seconds; raises as `check` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled_by is not None or self.is_closed, within_s)
            self.check()
            return self._settled_by

    def wait_finished(self, within_s: float) -> bool:
        """Wait for the merge in which all members have finished. Returns whether it has come within so many seconds;
        raises as `check` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._rests or self.is_closed, within_s)
            self.check()
            return self._rests

    def close(self) -> None:
        """End the thread, and wait until it has ended. If a merge is under way, it fails, also on the other members.
        Does nothing in a forked process."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._members.close()
        # A thread that returns from torchft's calls while Python is ending would abort the process.
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _has_taken(self, state: Mapping[str, Any] | None) -> bool:
        """Load a state if there is one that fits. Returns whether a state was loaded."""
        if state is None or not state.get("merges"):
            return False
        try:
            self._shared.load_state_dict(state)
        except ConfigError as error:
            # Any program may have answered, so a state that does not fit is ignored. In a merge, it is reported to all
            # members.
            logger.info("gqsgd: the state of another member does not fit: %s", error)
            return False
        self._members.start_after(self._shared.merges)
        return True

    def _run(self) -> None:
        try:
            make_current(self._device)
            while self._wait_until_due():
                with self._changed:
                    contribution = self._contribution
                    flags = Flag.HAS_FINISHED if self._has_finished else Flag.IS_IDLE if self._is_idle() else Flag(0)
                found = self._merge(contribution, flags)
                if found is not None:
                    self._take(found, contribution)
        except BaseException as error:
            with self._changed:
                if not self._is_closing:  # otherwise, it is a consequence of `close`
                    self._error = error
                self._changed.notify_all()

    def _wait_until_due(self) -> bool:
        """Wait until the next merge is due. Returns False once this is closed."""
        while True:
            # Without the lock, because the answer may take long.
            looks = self._has_finished and not self._rests and not self._members.waits_for_all
            have_all_finished = looks and self._members.have_all_finished(self._shared.merges)
            with self._changed:
                if self._is_closing:
                    return False
                due_after_s = self._due_after_s(have_all_finished)
                if due_after_s == 0:
                    return True
                seconds = math.inf if due_after_s is None else due_after_s + 0.001
                if self._has_finished and not self._rests:
                    seconds = min(seconds, _LOOK_S)
                self._changed.wait(None if math.isinf(seconds) else seconds)

    def _due_after_s(self, have_all_finished: bool) -> float | None:
        """Returns the seconds until the next merge is due; None if it is not known."""
        if self._rests:
            return None
        if self._failing_since is not None:
            return 0.0
        # Ranks of a process group wait for each other no longer than the timeout, and a round may be longer. So they
        # come around its end.
        timeout_s = self._members.patience_s if self._members.waits_for_all else math.inf
        late_after_s = self._rounds.late_after_s(timeout_s / 8)
        is_ready = self._has_finished or self._contribution is not None
        if late_after_s is None:
            return 0.0 if is_ready else None
        # If members join and leave, finished members would begin a merge without those that have not finished.
        is_early = is_ready and (self._members.waits_for_all or not self._has_finished or have_all_finished)
        return max(0.0, late_after_s - timeout_s * 3 / 4) if is_early else late_after_s

    def _is_idle(self) -> bool:
        """Returns whether members that have finished have waited in vain for a step of this one."""
        if self._others_wait_since is None or self._contribution is not None:
            return False
        since = max(self._others_wait_since, self._rounds.latest_step)
        # A step may take longer than members wait for each other's messages.
        return time.monotonic() - since > self._members.patience_s + self._rounds.step_s

    def _merge(self, contribution: Contribution | None, flags: Flag) -> Merge | None:
        """Try to make a merge. Returns None if it failed.

        Raises:
            CollectiveError: if no merge has succeeded for longer than the patience of the rounds.
        """
        requests = merge(self._shared, self._member, contribution, step_s=self._rounds.step_s, flags=flags)
        problem: Exception | None = None
        try:
            with self.between_merges:
                found = self._members.run(requests)
        except MergeFailed as error:
            problem = error
            found = None
        if found is not None:
            self._failing_since = None
            self._has_said_why = False
            self._members.say_if_begun_anew(self._shared.merges)
            return found
        self.failed += 1
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        logger.info("gqsgd: a merge came to nothing (%s); this member tries again", problem or "another one failed")
        if now - self._failing_since > self._rounds.patience_s:
            raise CollectiveError(
                f"gqsgd: no merge has succeeded for {now - self._failing_since:.0f} s (the latest error: {problem}); "
                "look at the other members' logs, and at the lighthouse"
            ) from problem
        if now - self._failing_since > _SAY_AFTER_S and not self._has_said_why:
            self._has_said_why = True
            logger.warning(
                "gqsgd: no merge has succeeded for %.0f s (%s); this member tries again",
                now - self._failing_since,
                problem or "another member's merge failed",
            )
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, _PAUSE_S)
        return None

    def _take(self, found: Merge, contribution: Contribution | None) -> None:
        """Publish a merge.

        Raises:
            CollectiveError: if it is the last one, and a member that cannot be left behind has not finished.
        """
        with self._changed:
            self.latest = found
            self._rounds.begin(found.gathered_at, found.rows)
            if contribution is not None:
                self._contribution = None
                self._settled_by = found
            is_waited_for = any(Flag.HAS_FINISHED in row.flags for row in found.rows) and not found.is_last
            self._others_wait_since = (self._others_wait_since or found.gathered_at) if is_waited_for else None
            if found.left_behind:
                self._members.leave_behind(found.left_behind)
            if found.is_last and self._contribution is None:
                self._rests = True
            self._changed.notify_all()
