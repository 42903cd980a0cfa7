"""Merges in a world of virtual machines: schedules of deaths, losses, stalls, bad numbers and late joins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.virtual_world import Log, Schedule, VirtualWorld
from tests.reliability.knobs import SCHEDULES, SEED

#: Schedules of one test: 48 have all kinds of faults together with all numbers of members and of late ones.
PART = 48


def drawn(seed: int) -> Schedule:
    """A schedule with some kinds of faults, and without others."""
    kinds = seed % 16
    return Schedule(
        seed,
        members=2 + seed % 4,
        until_s=4.0,
        deaths=0.01 if kinds & 1 else 0.0,
        losses=0.03 if kinds & 2 else 0.0,
        stalls=0.03 if kinds & 4 else 0.0,
        poison=0.05 if kinds & 8 else 0.0,
        joins=seed % 3,
    )


def broken(world: VirtualWorld, log: Log) -> list[str]:
    """What must not be."""
    problems = [f"exchange {number} left {len(sums)} anchors" for number, sums in log.merges.items() if len(sums) > 1]
    problems += [f"lost: {entry}" for entry in log.lost]
    alive = world.alive()
    if len({(member.shared.merges, member.shared.checksum()) for member in alive if member.shared.merges}) > 2:
        problems.append("members have not found together")
    for member in alive:
        used = member.shared.used
        if len(set(used)) < len(used):
            problems.append(f"{member.name} has a contribution twice")
        if not all(bool(anchor.isfinite().all()) for _, anchor in member.shared.fragment.entries()):
            problems.append(f"{member.name} is not finite")
        latest = max(member.shared.merges for member in alive)
        # One that has come at the very end has made none yet.
        if 0 < member.shared.merges < latest - 1:
            problems.append(f"{member.name} has {member.shared.merges} merges, another one {latest}")
    if log.merges and max(log.merges) < 3:
        problems.append("hardly anything was merged")
    return problems


def shrunk(schedule: Schedule) -> Schedule:
    """A smaller schedule that is broken as well."""
    smaller = [replace(schedule, **{kind: 0}) for kind in ("deaths", "losses", "stalls", "poison", "joins")]
    smaller += [replace(schedule, members=schedule.members - 1)] if schedule.members > 2 else []
    smaller += [replace(schedule, until_s=schedule.until_s / 2)] if schedule.until_s > 2 else []
    for candidate in smaller:
        if candidate != schedule:
            world = VirtualWorld(candidate)
            if broken(world, world.run()):
                return shrunk(candidate)
    return schedule


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part > 0)) for part in range(-(-SCHEDULES // PART))]
)
def test_members_have_the_same_anchors_and_no_contribution_twice(part: int) -> None:
    for number in range(part * PART, min(SCHEDULES, (part + 1) * PART)):
        seed = SEED * SCHEDULES + number
        world = VirtualWorld(drawn(seed))
        problems = broken(world, world.run())
        assert not problems, f"{problems} with {shrunk(drawn(seed))}"


def test_the_schedules_have_what_they_are_for() -> None:
    logs = []
    for seed in range(64):
        world = VirtualWorld(drawn(seed))
        logs.append(world.run())
    assert sum(log.failed for log in logs) > 50
    assert sum(log.left_out for log in logs) > 5
    assert sum(log.settled for log in logs) > 500
