"""The interface between a merge of local steps and the members that take part in it.

A merge issues no collective itself. It yields the requests below, and is resumed with the answer to each. So the same
merge runs over a process group of fixed ranks, over torchft's members, and over virtual members of one process.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.wire.telemetry import Telemetry

logger = logging.getLogger(__name__)


class MergeFailed(RuntimeError):
    """A member has left, or does not answer, so this merge has failed. Another merge can follow."""


class Quorum(NamedTuple):
    """The members that take part in one merge.

    Attributes:
        own: this member's number among the members that take part.
        state: the state of a member that has made more merges than this one; None if no member has made more.
    """

    own: int
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Meet:
    """A request for the members of the next merge. The answer is a `Quorum`."""


@dataclass(frozen=True)
class RowsOfAll:
    """A request for the rows of all members. The answer is [members, numel].

    Attributes:
        row: this member's row, int64, [numel].
    """

    row: Tensor


@dataclass(frozen=True)
class SumOfAll:
    """A request for the sum of a flat tensor over all members, by the configuration's codec and reducer. The answer is
    [numel].

    Attributes:
        x: this member's values, which become the sum.
        segments: the parameters in it, in order.
        number: number of this sum in the training, so that each sum has its own dither.
    """

    x: Tensor
    segments: tuple[Segment, ...]
    number: int


@dataclass(frozen=True)
class Commit:
    """A request to decide whether the merge is valid on this member. The answer is True or False.

    Attributes:
        problem: what does not fit if it is not valid because the members do not fit together; empty otherwise.
    """

    problem: str = ""


@dataclass(frozen=True)
class Rejoin:
    """A request to load the others' state at the next `Meet`, as if this member had made no merge. The answer is
    None.

    Attributes:
        problem: what does not fit, for errors.
    """

    problem: str = ""


Request = Meet | RowsOfAll | SumOfAll | Commit | Rejoin

Result = TypeVar("Result")


class Members(ABC):
    """Answers the requests of merges. At most one merge is under way at a time.

    Attributes:
        waits_for_all: whether all members are known, so that a member that has finished may wait for the others in a
            merge. If members join and leave, the others would start a merge without the members that are still in their
            round.
        patience_s: seconds without a step after which members that have finished wait no longer for another member.
        telemetry: counters of this process.
    """

    waits_for_all: bool
    patience_s: float
    telemetry: Telemetry

    def run(self, merge: Generator[Request, Any, Result]) -> Result:
        """Answer all requests of a merge, and return its result.

        Raises:
            MergeFailed: if a member has left. The next merge may succeed.
            ConfigError: if members do not fit together.
            CollectiveError: if no further merge is possible.
        """
        request = next(merge)
        while True:
            try:
                answer = self.answer(request)
            except BaseException:
                merge.close()
                raise
            try:
                request = merge.send(answer)
            except StopIteration as end:
                result: Result = end.value
                return result

    @abstractmethod
    def answer(self, request: Request) -> Any:
        """Answer one request. Waits for the other members."""

    def present_state(self) -> Mapping[str, Any] | None:
        """Returns the state that another member had when this one joined. This member may start from it between two
        merges.

        It is None if all members start together, or if no other member has merged. Not a collective.
        """
        return None

    def start_after(self, merges: int) -> None:  # noqa: B027  # fixed ranks need not be told
        """Continue after ``merges`` merges, the count of another member or of a checkpoint. No merge may be under
        way."""

    def say_if_begun_anew(self, merges: int) -> None:  # noqa: B027  # fixed ranks begin together
        """Warn, after a merge, if this member was to take part in a longer training, of which no other member is left.

        Args:
            merges: number of merges so far.
        """

    def have_all_finished(self, merges: int) -> bool:
        """Tell the other members of the latest merge that this one has finished, and return whether all of them have,
        as far as this one can know. Not a collective.

        Args:
            merges: number of merges so far.
        """
        return False

    def leave_behind(self, idle: Mapping[int, str]) -> None:
        """End the training without members that make no steps, after all others have finished. All members, also
        those, call this after the same merge.

        Args:
            idle: the names of these members, by their numbers.

        Raises:
            CollectiveError: if members cannot leave.
        """
        logger.warning(
            "gqsgd: %s made no step for %.0f s, and all other members have finished: the training ends without %s",
            " and ".join(idle.values()),
            self.patience_s,
            "it" if len(idle) == 1 else "them",
        )

    @abstractmethod
    def close(self) -> None:
        """Leave. Not a collective."""
