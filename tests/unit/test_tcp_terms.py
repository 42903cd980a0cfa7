"""What NCCL takes over TCP beyond a ring's bytes, and the intervals of predicted steps."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks import other_clusters
from benchmarks.slow_rings import SLICES, parts_of, slices_of
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict import Bucket, Costs, Link, Timeline, predict
from lightning_gqsgd.predict.costs import LATENCY_S, estimated_costs
from lightning_gqsgd.predict.intervals import LONGEST, SHORTEST, interval
from lightning_gqsgd.predict.probe import Probe
from lightning_gqsgd.predict.tcp import FASTEST_TCP, HEADERS_OF_LARGE_PACKETS, LOSSES, Factors, losses, terms_of
from tests.docs.tables import saved_rows

GBIT = 1e9 / 8
NUMEL = 30_000_000


def of(backward_s: float, *numels: int) -> Timeline:
    buckets = [Bucket((Segment(number, numel, raw=False),), 0.0) for number, numel in enumerate(numels)]
    return Timeline(tuple(buckets), backward_s)


def costs_of(nodes: int, rate: float, device: str = "h100", per_node: int = 1) -> Costs:
    return estimated_costs(device, nodes, per_node, Link(rate, LATENCY_S))


def test_the_losses_are_those_of_the_table() -> None:
    rows = {(row["sockets per channel"], row["queue (ms)"], row["rate"]): row for row in saved_rows("slow_rings")}
    rates = {"50mbit": 50e6, "100mbit": 100e6, "200mbit": 200e6, "500mbit": 500e6}
    found = {}
    for rate, bits in rates.items():
        alone = rows[1, 50, rate]["over bytes at the rate"]
        for milliseconds in (50, 400):
            found[bits / 8 * milliseconds / 1e3] = rows[16, milliseconds, rate]["over bytes at the rate"] / alone
    for queue_bytes, factor in LOSSES:
        assert factor == pytest.approx(found[queue_bytes], abs=6e-4)
    longer = [factor for queue_bytes, factor in found.items() if queue_bytes > LOSSES[-1][0]]
    assert longer == pytest.approx([1.0] * len(longer), abs=0.01)


def test_losses_fall_with_the_queue_and_end() -> None:
    values = [losses(queue_bytes) for queue_bytes in np.geomspace(1e3, 1e9, 200)]
    assert all(after <= before for before, after in pairwise(values))
    assert (values[0], values[-1]) == (LOSSES[0][1], 1.0)
    assert [losses(queue_bytes) for queue_bytes, _ in LOSSES] == [factor for _, factor in LOSSES]


def test_buckets_beside_a_backward_pass_take_a_tree_and_a_mean_after_the_step_a_ring() -> None:
    costs = costs_of(4, GBIT)
    alone_s = predict(of(0.0, NUMEL), costs, 4, "native").step_s
    beside_s = predict(of(1e-6, NUMEL // 2, NUMEL // 2), costs, 4, "native").step_s
    ring_s = 1.5 * 4 * NUMEL / GBIT * HEADERS_OF_LARGE_PACKETS
    assert alone_s == pytest.approx(ring_s, rel=2e-3)
    assert beside_s == pytest.approx(ring_s * 2 / 1.5, rel=2e-3)


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_node_and_two_have_no_tree(nodes: int) -> None:
    terms = terms_of(nodes, 2 * nodes, GBIT)
    assert terms is None or terms.usual.trees == 1.0


def test_codes_beside_a_backward_pass_take_no_tree() -> None:
    config = GQSGDConfig(bits=8, sample_every=0)
    alone_s, beside_s = (predict(of(s, NUMEL), costs_of(4, GBIT), 4, config).step_s for s in (0.0, 1e-6))
    assert beside_s == pytest.approx(alone_s, rel=1e-3)


def test_gloo_links_with_rdma_and_links_inside_a_node_have_no_terms() -> None:
    assert costs_of(4, GBIT, "cpu").terms is None
    assert costs_of(4, 1.01 * FASTEST_TCP).terms is None
    assert costs_of(1, GBIT, per_node=4).terms is None
    costs = costs_of(4, 0.05 * GBIT, per_node=2)
    ways = {
        scope: costs.wire_seconds(scope, "all_gather", 1000, is_beside_backward=True)
        / (1000 * costs.collective(scope, "all_gather").beta_s)
        for scope in ("node", "all", "peers")
    }
    assert ways["node"] == 1.0
    assert ways["all"] == ways["peers"] > 1.25


def test_a_probe_has_measured_what_collectives_take(tmp_path: Path) -> None:
    Probe(costs_of(4, GBIT), 4, 1, "nccl", "GPU", 1.0).save(tmp_path / "p.json")
    assert Probe.load(tmp_path / "p.json").costs.terms is None


@pytest.mark.parametrize("method", ["native", "bf16", GQSGDConfig(bits=4, sample_every=0)])
@pytest.mark.parametrize("rate", [0.01, 0.05, 1.0, 10.0, 400.0])
def test_the_prediction_lies_in_its_interval(method: GQSGDConfig | str, rate: float) -> None:
    for device in ("h100", "cpu"):
        costs = costs_of(4, rate * GBIT, device)
        step_s = predict(of(0.05, NUMEL), costs, 4, method).step_s
        shortest_s, longest_s = interval(costs, lambda at: predict(of(0.05, NUMEL), at, 4, method).step_s)
        assert shortest_s <= SHORTEST * step_s * (1 + 1e-9)
        assert longest_s >= LONGEST * step_s * (1 - 1e-9)


def test_factors_replace_all_three() -> None:
    terms = costs_of(4, GBIT).at(Factors(3.0, 2.0)).terms
    assert terms is not None
    assert terms.usual == terms.least == terms.most == Factors(3.0, 2.0)


def measured_over_predicted() -> dict[tuple[str, str], list[float]]:
    """By hosts and rate, of the package's own benchmark over Gloo."""
    found: dict[tuple[str, str], list[float]] = {}
    for name in ("prediction", "prediction_4_hosts"):
        for row in saved_rows(name):
            ratio = row["measured (ms)"] / row["predicted (ms)"]
            found.setdefault((row["hosts"], row["rate"]), []).append(ratio)
    return found


def test_the_shares_of_the_interval_are_those_of_the_tables_and_hold_in_labs_that_they_leave_out() -> None:
    by_lab = measured_over_predicted()
    ratios = [ratio for lab in by_lab.values() for ratio in lab]
    assert np.quantile(ratios, (0.03, 0.97)) == pytest.approx((SHORTEST, LONGEST), abs=1e-3)
    held = 0
    for left_out, inside in by_lab.items():
        others = [ratio for lab, several in by_lab.items() if lab != left_out for ratio in several]
        shortest, longest = np.quantile(others, (0.03, 0.97))
        held += sum(shortest <= ratio <= longest for ratio in inside)
    assert held == 59  # docs/prediction.md says so
    assert held >= 0.9 * len(ratios)


def test_the_table_of_other_clusters_is_what_the_model_says_now() -> None:
    rows = [row for row in saved_rows("other_clusters") if row["measured by others"] == "4 × L40S"]
    read = other_clusters.read()
    assert len(read) == len(rows) == 27
    for given, row in list(zip(read, rows, strict=True))[::5]:
        assert row["predicted (ms)"] == pytest.approx(1e3 * other_clusters.step_of(given).usual_s, rel=1e-6)
    assert sum(row["holds"] == "yes" for row in rows) >= 0.9 * len(rows)
    known = [abs(row["error (%)"]) for row in rows if row["link"] != other_clusters.UNSHAPED]
    assert np.median(known) <= 5
    assert max(known) <= 15


def test_the_language_model_has_the_parameters_that_its_authors_give() -> None:
    assert other_clusters.timeline_of(0.02).numel == 30_846_720


def test_slices_of_a_ring_add_up_to_its_bytes() -> None:
    for nbytes in (1 << 20, (33 << 20) + 4096):
        sent = slices_of(nbytes, 4)
        assert sum(size for _, size in sent) == 6 * nbytes // 4
        assert [step for step, _ in sent[: 6 * SLICES : SLICES]] == list(range(6))
        parts = parts_of([size for _, size in sent], 16)
        assert [sum(size for _, size in several) for several in parts] == [size for _, size in sent]
        assert {taker for several in parts for taker, _ in several} == set(range(16))
