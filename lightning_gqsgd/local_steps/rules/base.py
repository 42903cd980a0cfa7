"""The interface of a rule. A rule describes the requests that a rank makes until it has the mean change.

A rule issues no collective itself. The `Averager` of a rank yields its requests and is resumed with the answers, so the
same objects run over process groups (`PendingMean`) and over virtual workers of one process
(`research.simulation.local`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.reducers import Steps
from lightning_gqsgd.wire.pipeline import Job
from lightning_gqsgd.wire.telemetry import BucketCounters

if TYPE_CHECKING:
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.local_steps.fragments import Bundle


@dataclass(frozen=True)
class MeanOf:
    """A request for the mean of a flat tensor over ranks, by the configuration's codec, memory and reducer.

    Attributes:
        x: this rank's values, [numel], which become the mean.
        segments: the parameters in it, in order.
    """

    x: Tensor
    segments: tuple[Segment, ...]


@dataclass
class Exchanges:
    """A request to run exchanges that the rule defines.

    Attributes:
        x: the tensor that the exchanges replace. It is equal on all ranks afterwards.
        start: function that starts the exchanges, as steps of a reducer (see `reducers.base.Steps`).
        sent_bytes: bytes that this rank has sent, valid after the exchanges.
        message_bytes: bytes of this rank's message, valid after the exchanges.
    """

    x: Tensor
    start: Callable[[], Steps]
    sent_bytes: int = 0
    message_bytes: int = 0

    def counted(self, counters: BucketCounters) -> Steps:
        """Run the exchanges, and add their bytes to counters afterwards."""
        bad = yield from self.start()
        counters.calls += 1
        counters.numel += self.x.numel()
        counters.add_sent(self.sent_bytes, self.message_bytes)
        return bad


RuleRequest = MeanOf | Exchanges

#: Yields requests, is resumed with the tensor of each, and returns the mean change, [numel], which has the same bits
#: on all ranks.
RuleRequests = Generator[RuleRequest, Tensor, Tensor]


class Averager:
    """Makes the requests of one rank to average one bundle, and keeps its memory between averages.

    This one has no memory, and asks for the mean in one message.

    Args:
        bundle: the tensors that are averaged, with their anchors.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def requests(self, change: Tensor) -> RuleRequests:
        """Ask for the mean of all ranks' changes.

        The memory changes only if the mean is finite; otherwise, all ranks skip the average.

        Args:
            change: the change of this rank, [numel]; it may be overwritten.
        """
        return (yield MeanOf(change, self._bundle.segments))

    def state(self) -> dict[str, Tensor]:
        """Returns the memory by name: the tensors themselves, not copies."""
        return {}

    def take(self, state: Mapping[str, Tensor]) -> None:
        """Load a memory from `state`. Missing names are set to their values at the start, which are zero here."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name]) if name in state else tensor.zero_()


@dataclass(frozen=True)
class Rule:
    """Base class of rules, which compute one mean change of a bundle from the ranks' changes.

    Attributes:
        remembers: whether a rank has a memory between averages.
    """

    remembers: ClassVar[bool] = False

    @property
    def most_requests(self) -> int:
        """The largest number of requests of one average. Steps wait for all requests after the first."""
        return 1

    def check(self, config: GQSGDConfig) -> None:
        """Raise ConfigError for a compression, with the chosen reducer, that the rule does not support."""

    def averager(self, bundle: Bundle, ranks: int) -> Averager:
        """Returns the averager of a rank.

        Args:
            bundle: the tensors that are averaged, with their anchors.
            ranks: number of ranks.
        """
        return Averager(bundle)


@dataclass(frozen=True)
class Mean(Rule):
    """The default rule `mean`: the mean of all changes, in one message of each rank."""


class PendingMean:
    """A mean change that is under way. Starts an averager's requests one after the other, and passes it the answers.

    Args:
        requests: the requests of the averager.
        put: function that starts to answer a request; the second argument is the request's number, from 0.
    """

    def __init__(self, requests: RuleRequests, put: Callable[[RuleRequest, int], Job]) -> None:
        self._requests = requests
        self._put = put
        self._count = 0
        self._job: Job | None = None
        self._mean: Tensor | None = None
        self._go_on(None)

    def wait(self) -> Tensor:
        """Wait for the mean change and return it, [numel].

        Raises:
            ConfigError: if the ranks do not agree.
            CollectiveError: if a collective failed.
        """
        while self._job is not None:
            self._go_on(self._job.wait())
        assert self._mean is not None
        return self._mean

    def _go_on(self, answer: Tensor | None) -> None:
        try:
            request = next(self._requests) if answer is None else self._requests.send(answer)
        except StopIteration as end:
            self._job = None
            self._mean = end.value
            return
        self._job = self._put(request, self._count)
        self._count += 1
