"""Merges: what members say of themselves, what follows from it, and when they hand over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_gqsgd import CollectiveError, ConfigError, LocalSteps
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.local_steps.fragments import fragments_of
from lightning_gqsgd.local_steps.merges.averages import MergedAverages
from lightning_gqsgd.local_steps.merges.contribution import Contribution, difference, learning_rate_of, norm_of
from lightning_gqsgd.local_steps.merges.fixed import FixedMembers
from lightning_gqsgd.local_steps.merges.merge import Member, Merge, merge
from lightning_gqsgd.local_steps.merges.rounds import ByClock, BySteps, MergeRounds
from lightning_gqsgd.local_steps.merges.rows import Flag, Row, are_last, fastest_step_s, majority, shares_of
from lightning_gqsgd.local_steps.merges.shared import SharedState
from lightning_gqsgd.local_steps.merges.thread import MergeThread
from lightning_gqsgd.local_steps.options import LocalOptions, parse_time
from lightning_gqsgd.local_steps.outer import make_outer
from lightning_gqsgd.local_steps.starting import numbered
from lightning_gqsgd.membership.members import (
    Commit,
    Meet,
    Members,
    MergeFailed,
    Quorum,
    Rejoin,
    Request,
    RowsOfAll,
    SumOfAll,
)
from lightning_gqsgd.wire.telemetry import Telemetry

SENDS = Flag.HAS_CHANGE | Flag.IS_FINITE


def row(identity: int, **fields: object) -> Row:
    """A member that sends a change of one step."""
    given = {"contribution": 1, "samples": 1, "steps": 1, "norm": 1.0, "flags": SENDS, **fields}
    return replace(Row(identity, f"host-{identity}", 3, 77), **given)


@given(
    st.integers(0, 2**62),
    st.text(max_size=60),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.sampled_from([Flag(0), SENDS, Flag.HAS_FINISHED]),
)
def test_rows_come_back_as_they_were(identity: int, name: str, checksum: int, norm: float, flags: Flag) -> None:
    sent = Row(identity, name, 5, checksum, 11, 9, 2**40, 3, 0.25, norm, 1e-3, 0.5, flags)
    found = Row.of(sent.tensor())
    assert replace(found, name=name) == sent
    assert found.name.rstrip("�") == name.encode()[:40].decode(errors="ignore").rstrip("\0").rstrip("�")


def test_shares_are_those_of_samples() -> None:
    shares = shares_of([row(1, samples=3), row(2, samples=1), row(3, samples=0), row(4, flags=Flag(0))], 10.0)
    assert shares.of_members == (0.75, 0.25, 0.0, 0.0)
    assert shares.left_out == {}


@pytest.mark.parametrize(
    ("flags", "is_last"),
    [
        ([Flag.HAS_FINISHED, Flag.HAS_FINISHED | SENDS], True),
        ([Flag.HAS_FINISHED, Flag.IS_IDLE], True),
        ([Flag.HAS_FINISHED, Flag.IS_IDLE, Flag(0)], False),
        ([Flag.HAS_FINISHED, SENDS], False),
        ([Flag.IS_IDLE, Flag.IS_IDLE], False),  # whoever had finished makes further steps
    ],
)
def test_a_merge_is_the_last_if_nobody_who_has_not_finished_makes_steps(flags: list[Flag], is_last: bool) -> None:
    assert are_last([row(number, flags=each) for number, each in enumerate(flags)]) == is_last


def test_nobody_sends_anything() -> None:
    assert shares_of([row(1, flags=Flag(0)), row(2, flags=Flag(0))], 10.0).of_members == (0.0, 0.0)


@pytest.mark.parametrize(
    ("norms", "left_out"),
    [
        ([1.0, 1.2, 0.9, 11.0], {3}),
        ([1.0, 1.2, 0.9, 9.0], set()),
        ([1.0, 50.0], {1}),  # of two, the one that went less far is believed
        ([50.0], set()),
        ([0.0, 1.0], set()),  # one has learnt nothing
        ([1.0, math.inf, math.nan], {1, 2}),
    ],
)
def test_changes_that_are_much_larger_than_the_median_are_left_out(norms: list[float], left_out: set[int]) -> None:
    rows = []
    for number, norm in enumerate(norms):
        flags = SENDS if math.isfinite(norm) else Flag.HAS_CHANGE
        rows.append(row(number, norm=norm, flags=flags))
    shares = shares_of(rows, 10.0)
    assert set(shares.left_out) == left_out
    assert math.isclose(sum(shares.of_members), 1.0)
    if all(map(math.isfinite, norms)):
        assert not shares_of(rows, math.inf).left_out


def test_a_fast_member_is_no_outlier() -> None:
    # Its change is that of thirty steps, and as large.
    rows = [row(1), row(2), row(3, steps=30, samples=30, norm=30.0)]
    assert not shares_of(rows, 10.0).left_out


def test_a_slow_member_is_no_outlier() -> None:
    # The changes of many steps partly cancel. A change that is also larger as a whole is left out.
    fast = row(1, steps=700, samples=700, norm=2.0)
    assert not shares_of([fast, row(2, steps=5, samples=5, norm=0.5)], 10.0).left_out
    (reason,) = shares_of([fast, row(2, steps=5, samples=5, norm=30.0)], 10.0).left_out.values()
    assert reason == "is 15 times as large as the members' median, also for each step and at its learning rate"


def test_a_member_with_larger_learning_rates_is_no_outlier() -> None:
    # A fast member is at the end of its schedule, and a slow one is not, or has handed over late.
    fast = row(1, steps=100, samples=100, norm=1e-4, rate=1e-5, peak=0.1)
    slow = row(2, steps=5, samples=5, norm=0.5, rate=0.1, peak=0.1)
    assert not shares_of([fast, slow], 10.0).left_out
    assert set(shares_of([fast, replace(slow, norm=15.0)], 10.0).left_out) == {1}
    assert set(shares_of([fast, replace(slow, rate=0.0)], 10.0).left_out) == {1}


@pytest.mark.parametrize("others", [1, 2])
def test_a_member_with_a_wrong_learning_rate_is_an_outlier(others: int) -> None:
    wrong = row(9, norm=1e6, rate=1e3, peak=1e3)
    assert set(shares_of([wrong, *[row(n, rate=1e-3, peak=1.0) for n in range(others)]], 10.0).left_out) == {0}


def test_members_whose_learning_rate_is_0_are_no_measure() -> None:
    still = row(1, norm=0.0, rate=0.0, peak=0.1)
    assert not shares_of([still, replace(still, identity=2), row(3, rate=0.1, peak=0.1)], 10.0).left_out
    low = row(2, norm=1e-4, rate=1e-5, peak=0.1)
    assert not shares_of([still, low, row(3, rate=0.1, peak=0.1)], 10.0).left_out


@pytest.mark.parametrize(
    ("rate", "known"), [(0.1, 0.1), (torch.tensor(0.25), 0.25), (None, 0.0)], ids=["number", "tensor", "none"]
)
def test_learning_rates_are_read_where_optimizers_have_them(rate: Any, known: float) -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.0)
    optimizer.param_groups[0]["lr"] = rate
    assert learning_rate_of([optimizer]) == known


def test_a_change_without_steps_has_no_usual_size() -> None:
    shares = shares_of([row(1, steps=0, samples=3, norm=1e3), row(2), row(3, norm=20.0)], 10.0)
    assert shares.of_members == (0.75, 0.25, 0.0)


def test_most_members_are_right_and_all_conclude_the_same() -> None:
    rows = [row(5, checksum=1), row(6, checksum=2), row(7, checksum=1)]
    assert majority(rows) == (3, 1, 0)
    even = [row(9, checksum=1), row(4, checksum=2)]
    assert majority(even) == majority(even[::-1]) == (3, 2, 0)  # the smallest identity


def test_the_grace_is_the_fastest_members_step() -> None:
    assert fastest_step_s([row(1, step_s=0.4), row(2, step_s=0.1), row(3, step_s=0.0)]) == 0.1
    assert fastest_step_s([row(1)]) == 0.0


def test_by_the_clock_a_slow_member_hands_over_before_the_end_and_a_fast_one_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("lightning_gqsgd.local_steps.merges.rounds.time.monotonic", lambda: now[0])
    fast, slow = ByClock(20.0), ByClock(20.0)
    for rounds, step_s in ((fast, 0.1), (slow, 4.0)):
        rounds.end_step()
        now[0] += step_s
        rounds.end_step()
        rounds.begin(100.0, [row(1, step_s=0.1), row(2, step_s=4.0)])
        now[0] = 100.0
    due = {}
    for name, rounds in (("fast", fast), ("slow", slow)):
        now[0] = 100.0
        while not rounds.is_due(1):
            now[0] += rounds.step_s
        due[name] = now[0] - 100.0
    # Nobody waits longer than one of its own steps, and nobody comes after the grace.
    assert 20.0 - 4.0 <= due["slow"] <= 20.1
    assert 20.0 - 0.1 <= due["fast"] <= 20.1
    now[0] = 119.0
    assert fast.late_after_s() == pytest.approx(1.0 + 0.1 + 0.05)
    assert not fast.is_due(0)


def test_by_the_clock_a_pause_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lightning_gqsgd.local_steps.merges.rounds.time.monotonic", lambda: now[0])
    rounds = ByClock(20.0)
    rounds.end_step()
    for step_s in (1.0, 15.0, 1.0):  # a validation of 14 seconds
        now[0] += step_s
        rounds.end_step()
    rounds.begin(now[0], [row(1, step_s=rounds.step_s)])
    now[0] += 18.0
    assert not rounds.is_due(1)


def test_a_step_may_end_while_the_thread_of_merges_reads_how_long_steps_are() -> None:
    rounds = ByClock(20.0)

    class Length(float):
        def __lt__(self, other: float) -> bool:
            rounds.end_step()  # in the middle of the comparison
            return float(self) < float(other)

    rounds._times.extend(map(Length, (3, 1, 2)))
    assert rounds.step_s == 2.0


def test_by_steps_the_merge_begins_when_the_steps_are_made() -> None:
    rounds = BySteps(lambda number: 4 * (number + 1))
    assert not rounds.is_due(3)
    assert rounds.is_due(4)
    rounds.begin(0.0, [row(1)])  # the fourth merge, and the end of the third round
    assert not rounds.is_due(15)
    assert rounds.is_due(16)
    assert rounds.late_after_s() is None


@pytest.mark.parametrize(
    ("every_s", "is_ready", "due_after_s"), [(15.0, True, 0.0), (60.0, True, 41.25), (60.0, False, 63.75)]
)
def test_ranks_of_a_process_group_come_so_late_in_a_long_round_that_none_waits_for_longer_than_the_timeout(
    every_s: float, is_ready: bool, due_after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("lightning_gqsgd.local_steps.merges.rounds.time.monotonic", lambda: now[0])
    rounds = ByClock(every_s)
    rounds.end_step()
    now[0] += 50.0  # an epoch of validation, which counts as a step
    rounds.end_step()
    rounds.begin(now[0], [row(1)])
    members: Any = SimpleNamespace(waits_for_all=True, patience_s=30.0)
    thread = MergeThread(members, state_of(0.0), Member(1, "one"), rounds, torch.device("cpu"))
    if is_ready:
        thread._has_finished = True
    assert thread._due_after_s(have_all_finished=False) == due_after_s


@pytest.mark.parametrize("rounds", [ByClock(0.0), BySteps(lambda _: 1)])
def test_nothing_is_due_before_the_first_merge_of_a_member_that_joins_between_two(rounds: MergeRounds) -> None:
    assert rounds.is_due(1)
    rounds.wait()
    assert not rounds.is_due(1)
    rounds.begin(0.0, [row(1)])
    assert rounds.is_due(1)


def test_weights_that_are_set_while_a_merge_is_under_way_stay_once_it_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Linear(1, 1)
    optimizer = alone(model, monkeypatch, every=2, delay=1, bits=32, outer="nesterov", outer_after=0)
    meets = optimizer.averages._members.meets
    meets.clear()
    for _ in range(2):
        model(torch.ones(1)).backward()
        optimizer.step()
    threading.Timer(0.1, meets.set).start()
    optimizer.averages.settle()
    assert optimizer.averages.averages == 2
    nn.init.constant_(model.weight, 3.0)
    optimizer.finish()
    assert model.weight.item() == pytest.approx(3.0)
    optimizer.averages.settle()  # nothing is under way
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.averages.settle()


def test_samples_may_be_counted_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = alone(model, monkeypatch, every=1)
    optimizer.add_samples(np.ones(3, dtype=np.int64).sum())
    optimizer.step()
    assert optimizer.samples == 3
    optimizer.close()


def test_rounds_are_as_long_as_their_numbers_say_from_0_on_and_after_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = alone(model, monkeypatch, every=lambda number: 2**number)
    merges = []
    for _ in range(4):
        optimizer.step()
        merges.append(optimizer.averages.averages)
    assert merges == [2, 2, 3, 3]  # members meet in the first merge, which comes before the first step
    optimizer.finish()
    state = optimizer.state_dict()
    state["local_steps"]["merged"]["merges"] = 4
    optimizer.load_state_dict(state)
    merges.clear()
    for _ in range(8):
        optimizer.step()
        merges.append(optimizer.averages.averages)
    assert merges == [4] * 7 + [5]
    optimizer.close()


@pytest.mark.parametrize("steps", [4, 5, 0])
def test_weights_that_a_callback_sets_before_the_end_are_merged(
    steps: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(1, 1)
    optimizer = alone(model, monkeypatch, every=4, bits=32)
    for _ in range(steps):
        model(torch.ones(1)).backward()
        optimizer.step()
    nn.init.constant_(model.weight, 3.0)
    optimizer.finish()
    assert model.weight.item() == pytest.approx(3.0)
    assert optimizer.samples == steps
    assert ("no optimizer step was counted" in caplog.text) == (not steps)
    nn.init.constant_(model.weight, 4.0)
    optimizer.finish()
    with optimizer.averages.at_anchor():
        assert model.weight.item() == pytest.approx(4.0)
    assert optimizer.samples == steps
    optimizer.close()


class OnlyOne(Members):
    """A member without others.

    Args:
        state: what it finds when it comes.
        meets: is set once merges may begin.
    """

    waits_for_all = False
    timeout = timedelta(seconds=30)
    telemetry = Telemetry()

    def __init__(self, state: Mapping[str, Any] | None, meets: threading.Event) -> None:
        self.state = state
        self.meets = meets
        self.started_after = 0

    def present_state(self) -> Mapping[str, Any] | None:
        """See `Members`."""
        return self.state

    def start_after(self, merges: int) -> None:
        """See `Members`."""
        self.started_after = merges

    def answer(self, request: Request) -> Any:
        """See `Members`."""
        if isinstance(request, Meet):
            assert self.meets.wait(30)
            return Quorum(0)
        if isinstance(request, SumOfAll):
            return request.x
        return request.row[None] if isinstance(request, RowsOfAll) else True

    def close(self) -> None:
        """See `Members`."""


def alone(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> LocalSteps:
    """The optimizer of a member that no other one joins, without a lighthouse."""
    meets = threading.Event()
    meets.set()
    monkeypatch.setattr(MergedAverages, "_meet_elastic", lambda *_: OnlyOne(None, meets))
    inner = torch.optim.SGD(model.parameters(), 0.1)
    return LocalSteps(model, inner, **{"every": 1000, "outer": "sgd", "elastic": True, **fields})


def state_of(value: float, buffer: float | None = None) -> SharedState:
    """What members with one parameter have in common, and one buffer if its value is given."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    if buffer is not None:
        model.register_buffer("variance", torch.tensor([buffer]))
    options = LocalOptions(every="1h", outer="sgd", elastic=True)
    _, parameters, buffers = numbered(model, dict(model.named_parameters()), GQSGDConfig(min_numel=0))
    (fragment,) = fragments_of(parameters, buffers, options)
    outer = make_outer("sgd", [anchor for _, anchor in fragment.entries()])
    return SharedState(fragment, outer, options, torch.empty(0, dtype=torch.int64))


def engine_of(communicator: SimpleNamespace, **parts: object) -> Any:
    """The first of two ranks' engines, with as many parts as a test needs."""
    return SimpleNamespace(rank=0, world_size=2, telemetry=None, communicator=communicator, **parts)


class Rebinding(torch.optim.SGD):
    """An outer optimizer that gives its parameters other memory, as old code does."""

    def step(self, closure: Any = None) -> None:
        """See `torch.optim.SGD`."""
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - parameter.grad


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Rebinding])
def test_a_checksum_is_that_of_the_anchors_wherever_they_lie(optimizer: type[torch.optim.Optimizer]) -> None:
    own = state_of(3.0)
    before = own.checksum()
    own.fragment.move_anchors([torch.ones(1)], optimizer([a for _, a in own.fragment.entries()], lr=1.0))  # type: ignore[call-arg]
    own.version += 1
    assert own.checksum() == state_of(2.0).checksum() != before
    assert own.fragment.bundles[0].flat_anchors().tolist() == [2.0]


def test_the_thread_has_ended_once_it_is_closed_also_where_a_merge_was_under_way() -> None:
    began = threading.Event()
    closed = threading.Event()

    def run(_: object) -> None:
        began.set()
        closed.wait()
        time.sleep(0.1)  # as torchft's calls do, which return to Python while this process may be ending
        raise MergeFailed("this member has left")

    members = SimpleNamespace(waits_for_all=False, patience_s=600.0, run=run, close=closed.set)
    thread = MergeThread(members, state_of(0.0), Member(1, "one"), ByClock(0.0), torch.device("cpu"))  # type: ignore[arg-type]
    thread._thread.start()
    assert began.wait(10)
    thread.close()
    assert not thread._thread.is_alive()


def test_a_member_starts_from_what_another_one_knows_and_merges_beside_its_training() -> None:
    there, own = state_of(3.0), state_of(0.0)
    there.merges = 5
    members = OnlyOne(there.state_dict(), threading.Event())
    thread = MergeThread(members, own, Member(1, "one"), ByClock(3600.0), torch.device("cpu"))
    thread.join()
    assert (own.merges, members.started_after, thread.latest) == (5, 5, None)
    assert own.checksum() == there.checksum()
    members.meets.set()
    with thread._changed:
        assert thread._changed.wait_for(lambda: thread.latest is not None, 30)
    assert own.merges == 6
    thread.close()


@pytest.mark.parametrize("state", [None, {"merges": 0}, {"merges": 5}, {**state_of(3.0).state_dict(), "anchors": {}}])
def test_a_member_that_finds_nothing_of_use_meets_the_others(state: Mapping[str, Any] | None) -> None:
    own = state_of(0.0)
    members = OnlyOne(state, threading.Event())
    members.meets.set()
    thread = MergeThread(members, own, Member(1, "one"), ByClock(3600.0), torch.device("cpu"))
    thread.join()
    assert thread.latest is not None
    assert own.merges == 1
    thread.close()


@pytest.mark.parametrize("is_apart", [False, True])
def test_what_was_merged_apart_from_others_and_is_lost_is_said(
    is_apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    there, own = state_of(3.0), state_of(0.0)
    there.merges, own.merges = 9, 5
    # Of members 1 and 2: the number of the latest contribution, and its merge.
    own._settled = {1: (4, 5), 2: (3, 5)}
    there._settled = {1: (4, 5), 3: (1, 9)} | ({} if is_apart else {2: (7, 9)})
    requests = merge(own, Member(1, "one"), None)
    assert isinstance(next(requests), Meet)
    requests.send(Quorum(0, there.state_dict()))
    assert own.checksum() == there.checksum()
    said = [record.getMessage() for record in caplog.records]
    assert [("after 9" in line and "of 1 member, not all" in line) for line in said] == [True] * is_apart


def met(merges: Sequence[Any]) -> torch.Tensor:
    """The rows of members that have met, [members, bytes]; each merge asks for them."""
    rows = []
    for own, requests in enumerate(merges):
        assert isinstance(next(requests), Meet)
        gather = requests.send(Quorum(own))
        assert isinstance(gather, RowsOfAll)
        rows.append(gather.row)
    return torch.stack(rows)


def test_two_members_with_one_identity_are_an_error_of_both() -> None:
    merges = [merge(state_of(1.0), Member(1, name), None) for name in ("one", "fork of one")]
    rows = met(merges)
    for requests in merges:
        with pytest.raises(CollectiveError, match="two members have one identity, as after a fork; make LocalSteps"):
            requests.send(rows)


@pytest.mark.parametrize("waits_for_all", [True, False])
def test_an_outer_optimizer_that_one_member_has_changed_is_named(
    waits_for_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    states = [state_of(1.0), state_of(1.0)]
    states[1].outer.param_groups[0]["lr"] = 0.5
    merges = [merge(state, Member(number, f"m{number}"), None) for number, state in enumerate(states)]
    rows = met(merges)
    answers = [requests.send(rows) for requests in merges]
    assert [type(answer) for answer in answers] == [Commit, Rejoin]
    for answer, words in zip(answers, ("SGD(lr=1.0)", "SGD(lr=0.5)"), strict=True):
        assert answer.problem == f"members have different outer optimizers (here {words})"
    if waits_for_all:
        engine = engine_of(SimpleNamespace(timeout=timedelta(seconds=1)))
        for answer in answers:
            with pytest.raises(CollectiveError, match=r"different outer optimizers \(here.*register_step_post_hook"):
                FixedMembers(engine, GQSGDConfig()).answer(answer)
        assert not caplog.records  # none of them takes what the other one has
    else:
        assert merges[1].send(None) == Commit(answers[1].problem)
        assert "member m1 is not one of the largest group of 2 members, and takes their state" in caplog.text


def _decaying(anchors: list[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of docs/elastic.md."""
    optimizer = torch.optim.SGD(anchors, lr=0.7)

    def decay(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    optimizer.register_step_post_hook(decay)
    return optimizer


def test_a_hook_of_the_outer_optimizer_changes_its_learning_rate_in_each_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = alone(model, monkeypatch, every=1, outer=_decaying)
    for _ in range(2):
        optimizer.step()
    assert optimizer.averages.outer.param_groups[0]["lr"] == 0.7 / 4
    optimizer.close()


def test_infinities_and_nan_that_stay_are_no_difference() -> None:
    assert difference(torch.tensor([math.nan, math.nan]), torch.tensor([math.nan, 1.0])).isnan().tolist() == [
        False,
        True,
    ]
    start = torch.tensor([math.inf, -math.inf, 1.0])
    assert difference(start, start.clone()).tolist() == [0.0, 0.0, 0.0]
    assert norm_of([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    assert math.isnan(norm_of([torch.tensor([math.nan])]))


def _handed_over(start: list[float], end: list[float]) -> Contribution:
    """The change of one step, from the values of a parameter and of a buffer to later ones."""
    return Contribution(1, [torch.tensor(start)], [torch.tensor(end)], 1, 1, torch.empty(0, dtype=torch.int64))


def test_a_buffer_becomes_the_mean_of_values_also_if_others_have_moved_the_anchor_since() -> None:
    # Others have merged a variance of 0.1 after this member started from 1.0. Parameters keep both changes.
    shared = state_of(5.0, buffer=0.1)
    meets = threading.Event()
    meets.set()
    OnlyOne(None, meets).run(merge(shared, Member(1, "one"), _handed_over([4.0, 1.0], [3.0, 0.2])))
    assert shared.fragment.bundles[0].flat_anchors().tolist() == pytest.approx([4.0, 0.2])


@pytest.mark.parametrize(("variance", "flags"), [(100.0, SENDS), (math.nan, Flag.HAS_CHANGE)])
def test_buffers_are_no_part_of_the_size_of_a_change_but_have_to_be_finite(variance: float, flags: Flag) -> None:
    requests = merge(state_of(5.0, buffer=1.0), Member(1, "one"), _handed_over([5.0, 1.0], [3.0, variance]))
    assert isinstance(next(requests), Meet)
    gather = requests.send(Quorum(0))
    assert isinstance(gather, RowsOfAll)
    row = Row.of(gather.row)
    assert (row.norm, row.flags) == (2.0, flags)


def went(end: float, **fields: Any) -> Contribution:
    """The contribution of a member that has started at 3."""
    return replace(_handed_over([3.0], [end]), **fields)


def merged(
    states: Sequence[SharedState],
    sent: Sequence[Contribution | None],
    overflow: float = 0.0,
    sums: list[int] | None = None,
    **options: Any,
) -> list[Any]:
    """The merge of each of several members, which ask at once; ``overflow`` is added to each sum, whose number is
    noted."""
    members = [merge(state, Member(own, f"host-{own}"), sent[own], **options) for own, state in enumerate(states)]
    answers: list[Any] = [None] * len(members)
    found: list[Merge | None] = []
    while not found:
        requests: list[Request] = []
        for member, answer in zip(members, answers, strict=True):
            try:
                request = member.send(answer)
                requests.append(member.send(None) if isinstance(request, Rejoin) else request)
            except StopIteration as end:
                found.append(end.value)
        for own, request in enumerate(requests):
            if isinstance(request, Meet):
                answers[own] = Quorum(own)
            elif isinstance(request, RowsOfAll):
                answers[own] = torch.stack([each.row for each in requests])
            elif isinstance(request, SumOfAll):
                answers[own] = torch.stack([each.x for each in requests]).sum(0) + overflow
            else:
                answers[own] = not request.problem
        if sums is not None:
            sums += [request.number for request in requests if isinstance(request, SumOfAll)]
    return found


def anchors(states: Sequence[SharedState]) -> list[float]:
    return [float(state.fragment.bundles[0].flat_anchors()) for state in states]


def test_members_weigh_what_their_samples_do_and_steps_are_a_mean() -> None:
    states = [state_of(3.0), state_of(3.0)]
    found = merged(states, [went(1.0, samples=3, steps=4), went(5.0, steps=2)])
    assert [(one.is_used, one.is_left_out) for one in found] == [(True, False)] * 2
    assert anchors(states) == [2.0, 2.0]
    assert [(state.samples, state.mean_steps, state.merges) for state in states] == [(4, 3.0, 1)] * 2


def test_a_contribution_that_is_in_the_anchors_enters_them_once() -> None:
    states = [state_of(3.0), state_of(3.0)]
    merged(states, [went(1.0), None])
    again, _ = merged(states, [went(1.0), None])  # the member has not heard that the merge was valid
    assert [row.contribution for row in again.rows] == [0, 0]
    assert anchors(states) == [1.0, 1.0]
    joined = state_of(0.0)
    joined.load_state_dict(states[0].state_dict())
    assert joined.has_settled(0, 1)


def test_a_change_that_is_not_finite_is_left_out_and_spoils_no_mean() -> None:
    states = [state_of(3.0), state_of(3.0)]
    found = merged(states, [went(2.0), went(math.nan)])
    assert [(one.is_used, one.is_left_out) for one in found] == [(True, False), (True, True)]
    assert anchors(states) == [2.0, 2.0]
    assert [state.left_out for state in states] == [1, 1]


def test_a_mean_that_is_not_finite_is_used_by_nobody() -> None:
    states = [state_of(3.0) for _ in range(3)]
    found = merged(states, [went(2.0), went(1.0), None], overflow=math.inf)
    assert [(one.is_used, one.is_left_out) for one in found] == [(False, True), (False, True), (False, False)]
    assert anchors(states) == [3.0] * 3
    assert [(state.left_out, state.merges) for state in states] == [(2, 1)] * 3


def test_members_with_other_anchors_than_most_load_those_in_the_next_merge() -> None:
    states = [state_of(3.0), state_of(4.0), state_of(3.0)]
    for state in states:
        state.merges = 5
    assert merged(states, [None] * 3) == [None] * 3
    assert [state.merges for state in states] == [5, 0, 5]


@pytest.mark.parametrize(("flags", "end"), [(Flag(0), 2.0), (Flag.HAS_FINISHED, 1.0)])
def test_the_last_merge_is_the_mean_of_models_whatever_the_outer_optimizer(flags: Flag, end: float) -> None:
    states = [state_of(3.0), state_of(3.0)]
    for state in states:
        state.outer.param_groups[0]["lr"] = 0.5
    found = merged(states, [went(1.0)] * 2, flags=flags)
    assert [one.is_last for one in found] == [bool(flags)] * 2
    assert anchors(states) == [end] * 2


def test_counters_are_those_of_the_first_member_whose_change_is_used() -> None:
    states = [state_of(3.0) for _ in range(3)]
    for state in states:
        state.integers = torch.tensor([1])
    merged(states, [None, *(went(2.0, integers=torch.tensor([count])) for count in (7, 8))])
    assert [state.integers.tolist() for state in states] == [[7]] * 3


def test_no_two_sums_of_a_training_have_the_same_dither() -> None:
    states, sums = [state_of(3.0)], []
    for number in (1, 2, 3):
        merged(states, [went(2.0, number=number)], sums=sums)
    assert len(set(sums)) == 3


def test_a_state_that_was_given_away_stays_as_it_was_and_its_checksum_is_that_of_who_loads_it() -> None:
    own, other = state_of(3.0), state_of(0.0)
    other.checksum()
    given, before = own.state_dict(), own.checksum()
    merged([own], [went(2.0)])
    other.load_state_dict(given)
    assert anchors([own, other]) == [2.0, 3.0]
    assert other.checksum() == before != own.checksum()


def test_a_member_that_was_late_keeps_the_statistics_that_it_has_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor([-math.inf]))
    optimizer = alone(model, monkeypatch)

    def others_merge() -> None:
        shared = optimizer.averages._shared
        anchors = {entry.name: anchor for entry, anchor in shared.fragment.entries()}
        with torch.no_grad(), shared.lock:
            anchors["weight"] += 1
            anchors["running_var"].fill_(0.2)
            shared.version += 1

    with torch.no_grad():
        model.weight += 2
        model.running_var.fill_(0.3)
    others_merge()
    optimizer.step()
    assert model.weight.item() == 1 + 2 + 1
    assert model.running_var.item() == pytest.approx(0.3)  # and not 0.2 + (0.3 - 1)
    optimizer.finish()
    assert model.running_var.item() == pytest.approx(0.3)
    others_merge()
    optimizer.averages._catch_up()
    assert model.running_var.item() == pytest.approx(0.2)  # the member had learnt nothing since
    assert model.mask.item() == -math.inf
    optimizer.close()


@pytest.mark.parametrize(
    ("text", "seconds"), [("20s", 20.0), ("250ms", 0.25), (" 2 min ", 120.0), ("1.5h", 5400.0), (".5s", 0.5)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_time("every", text) == timedelta(seconds=seconds)
    assert LocalOptions(every=text).every_s == seconds


@pytest.mark.parametrize("text", ["", "20", "s", "-1s", "1 day", "1s2s", "0ms", "1e3s", "9999h"])
def test_what_is_no_time_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="every="):
        parse_time("every", text)
