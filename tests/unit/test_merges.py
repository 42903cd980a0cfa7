"""Merges: what members say of themselves, what follows from it, and when they hand over."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_gqsgd import ConfigError
from lightning_gqsgd.local_steps.merges.contribution import difference, norm_of
from lightning_gqsgd.local_steps.merges.rounds import ByClock, BySteps
from lightning_gqsgd.local_steps.merges.rows import Flag, Row, fastest_step_s, majority, shares_of
from lightning_gqsgd.local_steps.options import LocalOptions, parse_time

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
    sent = Row(identity, name, 5, checksum, 9, 2**40, 3, 0.25, norm, flags)
    found = Row.of(sent.tensor())
    assert replace(found, name=name) == sent
    assert found.name.rstrip("�") == name.encode()[:40].decode(errors="ignore").rstrip("\0").rstrip("�")


def test_shares_are_those_of_samples() -> None:
    shares = shares_of([row(1, samples=3), row(2, samples=1), row(3, samples=0), row(4, flags=Flag(0))], 10.0)
    assert shares.of_members == (0.75, 0.25, 0.0, 0.0)
    assert shares.left_out == {}


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
        assert not shares_of(rows, None).left_out


def test_a_fast_member_is_no_outlier() -> None:
    # Its change is that of thirty steps, and as large.
    rows = [row(1), row(2), row(3, steps=30, samples=30, norm=30.0)]
    assert not shares_of(rows, 10.0).left_out


def test_most_members_are_right_and_all_conclude_the_same() -> None:
    rows = [row(5, checksum=1), row(6, checksum=2), row(7, checksum=1)]
    assert majority(rows) == (3, 1)
    even = [row(9, checksum=1), row(4, checksum=2)]
    assert majority(even) == majority(even[::-1]) == (3, 2)  # the smallest identity


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


def test_by_steps_the_merge_begins_when_the_steps_are_made() -> None:
    rounds = BySteps(lambda number: 4 * (number + 1))
    assert not rounds.is_due(3)
    assert rounds.is_due(4)
    rounds.begin(0.0, [row(1)])  # all have made three merges before this one
    assert not rounds.is_due(19)
    assert rounds.is_due(20)
    assert rounds.late_after_s() is None


def test_infinities_that_stay_are_no_difference() -> None:
    start = torch.tensor([math.inf, -math.inf, 1.0])
    assert difference(start, start.clone()).tolist() == [0.0, 0.0, 0.0]
    assert norm_of([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    assert math.isnan(norm_of([torch.tensor([math.nan])]))


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
