"""Members of one process, on a virtual network with virtual clocks: what can happen between machines, by a seed.

Each member makes the merges of `merges.merge.merge`, as a process does. What answers its requests is the world below: a
lighthouse that lets a merge begin once all that are alive have come, or a patience is over; sums that fail on some
members while others have them; deaths at any request; members that are cut off, come late or come back.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.local_steps.fragments import fragments_of
from lightning_gqsgd.local_steps.merges.contribution import Contribution
from lightning_gqsgd.local_steps.merges.merge import Member, Merge, Requests, merge
from lightning_gqsgd.local_steps.merges.rows import Row, Shares
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.local_steps.options import LocalOptions
from lightning_gqsgd.local_steps.outer import make_outer
from lightning_gqsgd.local_steps.starting import numbered
from lightning_gqsgd.membership.members import Commit, Meet, Quorum, Rejoin, Request, RowsOfAll, SumOfAll

OPTIONS = LocalOptions(every="1s", outer="sgd", elastic=True)


@dataclass(frozen=True)
class Schedule:
    """What happens in a world.

    Attributes:
        seed: of all that is drawn.
        members: number of members at the start.
        until_s: virtual seconds.
        deaths: share of requests at which a member dies.
        losses: share of requests whose answer is lost, so that the member's merge fails.
        poison: share of contributions that are NaN or huge.
        stalls: share of requests that take seconds.
        joins: number of members that come later.
        speeds: seconds of a step are drawn between these.
    """

    seed: int
    members: int = 3
    until_s: float = 30.0
    deaths: float = 0.0
    losses: float = 0.0
    poison: float = 0.0
    stalls: float = 0.0
    joins: int = 0
    speeds: tuple[float, float] = (0.05, 0.6)


@dataclass
class Log:
    """What has happened: for the invariants.

    Attributes:
        merges: the checksums that members had after each exchange, by the exchange's number.
        failed: number of merges that came to nothing on a member.
        settled: number of contributions that were settled.
        left_out: number of those that were left out.
        cut_off: how often a member took the others' state because its anchors were others than theirs.
        lost: contributions that were called settled, and are not in the anchors.
    """

    merges: dict[int, set[int]] = field(default_factory=dict)
    failed: int = 0
    settled: int = 0
    left_out: int = 0
    cut_off: int = 0
    lost: list[str] = field(default_factory=list)


class Recording(SharedState):
    """What members have in common, with a record of the contributions that have moved the anchors."""

    used: tuple[tuple[int, int], ...] = ()

    def apply(self, means: Any, rows: Sequence[Row], shares: Shares, integers: Any) -> bool:
        """See `SharedState.apply`."""
        is_used = super().apply(means, rows, shares, integers)
        if is_used:
            pairs = zip(rows, shares.of_members, strict=True)
            self.used += tuple((row.identity, row.contribution) for row, share in pairs if share)
        return is_used

    def state_dict(self) -> dict[str, Any]:
        """See `SharedState.state_dict`."""
        return {**super().state_dict(), "used": self.used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `SharedState.load_state_dict`."""
        super().load_state_dict(state)
        self.used = state["used"]


class VirtualMember:
    """A member: parameters of its own, and steps that change them.

    Args:
        number: counts members.
        world: where it lives.
        step_s: seconds of a step.
    """

    def __init__(self, number: int, world: VirtualWorld, step_s: float) -> None:
        self.number = number
        self.name = f"m{number}"
        self.world = world
        self.step_s = step_s
        self.is_alive = True
        self.model = nn.Linear(1, world.width, bias=False)
        nn.init.zeros_(self.model.weight)
        _, parameters, buffers = numbered(self.model, dict(self.model.named_parameters()), GQSGDConfig(min_numel=0))
        (fragment,) = fragments_of(parameters, buffers, OPTIONS)
        outer = make_outer("sgd", [anchor for _, anchor in fragment.entries()])
        self.shared = Recording(fragment, outer, OPTIONS, torch.empty(0, dtype=torch.int64))
        self.member = Member(number + 1, self.name)
        self.contributions = 0
        self.pending: Contribution | None = None
        self.steps = 0
        self.requests: Requests | None = None
        self.start()

    @torch.no_grad()
    def start(self) -> None:
        """Start from the anchors."""
        self.shared.fragment.set_tensors()
        self.starts = [bundle.flat_starts() for bundle in self.shared.fragment.bundles]
        self.steps = 0

    def learn(self, seconds: float) -> None:
        """Make as many steps as fit into a time."""
        count = max(1, int(seconds / self.step_s))
        self.steps += count
        with torch.no_grad():
            self.model.weight[self.number] += count

    def begin_merge(self, poison: bool) -> None:
        """Hand over, and begin a merge."""
        if self.pending is None and self.steps:
            self.contributions += 1
            positions = [bundle.flat_tensors() for bundle in self.shared.fragment.bundles]
            if poison:
                positions[0][0] = float("nan") if self.contributions % 2 else 1e9
                self.world.poisoned.add((self.member.identity, self.contributions))
            self.pending = Contribution(
                self.contributions, self.starts, positions, self.steps, self.steps, torch.empty(0, dtype=torch.int64)
            )
            self.steps = 0
        self.requests = merge(self.shared, self.member, self.pending, step_s=self.step_s)

    def end_merge(self, found: Merge) -> None:
        """Go on from the anchors, as `MergedAverages` does."""
        log = self.world.log
        log.merges.setdefault(self.world.exchange_of(self), set()).add(self.shared.checksum())
        if self.pending is not None:
            log.settled += 1
            log.left_out += found.is_left_out
            entry = (self.member.identity, self.pending.number)
            if not found.is_left_out and entry not in self.shared.used and not self.world.was_poisoned(entry):
                log.lost.append(f"{self.name} {entry}")
        self.start()
        self.pending = None
        self.requests = None


class VirtualWorld:
    """Members, a lighthouse and a network, with one clock.

    Args:
        schedule: what happens.

    Attributes:
        now: virtual seconds.
        log: see `Log`.
        members: all that ever were.
    """

    #: Seconds without an answer after which a member counts as dead.
    PATIENCE_S = 1.0

    #: Seconds without faults at the end.
    CLEAN_S = 7.0

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.random = random.Random(schedule.seed)  # noqa: S311  # a schedule of faults
        self.now = 0.0
        self.log = Log()
        self.width = schedule.members + schedule.joins + 64
        self.members: list[VirtualMember] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.poisoned: set[tuple[int, int]] = set()
        self._is_clean = False
        self._count = 0
        self._asking: dict[str, VirtualMember] = {}
        self._asked_since: float | None = None
        self._exchange: dict[str, Any] = {}
        self._quorum: list[VirtualMember] = []
        self._in_quorum: dict[str, int] = {}

    def run(self) -> Log:
        """Let everything happen, and then a last merge of those that are alive without faults."""
        for _ in range(self.schedule.members):
            self._add()
        for _ in range(self.schedule.joins):
            self._at(self.random.uniform(0, self.schedule.until_s), self._add)
        self._pass(self.schedule.until_s)
        self._is_clean = True  # from here on nothing goes wrong, so that members find together again
        self._pass(self.schedule.until_s + self.CLEAN_S)
        return self.log

    def exchange_of(self, member: VirtualMember) -> int:
        """Number of the quorum that a member was in."""
        return self._in_quorum[member.name]

    def was_poisoned(self, entry: tuple[int, int]) -> bool:
        """Returns whether a member's contribution was made bad."""
        return entry in self.poisoned

    def _pass(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _happens(self, share: float) -> bool:
        return self.random.random() < share and not self._is_clean

    def alive(self) -> list[VirtualMember]:
        """Those that live."""
        return [member for member in self.members if member.is_alive]

    def _at(self, time: float, event: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time, self._count, event))

    def _add(self) -> None:
        if len(self.members) >= self.width:
            return
        member = VirtualMember(len(self.members), self, self.random.uniform(*self.schedule.speeds))
        there = [other for other in self.alive() if other.shared.merges]
        self.members.append(member)
        if there and self.random.random() < 0.5:
            self._start_between_merges(member, self.random.choice(there))
        else:
            self._merge(member)

    def _start_between_merges(self, member: VirtualMember, other: VirtualMember) -> None:
        """A member takes what another one knows, and comes to a merge when it has learnt something from there.

        Until then the others may have merged, or may have lost what it has taken.
        """
        member.shared.load_state_dict(other.shared.state_dict())
        member.start()
        self._round(member)

    def _round(self, member: VirtualMember) -> None:
        """A round of steps, and the merge after it."""
        if not member.is_alive:
            return
        seconds = self.random.uniform(0.8, 1.2)
        member.learn(seconds)
        self._at(self.now + seconds, lambda: self._merge(member))

    def _merge(self, member: VirtualMember) -> None:
        if not member.is_alive:
            return
        member.begin_merge(self._happens(self.schedule.poison))
        assert member.requests is not None
        self._ask(member, next(member.requests))

    def _ask(self, member: VirtualMember, request: Request) -> None:
        """A member asks; it may die of it."""
        if self._happens(self.schedule.deaths):
            self._die(member)
            return
        delay = self.random.expovariate(50)
        if self._happens(self.schedule.stalls):
            delay += self.random.uniform(0, 3 * self.PATIENCE_S)
        self._at(self.now + delay, lambda: self._arrive(member, request))

    def _die(self, member: VirtualMember) -> None:
        member.is_alive = False
        self._asking.pop(member.name, None)
        # A machine that comes back is a new member, with nothing but its program.
        if len(self.alive()) < 2 or self.random.random() < 0.7:
            self._at(self.now + self.random.uniform(0.5, 5), self._add)
        # Those that exchange with it find out, and so does the lighthouse.
        self._break_others(member, self.PATIENCE_S)
        self._at(self.now + self.PATIENCE_S, self._try_quorum)

    def _break_others(self, member: VirtualMember, within_s: float) -> None:
        """Let those that exchange with a member find out that it does not."""
        number = self._exchange.get("number")
        for other in self._quorum:
            if other is not member:
                self._at(self.now + self.random.uniform(0, within_s), partial(self._break, other, number))

    def _break(self, member: VirtualMember, number: int | None) -> None:
        """A member's exchange fails, if it waits for that one."""
        waiting = self._exchange.get("waiting", {})
        if member.is_alive and member.name in waiting and self._exchange.get("number") == number:
            del waiting[member.name]
            self._fail(member)

    def _time_out(self, member: VirtualMember, number: int | None, request: Request) -> None:
        """A member has waited too long, if it still waits for the same."""
        if self._exchange.get("number") == number and self._exchange["waiting"].get(member.name, (0, 0))[1] is request:
            self._break(member, number)

    def _fail(self, member: VirtualMember) -> None:
        """A member's merge comes to nothing; it tries again."""
        self.log.failed += 1
        if member.requests is not None:
            member.requests.close()
        self._break_others(member, 0.5)
        self._at(self.now + 0.2, lambda: self._merge(member))

    def _arrive(self, member: VirtualMember, request: Request) -> None:
        """A request reaches those that answer it."""
        if not member.is_alive:
            return
        if isinstance(request, Meet):
            self._asking[member.name] = member
            if self._asked_since is None:
                self._asked_since = self.now
                self._at(self.now + self.PATIENCE_S, self._try_quorum)
            self._try_quorum()
            return
        if isinstance(request, Rejoin):
            self.log.cut_off += 1
            self._answer(member, None)
            return
        if isinstance(request, Commit):
            # The vote is a member's own: it is lost with the member, or not at all.
            self._answer(member, not request.problem and not self._happens(self.schedule.losses))
            return
        waiting = self._exchange.setdefault("waiting", {})
        waiting[member.name] = (member, request)
        number = self._exchange.get("number")
        # A collective ends with an error after its timeout.
        self._at(self.now + self.PATIENCE_S, lambda: self._time_out(member, number, request))
        if self._in_quorum.get(member.name) != self._exchange.get("number"):
            del waiting[member.name]
            self._fail(member)
            return
        if {m.name for m in self._quorum} <= set(waiting):
            self._complete(waiting)

    def _try_quorum(self) -> None:
        """Let a merge begin once all that live ask for it, or the patience is over and most of them do."""
        asking = [member for member in self._asking.values() if member.is_alive]
        if not asking or self._asked_since is None:
            return
        is_over = self.now - self._asked_since >= self.PATIENCE_S
        everyone = {member.name for member in self.alive()}
        if {m.name for m in asking} != everyone and not (is_over and 2 * len(asking) > len(everyone)):
            return
        number = self._exchange.get("number", 0) + 1
        for member, _ in list(self._exchange.get("waiting", {}).values()):
            if member.is_alive and member.name not in self._asking:
                self._at(self.now, partial(self._fail, member))
        self._exchange = {"number": number, "waiting": {}}
        self._quorum = asking
        self._asking = {}
        self._asked_since = None
        newest = max(asking, key=lambda m: m.shared.merges)
        for own, member in enumerate(asking):
            self._in_quorum[member.name] = number
            state: Mapping[str, Any] | None = None
            if member.shared.merges < newest.shared.merges or (not newest.shared.merges and member is not newest):
                state = newest.shared.state_dict()
            self._answer(member, Quorum(own, state))

    def _complete(self, waiting: dict[str, tuple[VirtualMember, Request]]) -> None:
        """Everybody is there: give all of them the rows, or the sum, or lose some of the answers."""
        requests = [waiting[member.name][1] for member in self._quorum]
        self._exchange["waiting"] = {}
        answer: Any
        if isinstance(requests[0], RowsOfAll):
            answer = torch.stack([request.row for request in requests])  # type: ignore[union-attr]
        else:
            assert isinstance(requests[0], SumOfAll)
            answer = torch.stack([request.x for request in requests]).sum(0)  # type: ignore[union-attr]
        for member in self._quorum:
            if not member.is_alive:
                continue
            if self._happens(self.schedule.losses):
                self._at(self.now, partial(self._fail, member))
            else:
                self._answer(member, answer)

    def _answer(self, member: VirtualMember, answer: Any) -> None:
        assert member.requests is not None
        try:
            request = member.requests.send(answer)
        except StopIteration as end:
            found: Merge | None = end.value
            if found is None:
                self._fail(member)
                return
            member.end_merge(found)
            self._round(member)
            return
        self._ask(member, request)
