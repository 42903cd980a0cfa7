"""What sentences of docs/systems.md and docs/theory.md say without a figure is what the tables have."""

from __future__ import annotations

import re

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


def test_four_bits_lose_nothing_with_adagrad() -> None:
    said(SYSTEMS, "`gqsgd_4bit` loses nothing at twice the bits")
    rows = table(SYSTEMS, "Adagrad with an L1 penalty", "optimizer", "gradients")
    losses = [row for row in rows if row["gradients"] in ("fp32", "`gqsgd_4bit`") and "torch" not in row["optimizer"]]
    for fp32, few in zip(losses[::2], losses[1::2], strict=True):
        for column in ("zeros", "loss + penalty", "accuracy"):
            assert abs(float(few[column]) - float(fp32[column])) < 0.0015, (few, column)


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
    rows = [row for row in table(SYSTEMS, "Gossip and DPSVRG", "method") if row["method"].startswith("DPSVRG")]
    by_disagreement = sorted(rows, key=lambda row: float(row["disagreement"]))
    errors = [float(row["F − F*"]) for row in by_disagreement if "up to 4" in row["method"]]
    assert errors == sorted(errors)
    errors = [float(row["F − F*"]) for row in by_disagreement if "always one" in row["method"]]
    assert errors == sorted(errors)


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
