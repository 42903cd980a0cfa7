"""Figures of MuLoCo, lossless averages, DeMo, Dion and PULSE on pages are those of benchmarks/results."""

from __future__ import annotations

import pytest

from tests.docs.checks import Checked, Sentences, compare_sentence
from tests.docs.tables import RESULTS, cell, rows_of, saved_rows

LOCAL, SYSTEMS = "docs/local_systems.md", "docs/systems.md"


def muloco_row(row: tuple[str, ...]) -> list[str | None]:
    columns = ("learning rate", "sent (MB)", "loss at the end", "less every step's")
    return [None, None, *(cell("muloco", column, inner=row[0], averages=row[1]) for column in columns)]


def lossless_row(row: tuple[str, ...]) -> list[str | None]:
    half, single = (
        cell("lossless", "bits", gradient=row[0], dtype="bfloat16"),
        cell("lossless", "bits", gradient=row[0], dtype="float32"),
    )
    exponents = [cell("lossless", column, gradient=row[0], dtype="bfloat16") for column in ("Huffman", "Elias")]
    return [None, half, single, *exponents]


def rates() -> list[float]:
    """Megabytes of a second in which one thread codes."""
    return [float(row["coded (MB/s)"]) for row in rows_of(RESULTS / "lossless.md")]


def saved(dtype: str) -> list[float]:
    """Percent of a dtype's bits that gradients as they are do not need."""
    rows = (row for row in rows_of(RESULTS / "lossless.md") if row["dtype"] == dtype)
    return [100 - float(row["of the dtype's (%)"]) for row in rows]


def way_row(page: str, row: tuple[str, ...]) -> list[str | None]:
    return [None, *(cell(page, column, way=row[0]) for column in ("learning rate", "sent (MB)", "loss at the end"))]


def pulse_row(row: tuple[str, ...]) -> list[str | None]:
    columns = ("bf16 weights that change (%)", "patch (kB)", "all bf16 weights / patch")
    return [None, *(cell("pulse", column, **{"learning rate": row[0]}) for column in columns)]


FEW, EVERY = "30 local steps, 2 bits, errors fed back", "every step, 32 bits"


def exact(column: str, inner: str, averages: str) -> float:
    """A figure of MuLoCo's table, as it was before the table rounded it."""
    (row,) = (row for row in saved_rows("muloco") if (row["inner"], row["averages"]) == (inner, averages))
    return float(row[column])


def loss(inner: str, averages: str) -> float:
    return exact("loss at the end", inner, averages)


def bits_cost(inner: str) -> float:
    return loss(inner, FEW) - loss(inner, "30 local steps, 32 bits")


def steps_cost(inner: str) -> float:
    return loss(inner, "30 local steps, 32 bits") - loss(inner, EVERY)


def of_way(page: str, way: str, column: str = "loss at the end") -> float:
    """A figure of a table with a row for each way, as it was before the table rounded it."""
    (row,) = (row for row in saved_rows(page) if row["way"] == way)
    return float(row[column])


#: Rows of the table on AVX2: the part of the benchmark, and the case.
AVX2_PARTS = (
    "encoding and decoding, over a copy",
    "25 MiB between two hosts at 1 Gbit/s, times faster than fp32",
    "a step of dense layers in two processes, times faster than ddp",
)
AVX2_ROWS = {
    "encoding and decoding at 8 bits, times as long as a copy": (0, "8 bit, blocks of 128, companded, adaptive"),
    "encoding and decoding at 4 bits": (0, "4 bit, blocks of 128, companded, adaptive"),
    "encoding and decoding at 2 bits": (0, "2 bit, blocks of 256, eden, adaptive"),
    "a bucket of 25 MiB between two hosts at 1 Gbit/s, bf16, times faster than fp32": (1, "bf16"),
    "the same at 8 bits": (1, "two_shot, 8 bit"),
    "the same at 4 bits": (1, "two_shot, 4 bit"),
    "the same at 2 bits": (1, "two_shot, 2 bit"),
    "a step of dense layers in two processes of one machine at 8 bits, times faster than `ddp`": (2, "gqsgd (gather)"),
    "the same step at 4 bits": (2, "gqsgd_4bit (gather)"),
}


def avx2_row(row: tuple[str, ...]) -> list[str | None]:
    part, case = AVX2_ROWS[row[0]]
    return [
        None,
        *(cell("avx2", column, what=AVX2_PARTS[part], case=case) for column in ("all instructions", "AVX2 alone")),
    ]


DEMO, SIGNS = "DeMo, 1/128", "signs of a momentum, 32 bits"
SENTENCES: Sentences = {
    (SYSTEMS, r"and ([\d.]+) above Muon, which averages whole"): [
        lambda: of_way("dion", "Dion, rank 1/4") - of_way("dion", "Muon, gradients averaged"),
    ],
    (
        SYSTEMS,
        r"the loss is ([\d.]+) nats higher with the same bytes\. DeMo ends ([\d.]+) above .*? with (\d+) times fewer "
        r"bytes",
    ): [
        lambda: of_way("demo", "the same without the transform") - of_way("demo", DEMO),
        lambda: of_way("demo", DEMO) - of_way("demo", SIGNS),
        lambda: of_way("demo", SIGNS, "sent (MB)") / of_way("demo", DEMO, "sent (MB)"),
    ],
    (SYSTEMS, r"AdamW here, which ends ([\d.]+) below DeMo"): [
        lambda: of_way("demo", DEMO) - of_way("demo", "AdamW, 32 bits"),
    ],
    (
        LOCAL,
        r"Muon inside ends ([\d.]+) nats below AdamW inside\*\* at 2 bits, and ([\d.]+) below AdamW whose gradients "
        r"are averaged in every step, with (\d+) times fewer bytes",
    ): [
        lambda: loss("AdamW", FEW) - loss("Muon", FEW),
        lambda: loss("AdamW", EVERY) - loss("Muon", FEW),
        lambda: exact("sent (MB)", "AdamW", EVERY) / exact("sent (MB)", "Muon", FEW),
    ],
    (LOCAL, r"more than AdamW: ([\d.]+) against ([\d.]+) nats at 32 bits"): [
        lambda: steps_cost("Muon"),
        lambda: steps_cost("AdamW"),
    ],
    (LOCAL, r"Compared with 32 bits, 2 bits cost ([\d.]+) nats with Muon, and ([\d.]+) with AdamW"): [
        lambda: bits_cost("Muon"),
        lambda: bits_cost("AdamW"),
    ],
    (SYSTEMS, r"codes a gradient at (\d+) to (\d+) MB/s"): [lambda: min(rates()), lambda: max(rates())],
    (SYSTEMS, r"This reducer saves (\d+) to (\d+) % of bf16, and (\d+) to (\d+) % of fp32"): [
        lambda: min(saved("bfloat16")),
        lambda: max(saved("bfloat16")),
        lambda: min(saved("float32")),
        lambda: max(saved("float32")),
    ],
    (SYSTEMS, r"change in each of these steps, at least ([\d.]+) %"): [
        lambda: min(float(row["fp32 weights that change (%)"]) for row in rows_of(RESULTS / "pulse.md")),
    ],
}
TABLES = [
    Checked(LOCAL, "Muon inside", ("inside",), muloco_row),
    Checked(SYSTEMS, "Gradients without loss", ("gradient",), lossless_row),
    Checked(SYSTEMS, "DeMo", ("way",), lambda row: way_row("demo", row)),
    Checked(SYSTEMS, "Dion", ("way",), lambda row: way_row("dion", row)),
    Checked(SYSTEMS, "PULSE", ("learning rate",), pulse_row),
    Checked("docs/performance.md", "On processors without AVX-512", ("", "all instructions"), avx2_row),
]


@pytest.mark.parametrize(("page", "pattern"), SENTENCES)
def test_sentences_say_what_the_tables_say(page: str, pattern: str) -> None:
    compare_sentence(page, pattern, SENTENCES[page, pattern])


@pytest.mark.parametrize("checked", TABLES, ids=lambda checked: f"{checked.page} {checked.heading}")
def test_tables_are_those_of_the_results(checked: Checked) -> None:
    checked.compare()
