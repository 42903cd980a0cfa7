"""Encodes, sends and decodes pieces on the virtual clock, in the order of `wire.pipeline`.

`ThreadRunner` stands for `pipeline.Sequencer` (Gloo) and `StreamsRunner` for `pipeline.StreamRunner` (NCCL). Each uses
the same function as its counterpart for the order of pieces, `pipeline.ready` and `pipeline.by_stages`. This module
only adds time: when a thread, a stream and a link are busy, and when pieces wait for them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle

from lightning_gqsgd.kernels.meta import Work
from lightning_gqsgd.predict.clock import Clock, Resource, Then
from lightning_gqsgd.predict.costs import Costs
from lightning_gqsgd.predict.profile import Message, Profile, Stage
from lightning_gqsgd.predict.tcp import ways
from lightning_gqsgd.wire.pipeline import STREAMS, by_stages, ready

#: Number of collectives of one process group that Gloo runs at once: PyTorch's threads per group (`ProcessGroupGloo`).
GROUP_THREADS = 2


class _Group:
    """A process group, which runs `GROUP_THREADS` collectives at once, and the others afterwards in order."""

    def __init__(self) -> None:
        self._idle = GROUP_THREADS
        self._waiting: deque[Callable[[], None]] = deque()

    def enter(self, start: Callable[[], None]) -> None:
        """Start a collective as soon as a thread is idle."""
        if not self._idle:
            self._waiting.append(start)
            return
        self._idle -= 1
        start()

    def leave(self) -> None:
        """Give the thread of a collective that has ended to the next one."""
        if self._waiting:
            self._waiting.popleft()()
            return
        self._idle += 1


class Network:
    """The links of one rank, one to other nodes and one inside its node, and its process groups.

    Args:
        clock: the clock.
        costs: the costs of collectives.
        has_backward: whether the step has a backward pass during which collectives run.
    """

    def __init__(self, clock: Clock, costs: Costs, *, has_backward: bool) -> None:
        self._clock = clock
        self._costs = costs
        self._has_backward = has_backward
        self._links = {"node": Resource(clock, "node"), "link": Resource(clock, "link")}
        self._groups: defaultdict[tuple[int, str], _Group] = defaultdict(_Group)

    def start(self, message: Message, stage: int, bucket: int, piece: int, then: Then, count: int = 1) -> None:
        """Run a collective in the process group of a stage, as soon as the group has a thread for it; or ``count``
        collectives one after the other, of which ``message`` is the sum.

        First comes its start-up time, during which other collectives may be under way. Then the link carries only its
        bytes. If the collective cannot send and receive at the same time, its result is complete later, while link and
        group are already free again.

        Over a link with a latency, a rank first sends a notice that it is ready to receive, after the bytes that it is
        sending. So the bytes of the next collective are not under way during the latency of this one (`tcp.ways`).
        """
        group = self._groups[stage, message.scope.kind]
        cost = self._costs.collective(message.scope.kind, message.kind)
        link = self._links["node" if message.scope.kind == "node" else "link"]
        latency_s = 0.0 if message.scope.kind == "node" else self._costs.latency_s
        each_bytes = message.sent_bytes // count
        before_s = latency_s * (count * ways(message.kind, message.members, each_bytes) - 1) if latency_s else 0.0

        def begin() -> None:
            self._clock.start(count * cost.alpha_s, self._demand(cost.cpu_s, cost.alpha_s), say_ready)

        def say_ready() -> None:
            if latency_s:
                link.add(0.0, 0.0, "ready", bucket, piece, partial(self._clock.start, before_s, 0.0, carry))
            else:
                carry()

        def carry() -> None:
            seconds = self._costs.wire_seconds(
                message.scope.kind, message.kind, message.sent_bytes, is_beside_backward=self._has_backward
            )
            link.add(seconds, self._demand(cost.cpu_beta_s, cost.beta_s), message.kind, bucket, piece, arrive)

        def arrive() -> None:
            self._clock.start(latency_s, 0.0, group.leave)
            self._clock.start(latency_s + cost.alone_s * each_bytes, 0.0, then)

        group.enter(begin)

    def _demand(self, cpu_s: float, seconds: float) -> float:
        """Returns the number of processors that a collective keeps busy for ``seconds``.

        It is at most the number of a rank's processors. If ranks share processors, the measured duration of a
        collective already includes the wait for them, and its processor-seconds are those of several ranks in turns.
        """
        return min(self._costs.cores, cpu_s / seconds) if seconds else 0.0


@dataclass(eq=False)
class _Piece:
    """A piece that is under way, with the attributes of `pipeline.Underway`, and what is called at its end."""

    profile: Profile
    bucket: int
    number: int
    then: Then
    waiting_for: int = 0
    is_through: bool = False
    blocks: bool = False

    def __post_init__(self) -> None:
        self.is_agreement = self.profile.is_agreement
        self.stage = 0 if self.is_agreement else 1
        self._stages = iter(self.profile.stages)

    def take(self) -> Stage:
        """Returns the next work of the piece, and the collectives that follow it. The last work has none."""
        stage = next(self._stages, None)
        self.is_through = stage is None
        return stage or Stage(self.profile.last, ())


def _pieces(profiles: Sequence[Profile], bucket: int, then: Then | None) -> list[_Piece]:
    """Returns the pieces of a bucket, the last of which calls ``then`` at its end, whichever that is."""
    left = len(profiles)

    def ended() -> None:
        nonlocal left
        left -= 1
        if not left and then is not None:
            then()

    return [_Piece(profile, bucket, number, ended) for number, profile in enumerate(profiles)]


def _label(works: Sequence[Work]) -> str:
    """Returns the label of a run of work, by its kernels."""
    kinds = dict.fromkeys(work.kind for work in works if work.kind != "torch")
    return " + ".join(kinds) or "copy"


class ThreadRunner:
    """One thread that encodes, decodes and starts collectives, like `pipeline.Sequencer`."""

    def __init__(self, clock: Clock, costs: Costs, network: Network) -> None:
        self._costs = costs
        self._network = network
        self._codec = Resource(clock, "codec")
        self._lane: deque[_Piece] = deque()
        self._is_busy = False

    def submit(self, profiles: Sequence[Profile], bucket: int, then: Then | None = None) -> None:
        """Start to reduce a bucket, and call ``then`` at the end of its last piece."""
        self._lane.extend(_pieces(profiles, bucket, then))
        self._advance()

    def _advance(self) -> None:
        piece = None if self._is_busy else next(ready(self._lane), None)
        if piece is None:
            return
        self._is_busy = True
        works, messages = piece.take()
        own_s = piece.profile.count * self._costs.stage_s
        seconds = (own_s + sum(map(self._costs.seconds, works))) / self._costs.speed
        resumed = partial(self._resumed, piece, messages)
        self._codec.add(seconds, self._costs.speed, _label(works), piece.bucket, piece.number, resumed)

    def _resumed(self, piece: _Piece, messages: Sequence[Message]) -> None:
        self._is_busy = False
        if piece.is_through:
            self._lane.remove(piece)
        stage = piece.stage
        piece.stage += 1
        piece.waiting_for = len(messages)
        for message in messages:
            arrived = partial(self._arrived, piece)
            self._network.start(message, stage, piece.bucket, piece.number, arrived, piece.profile.count)
        if piece.is_through:
            piece.then()
        self._advance()

    def _arrived(self, piece: _Piece) -> None:
        piece.waiting_for -= 1
        if not piece.waiting_for:
            self._advance()


@dataclass(eq=False)
class _Collective:
    message: Message
    piece: _Piece
    has_input: bool = False
    is_over: bool = False


@dataclass
class _Operation:
    """Work on a stream, the collectives for which it waits, the collectives whose input it computes, and whether it is
    the last of its piece."""

    piece: _Piece
    works: Sequence[Work]
    after: Sequence[_Collective]
    makes: Sequence[_Collective]
    is_last: bool


@dataclass
class _Stream:
    resource: Resource
    operations: deque[_Operation] = field(default_factory=deque)
    is_busy: bool = False


class StreamsRunner:
    """Streams of a GPU that jobs use in turns, with one order of collectives, like `pipeline.StreamRunner`."""

    def __init__(self, clock: Clock, costs: Costs, network: Network, streams: int) -> None:
        self._costs = costs
        self._network = network
        self._streams = [_Stream(Resource(clock, f"stream {number}")) for number in range(streams)]
        self._turns = cycle(self._streams)
        self._collectives: deque[_Collective] = deque()
        self._sends = False

    def submit(self, profiles: Sequence[Profile], bucket: int, then: Then | None = None) -> None:
        """Issue all work of a bucket at once, in the order of `pipeline.StreamRunner.submit`; ``then`` is called at
        the end of its last piece."""
        stream = next(self._turns)
        latest: dict[_Piece, list[_Collective]] = {}
        for piece in by_stages(_pieces(profiles, bucket, then)):
            works, messages = piece.take()
            made = [_Collective(message, piece) for message in messages]
            stream.operations.append(_Operation(piece, works, latest.get(piece, []), made, piece.is_through))
            latest[piece] = made
            self._collectives.extend(made)
        self._advance()

    def _advance(self) -> None:
        for stream in self._streams:
            operations = stream.operations
            if not stream.is_busy and operations and all(other.is_over for other in operations[0].after):
                stream.is_busy = True
                operation = operations.popleft()
                seconds = sum(map(self._costs.seconds, operation.works))
                over = partial(self._computed, stream, operation)
                piece = operation.piece
                stream.resource.add(seconds, 1.0, _label(operation.works), piece.bucket, piece.number, over)
        if self._collectives and not self._sends and self._collectives[0].has_input:
            self._sends = True
            message, piece = self._collectives[0].message, self._collectives[0].piece
            self._network.start(message, 0, piece.bucket, piece.number, self._sent, piece.profile.count)

    def _computed(self, stream: _Stream, operation: _Operation) -> None:
        stream.is_busy = False
        for collective in operation.makes:
            collective.has_input = True
        if operation.is_last:
            operation.piece.then()
        self._advance()

    def _sent(self) -> None:
        self._sends = False
        self._collectives.popleft().is_over = True
        self._advance()


def runner_for(clock: Clock, costs: Costs, network: Network, streams: int = STREAMS) -> ThreadRunner | StreamsRunner:
    """Returns the runner of a communicator; on a GPU, it has so many streams."""
    return StreamsRunner(clock, costs, network, streams) if costs.on_streams else ThreadRunner(clock, costs, network)
