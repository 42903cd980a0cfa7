"""Members of an elastic training in one process, under a virtual clock: unequal, killed, and back after a while.

Each member has a model, an inner optimizer and a `SharedState` of its own, and makes the product's merges
(`merges.merge`), whose requests are answered here. A time of 1 is a step of a fast member. Members train on while a
merge is under way, as they do with ``delay=1``. A member that comes back takes what another one knows, trains from
there, and sends its change from its second merge on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.local_steps.choosing import make_local
from lightning_gqsgd.local_steps.fragments import fragments_of
from lightning_gqsgd.local_steps.merges.contribution import Contribution
from lightning_gqsgd.local_steps.merges.merge import Member, Merge, Requests, merge
from lightning_gqsgd.local_steps.merges.rows import Flag
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import make_outer
from lightning_gqsgd.local_steps.starting import numbered
from lightning_gqsgd.membership.members import Meet, Quorum, Request, RowsOfAll, SumOfAll
from lightning_gqsgd.research.simulation.virtual import VirtualRanks

#: No buffers that are not averaged.
_NO_INTEGERS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Clock:
    """Times of a world, in steps of a fast member.

    Attributes:
        steps: of a step of each member.
        every: of a round.
        merge: from the end of a round until its merge is used.
        kill_every: between two kills; 0: nobody is killed.
        down: until a killed member is back.
    """

    steps: tuple[float, ...] = (1.0, 1.0, 1.0, 4.0)
    every: float = 32.0
    merge: float = 2.0
    kill_every: float = 320.0
    down: float = 80.0


#: Makes one step with a model, an optimizer and a generator of batches: how far training is, in samples of all members.
Step = Callable[[nn.Module, Optimizer, torch.Generator, int], None]


@dataclass(frozen=True)
class Training:
    """What members train.

    Attributes:
        model: makes the model at its start.
        optimizer: makes the inner optimizer of a model.
        step: see `Step`.
        batch: samples of a step.
        samples: of all members together, after which training ends.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    step: Step
    batch: int
    samples: int


class VirtualMember:
    """One member, from when it comes until it is killed.

    Args:
        host: number of its machine.
        identity: a number that no other member has.
        training: see `Training`.
        options: see `LocalOptions`.
        config: the compression.
        seed: of its batches.

    Attributes:
        shared: what it has in common with the others.
        is_alive: whether it was not killed.
        waits: whether it has joined, and has not merged yet.
    """

    def __init__(
        self, host: int, identity: int, training: Training, options: LocalOptions, config: GQSGDConfig, seed: int
    ) -> None:
        self.host = host
        self.member = Member(identity, f"host{host}:{identity}")
        self.model = training.model()
        self.is_alive = True
        self.waits = False
        self._training = training
        self._optimizer = training.optimizer(self.model)
        self._batches = torch.Generator().manual_seed(seed)
        _, parameters, buffers = numbered(self.model, dict(self.model.named_parameters()), config)
        (self._fragment,) = fragments_of(parameters, buffers, options)
        outer = make_outer(options.outer, [anchor for _, anchor in self._fragment.entries()])
        self.shared = SharedState(self._fragment, outer, options, _NO_INTEGERS)
        self._starts: list[torch.Tensor]
        self._pending: Contribution | None = None
        self._contributions = 0
        self._steps = 0
        self._take_anchors()

    def start_from(self, state: Mapping[str, Any]) -> None:
        """Take what another member knows."""
        self.shared.load_state_dict(state)
        self._take_anchors()
        self.waits = True

    def step(self, members: int) -> None:
        """Make a step; ``members``: those who are thought to make as many."""
        seen = self.shared.samples + members * self._steps * self._training.batch
        self._training.step(self.model, self._optimizer, self._batches, seen)
        self._steps += 1

    def begin_merge(self, is_last: bool) -> Requests:
        """Hand over what was learnt, and return the requests of a merge."""
        if not self.waits and self._steps:
            self._contributions += 1
            positions = [bundle.flat_tensors() for bundle in self._fragment.bundles]
            samples = self._steps * self._training.batch
            self._pending = Contribution(
                self._contributions, self._starts, positions, samples, self._steps, _NO_INTEGERS
            )
            self._steps = 0
        flags = Flag.HAS_FINISHED if is_last else Flag(0)
        return merge(self.shared, self.member, self._pending, flags=flags)

    @torch.no_grad()
    def end_merge(self, found: Merge) -> None:
        """Go on from the anchors with what was learnt since, as `MergedAverages` does."""
        references = self._starts if self._pending is None else self._pending.positions
        self._pending = None
        self.waits = False
        if found.is_left_out:
            self._take_anchors()
            return
        self._starts = [bundle.flat_starts() for bundle in self._fragment.bundles]
        for bundle, start, reference in zip(self._fragment.bundles, self._starts, references, strict=True):
            bundle.put(start + (bundle.flat_tensors() - reference))

    @torch.no_grad()
    def take_anchors(self) -> None:
        """Put the anchors into the model."""
        self._fragment.set_tensors()

    def _take_anchors(self) -> None:
        self.take_anchors()
        self._starts = [bundle.flat_starts() for bundle in self._fragment.bundles]
        self._steps = 0


class VirtualMembers:
    """All members, and what happens to them.

    Args:
        training: see `Training`.
        clock: see `Clock`.
        seed: of batches, and of who is killed when.
        **fields: fields of `LocalOptions` and `GQSGDConfig`, beside those of the preset ``gqsgd_diloco``.

    Attributes:
        merges: number of merges that were made.
        kills: number of members that were killed.
    """

    def __init__(self, training: Training, clock: Clock, seed: int, **fields: Any) -> None:
        self._training, self._clock, self._seed = training, clock, seed
        # The time of a round is the clock's, whatever is said here.
        given = {"every": "1s", "delay": 1, "elastic": True, **fields}
        self._options, config = make_local("gqsgd_diloco", given, {})
        self._config = config
        self._random = random.Random(seed)  # noqa: S311  # a schedule of kills
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._identities = count(1)
        self._now = 0.0
        self._is_over = False
        self._codecs: dict[int, VirtualRanks] = {}
        self.merges = self.kills = 0
        self._members = [self._new(host) for host in range(len(clock.steps))]

    def run(self) -> nn.Module:
        """Train until the samples are seen, and return the model that all members have then."""
        for member in self._members:
            self._after(self._clock.steps[member.host], partial(self._step, member))
        self._after(self._clock.every, self._merge)
        if self._clock.kill_every:
            self._after(self._random.uniform(0.5, 1.5) * self._clock.kill_every, self._kill)
        while not self._is_over:
            self._now, _, event = heapq.heappop(self._events)
            event()
        last = self._alive()[0]
        last.take_anchors()
        return last.model

    @property
    def samples(self) -> int:
        """Samples that have entered the model."""
        return max(member.shared.samples for member in self._alive())

    def _alive(self) -> list[VirtualMember]:
        return [member for member in self._members if member.is_alive]

    def _new(self, host: int) -> VirtualMember:
        identity = next(self._identities)
        seed = 1000 * self._seed + identity
        return VirtualMember(host, identity, self._training, self._options, self._config, seed)

    def _after(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + time, next(self._order), event))

    def _step(self, member: VirtualMember) -> None:
        if member.is_alive:
            member.step(len(self._members))
            self._after(self._clock.steps[member.host], partial(self._step, member))

    def _kill(self) -> None:
        host = self._random.randrange(len(self._members))
        if len(self._alive()) > 1 and self._members[host].is_alive:
            self._members[host].is_alive = False
            self.kills += 1
            self._after(self._clock.down, partial(self._join, host))
        self._after(self._random.uniform(0.5, 1.5) * self._clock.kill_every, self._kill)

    def _join(self, host: int) -> None:
        member = self._new(host)
        member.start_from(self._alive()[0].shared.state_dict())
        self._members[host] = member
        self._after(self._clock.steps[host], partial(self._step, member))

    def _merge(self, is_last: bool = False) -> None:
        members = self._alive()
        before = self.samples
        requests = [member.begin_merge(is_last) for member in members]
        found = answer(requests, [member.shared for member in members], self._sum)
        self.merges += 1
        if is_last:
            self._is_over = True
            return
        for member, one in zip(members, found, strict=True):
            self._after(self._clock.merge, partial(self._use, member, one))
        # The last round is as long as it takes until the samples are seen.
        left, brought = self._training.samples - self.samples, max(1, self.samples - before)
        ends = left <= 1.5 * brought
        time = self._clock.every * left / brought if ends else self._clock.every
        self._after(max(time, self._clock.merge + 1), partial(self._merge, ends))

    def _use(self, member: VirtualMember, found: Merge) -> None:
        if member.is_alive:
            member.end_merge(found)

    def _sum(self, requests: Sequence[SumOfAll]) -> Tensor:
        """Returns the sum of what members send, through the codec and reducer of so many ranks."""
        ranks = len(requests)
        if ranks not in self._codecs:
            self._codecs[ranks] = VirtualRanks(ranks, requests[0].segments, torch.float32, self._config)
        rows = [request.x for request in requests]
        return self._codecs[ranks].mean(rows, requests[0].number) * ranks if ranks > 1 else rows[0]


def answer(
    merges: Sequence[Requests], shared: Sequence[SharedState], add: Callable[[Sequence[SumOfAll]], Tensor]
) -> list[Merge]:
    """Answer the requests of a merge of several members, none of which fails, and return what became of it on each."""
    answers: list[Any] = [None] * len(merges)
    while True:
        asked: list[Request] = []
        ended: list[Merge] = []
        for requests, one in zip(merges, answers, strict=True):
            try:
                asked.append(requests.send(one))
            except StopIteration as end:
                ended.append(end.value)
        if ended:
            return ended
        answers = _answers(asked, shared, add)


def _answers(
    asked: Sequence[Request], shared: Sequence[SharedState], add: Callable[[Sequence[SumOfAll]], Tensor]
) -> list[Any]:
    first = asked[0]
    if isinstance(first, Meet):
        newest = max(shared, key=lambda one: one.merges)
        return [
            Quorum(own, newest.state_dict() if one.merges < newest.merges else None) for own, one in enumerate(shared)
        ]
    if isinstance(first, RowsOfAll):
        return [torch.stack([request.row for request in asked if isinstance(request, RowsOfAll)])] * len(asked)
    if isinstance(first, SumOfAll):
        total = add([request for request in asked if isinstance(request, SumOfAll)])
        return [total.clone() for _ in asked]
    return [True] * len(asked)  # a Commit
