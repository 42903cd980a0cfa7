"""What sentences of docs/systems.md and docs/theory.md say without a figure is what the tables have."""

from __future__ import annotations

import re
from functools import partial

import pytest

from tests.docs.pages import tables, text_of
from tests.docs.tables import RESULTS, cell, rows_of

SYSTEMS = "docs/systems.md"


def said(page: str, words: str) -> None:
    """Assert that a page still says so."""
    assert words in " ".join(text_of(page).split()), words


def table(page: str, heading: str, *first: str) -> list[dict[str, str]]:
    """The rows of a table of a page, by their columns; ``first``: what the columns begin with."""
    (found,) = (one for one in tables(page) if one.heading == heading and one.columns[: len(first)] == first)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def small(experiment: str, method: str, setting: str, quantity: str) -> float:
    """A figure of the smallest experiments."""
    return float(cell("systems", "value", experiment=experiment, method=method, setting=setting, quantity=quantity))


def test_four_bits_lose_nothing_with_adagrad() -> None:
    said(SYSTEMS, "`gqsgd_4bit` loses nothing at twice the bits")
    for optimizer in ("CMDAdagrad", "RDAAdagrad"):
        for quantity in ("zeros", "loss + penalty", "accuracy"):
            of = partial(small, "Adagrad with an L1 penalty", optimizer, quantity=quantity)
            assert abs(of(setting="gqsgd_4bit") - of(setting="fp32")) < 0.01, (optimizer, quantity)


def test_shifted_gradients_shrink_distances_as_gradient_descent_does() -> None:
    said(SYSTEMS, "With DGD-DEF, the factor is 0.81 at 1 to 8 bits, as that of gradient descent")
    descent = small("DGD-DEF", "gradient descent", "fp32", "factor")
    for bits in (1, 2, 3, 4, 8):
        assert small("DGD-DEF", "DGD-DEF", f"{bits} bits", "factor") == pytest.approx(descent, abs=0.005)
        classic = small("DGD-DEF", "classic error feedback", f"{bits} bits", "factor")
        assert (classic > 1) == (bits == 2)


def test_reputations_cost_accuracy_where_nobody_attacks_and_save_it_where_somebody_does() -> None:
    said(SYSTEMS, "Reputations cost accuracy where nobody attacks")
    calm, weighed, attacked, saved = (float(row["accuracy"]) for row in table(SYSTEMS, "FedVote", "votes"))
    assert weighed < calm
    assert attacked < weighed
    assert attacked < 0.5 * saved
    said(SYSTEMS, "At equal bytes votes do not win")
    rows = [row for row in rows_of(RESULTS / "votes.md") if row["method"] == "FedPAQ, 2 bits"]
    for row in rows:
        key = {"rounds of FedVote": row["rounds of FedVote"], "local steps": row["local steps"], "method": "FedVote"}
        assert float(row["accuracy (%)"]) > float(cell("votes", "accuracy (%)", **key))
        assert float(row["kB sent per client"]) <= float(cell("votes", "kB sent per client", **key))


def test_graphs_on_which_workers_disagree_more_leave_a_larger_error() -> None:
    said(SYSTEMS, "a graph on which workers disagree more leaves a larger error")
    for rounds in ("up to 4 rounds", "always one round"):
        of = partial(small, "DPSVRG", f"DPSVRG, {rounds}")
        rows = sorted((of(graph, "disagreement"), of(graph, "F - F*")) for graph in ("ring", "torus", "exponential"))
        assert rows == sorted(rows, key=lambda row: row[1])
    gaps = [
        f"{small('DPSVRG', method, graph, 'F - F*'):.1e}"
        for method in ("DPSVRG, up to 4 rounds", "DPSVRG, always one round", "DSPG, tuned step")
        for graph in ("ring", "exponential")
    ]
    page = " ".join(text_of(SYSTEMS).split())
    assert re.findall(r"\d\.\de-\d\d", page[page.index("F − F* =") : page.index("The step of DPSVRG")]) == gaps


def test_huffman_codes_are_shorter_than_elias_codes() -> None:
    said(SYSTEMS, "Elias codes, which `qsgd_elias` has, take more bits for the same exponents")
    for row in rows_of(RESULTS / "lossless.md"):
        assert float(row["Huffman"]) < float(row["Elias"])


def test_dion_sends_less_than_half_of_adamw_or_mostly_embeddings() -> None:
    said(SYSTEMS, "rank 1/4 ends below AdamW with fewer than half of its bytes")
    said(SYSTEMS, "most of its bytes are gradients of embeddings")
    adamw, muon, large, small = (
        {column: float(row[column]) for column in ("sent (MB)", "loss at the end")}
        for row in rows_of(RESULTS / "dion.md")
    )
    assert muon["loss at the end"] < large["loss at the end"] < adamw["loss at the end"] < small["loss at the end"]
    assert large["sent (MB)"] < adamw["sent (MB)"] / 2
    page = (RESULTS / "dion.md").read_text()
    numel, hidden = (int(number.replace(",", "")) for number in re.findall(r"(\d+,\d+)(?= parameters|  ?are in)", page))
    assert (numel - hidden) / numel * adamw["sent (MB)"] > small["sent (MB)"] / 2


def test_four_bits_end_within_the_seeds_spread_of_a_residual_network() -> None:
    said("docs/theory.md", "no difference was found beyond the seeds' spread")
    ends = {
        row["strategy"]: [float(part) for part in row["accuracy (%)"].split(" ± ")]
        for row in rows_of(RESULTS / "resnet_cifar_netlab.md")
        if row["heading"] == "Three seeds"
    }
    for strategy in ("gqsgd", "gqsgd_4bit"):
        assert abs(ends[strategy][0] - ends["ddp"][0]) < ends["ddp"][1]
