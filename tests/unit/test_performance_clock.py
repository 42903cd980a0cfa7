"""The virtual clock: resources do one thing at a time, and processors are shared."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gqsgd.predict.clock import Clock, Resource


def _ends(cores: float, tasks: list[tuple[float, float]]) -> list[float]:
    """When tasks of (seconds, demand) that start together are over."""
    clock, ends = Clock(cores), [0.0] * len(tasks)
    for number, (seconds, demand) in enumerate(tasks):
        clock.start(seconds, demand, lambda number=number: ends.__setitem__(number, clock.now_s))
    clock.run()
    return ends


def test_tasks_do_not_slow_each_other_down_where_there_are_processors_enough() -> None:
    assert _ends(2.0, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([1.0, 3.0])


def test_two_tasks_on_one_processor_get_half_of_it_each() -> None:
    assert _ends(1.0, [(1.0, 1.0), (3.0, 1.0)]) == pytest.approx([2.0, 4.0])


def test_a_task_that_wants_less_than_its_share_gets_all_that_it_wants() -> None:
    assert _ends(1.0, [(1.0, 0.25), (0.75, 1.0)]) == pytest.approx([1.0, 1.0])


def test_what_needs_no_processor_is_never_slowed_down() -> None:
    assert _ends(0.5, [(1.0, 0.0), (1.0, 1.0)]) == pytest.approx([1.0, 2.0])


def test_a_resource_takes_its_tasks_one_after_the_other() -> None:
    clock = Clock(1.0)
    link = Resource(clock, "link")
    for number in range(3):
        link.add(1.0 + number, 0.0, "send", number, 0, lambda: None)
    clock.run()
    assert [(event.start_s, event.end_s) for event in clock.events] == [(0, 1), (1, 3), (3, 6)]


@given(
    cores=st.floats(0.25, 4),
    tasks=st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 2)), min_size=1, max_size=8),
)
def test_no_processor_time_is_lost_or_made(cores: float, tasks: list[tuple[float, float]]) -> None:
    """The last task ends no sooner than all work fits on the processors, and no later than one task after the other."""
    ends = _ends(cores, tasks)
    work = sum(seconds * demand for seconds, demand in tasks)
    alone = [seconds * max(1.0, demand / cores) for seconds, demand in tasks]
    assert max(ends) >= max(work / cores, max(alone)) * (1 - 1e-6)
    assert max(ends) <= sum(alone) * (1 + 1e-6) + 1e-9


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.floats(0.001, 1), st.floats(0, 1)), max_size=20))
def test_events_of_one_resource_never_overlap(tasks: list[tuple[str, float, float]]) -> None:
    clock = Clock(1.0)
    resources = {name: Resource(clock, name) for name in ("a", "b")}
    for number, (name, seconds, demand) in enumerate(tasks):
        clock.start(0.1 * number, 0.0, partial(resources[name].add, seconds, demand, "", number, 0, lambda: None))
    clock.run()
    for name in resources:
        mine = [event for event in clock.events if event.resource == name]
        assert all(first.end_s <= second.start_s + 1e-9 for first, second in zip(mine, mine[1:], strict=False))
