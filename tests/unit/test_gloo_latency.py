"""Collectives of Gloo on the virtual clock: threads of a process group, and latencies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gqsgd.predict.clock import Clock
from lightning_gqsgd.predict.costs import ESTIMATES, Collective, Costs, Link, estimated_costs, on_links
from lightning_gqsgd.predict.profile import Message
from lightning_gqsgd.predict.runners import Network
from lightning_gqsgd.predict.tcp import ways
from lightning_gqsgd.reducers.base import ALL, Scope

MIB = 1 << 20


def took(costs: Costs, kind: str, nbytes: int, count: int, stages: int = 1) -> float:
    """Returns the seconds of so many collectives that are started together, in groups of several stages in turns."""
    clock = Clock(1.0)
    network = Network(clock, costs, has_backward=False)
    for number in range(count):
        network.start(Message(kind, nbytes, ALL, 2), number % stages, 0, number, lambda: None)
    clock.run()
    return clock.now_s


def test_a_group_runs_two_collectives_at_once() -> None:
    costs = Costs({"all all_gather": Collective(alpha_s=1.0, beta_s=0.0)}, {})
    assert [took(costs, "all_gather", 1, count) for count in (1, 2, 3, 5)] == [1.0, 1.0, 2.0, 3.0]
    assert took(costs, "all_gather", 1, 4, stages=2) == 1.0


def test_a_ring_has_a_latency_for_each_segment_that_a_rank_sends() -> None:
    assert ways("all_to_all", 4, 100 * MIB) == 2
    assert ways("all_gather", 2, 100 * MIB) == 2
    assert ways("all_gather", 4, 100 * MIB) == 6
    assert ways("sum/float32", 2, 4096) == 4
    assert ways("sum/float32", 2, 12 * MIB) == 12
    assert ways("sum/float32", 4, 18 * MIB) == 18
    assert ways("max", 4, 16) == 12


@pytest.mark.parametrize(
    ("kind", "nbytes", "count", "mbit", "latency_s", "measured_s"),
    [
        ("all_gather", 4096, 1, 140, 0.025, 0.052),
        ("all_gather", MIB // 2, 6, 140, 0.025, 0.325),
        ("all_gather", MIB // 4, 6, 140, 0.025, 0.231),
        ("sum/float32", 4096, 1, 140, 0.025, 0.102),
        ("sum/float32", 12 * MIB, 1, 140, 0.025, 1.026),
        ("all_gather", 4096, 1, 80, 0.02, 0.044),
        ("all_gather", MIB // 2, 6, 80, 0.02, 0.421),
        ("all_gather", MIB // 4, 6, 80, 0.02, 0.254),
        ("sum/float32", 4096, 1, 80, 0.02, 0.082),
        ("sum/float32", 12 * MIB, 1, 80, 0.02, 1.505),
    ],
)
def test_collectives_take_as_long_as_those_of_gloo_did_between_two_hosts(
    kind: str, nbytes: int, count: int, mbit: int, latency_s: float, measured_s: float
) -> None:
    """Medians of three, with no training beside them."""
    cost = Collective(alpha_s=1e-3, beta_s=8e-6 / mbit)
    costs = Costs({f"all {kind}": cost}, {}, latency_s=latency_s)
    assert took(costs, kind, nbytes, count) == pytest.approx(measured_s, rel=0.1)


def test_the_latency_of_a_link_is_none_inside_of_a_node() -> None:
    cost = Collective(alpha_s=1.0, beta_s=0.0)
    costs = Costs({"node all_gather": cost}, {}, latency_s=10.0)
    clock = Clock(1.0)
    message = Message("all_gather", 1, Scope("node", 2), 2)
    Network(clock, costs, has_backward=False).start(message, 1, 0, 0, lambda: None)
    clock.run()
    assert clock.now_s == 1.0


def test_a_latency_counts_on_the_clock_or_in_the_collectives() -> None:
    link = Link(1.25e8, latency_s=0.04)
    in_collectives = estimated_costs("cpu", 4, 2, link)
    assert in_collectives.collective("peers", "all_gather").alpha_s == pytest.approx(2 * 0.04)
    on_clock = on_links(replace(ESTIMATES["cpu"], latency_s=0.04), 4, 2, link, link)
    assert on_clock.latency_s == 0.04
    assert on_clock.collective("peers", "all_gather").alpha_s == 0.0
