"""The interface between a merge of local steps and the members that take part in it.

A merge issues no collective itself. It yields the requests below, and is resumed with the answer to each. So the same
merge runs over a process group of fixed ranks, over torchft's members, and over virtual members of one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment


class MergeFailed(RuntimeError):
    """A member has gone, or does not answer, so that this merge came to nothing. Another one can follow."""


class Quorum(NamedTuple):
    """Those that take part in one merge.

    Attributes:
        own: this member's number among those that take part.
        state: what a member knows that has made more merges than this one; None if this one has made as many.
    """

    own: int
    state: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Meet:
    """A request: who takes part in the next merge. The answer is a `Quorum`.

    Attributes:
        number: how many merges this member has made.
    """

    number: int


@dataclass(frozen=True)
class Gather:
    """A request: the rows of all members, [members, numel].

    Attributes:
        row: this member's, int64, [numel].
    """

    row: Tensor


@dataclass(frozen=True)
class Sum:
    """A request: the sum of a flat tensor over all members, by the configuration's codec and reducer, [numel].

    Attributes:
        x: this member's values, which become the sum.
        segments: the parameters in it, in order.
        number: counts the sums of a training, so that each has a dither of its own.
    """

    x: Tensor
    segments: tuple[Segment, ...]
    number: int


@dataclass(frozen=True)
class Commit:
    """A request: whether the merge counts on this member. The answer is True or False.

    Attributes:
        is_good: False: it does not, because the members do not fit together.
    """

    is_good: bool = True


@dataclass(frozen=True)
class Rejoin:
    """A request: take the others' state at the next `Meet`, as if this member had made no merge. The answer is None."""


Request = Meet | Gather | Sum | Commit | Rejoin

Result = TypeVar("Result")


class Members(ABC):
    """Answers the requests of merges, of which one is under way at a time.

    Attributes:
        waits_for_all: whether all members are known, so that a member that has finished may wait for the others in a
            merge. Where members come and go, they would begin without those that are still in their round.
    """

    waits_for_all: bool

    def run(self, merge: Generator[Request, Any, Result]) -> Result:
        """Answer all requests of a merge, and return its result.

        Raises:
            MergeFailed: a member has gone; the next merge may succeed.
            ConfigError: members do not fit together.
            CollectiveError: nothing can be merged any more.
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
        """Returns what a member knew when this one came, from which it may start between two merges.

        None: all begin together, or nobody is there who has merged. Not a collective.
        """
        return None

    def start_after(self, merges: int) -> None:  # noqa: B027  # fixed ranks need not know
        """Go on after a number of merges, which another member or a checkpoint says. No merge is under way."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Not a collective."""
