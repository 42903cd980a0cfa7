"""Figures of MuLoCo, lossless averages, DeMo, Dion and PULSE on pages are those of benchmarks/results."""

from __future__ import annotations

from tests.docs.checks import Sentences, comparison_of, ends
from tests.docs.tables import RESULTS, cell, rows_of, saved_rows

LOCAL, SYSTEMS = "docs/local_systems.md", "docs/systems.md"


def rates() -> list[float]:
    """Megabytes of a second in which one thread codes."""
    return [float(row["coded (MB/s)"]) for row in rows_of(RESULTS / "lossless.md")]


def saved(dtype: str) -> list[float]:
    """Percent of a dtype's bits that gradients as they are do not need."""
    rows = (row for row in rows_of(RESULTS / "lossless.md") if row["dtype"] == dtype)
    return [100 - float(row["of the dtype's (%)"]) for row in rows]


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


def of_pulse(rate: str, column: str = "all bf16 weights / patch") -> str:
    return cell("pulse", column, **{"learning rate": rate})


#: Columns of the table on AVX2.
AVX2, ALL = "AVX2 alone", "all instructions"
#: Cases of the table on AVX2 at 8 and 2 bits: encoding and decoding, and buckets.
CODED = ("8 bit, blocks of 128, companded, adaptive", "2 bit, blocks of 256, eden, adaptive")
BUCKETS = ("two_shot, 8 bit", "two_shot, 2 bit")


def longer_on_avx2(case: str) -> float:
    """How many times as long encoding and decoding takes."""
    few, all_of_them = (
        float(cell("avx2", column, what="encoding and decoding, over a copy", case=case)) for column in (AVX2, ALL)
    )
    return few / all_of_them


DEMO, SIGNS = "DeMo, 1/128", "signs of a momentum, 32 bits"
SENTENCES: Sentences = {
    "docs/performance.md": {
        (
            r"decoding takes ([\d.]+) times as long at 8 bits, and ([\d.]+) times at 2 bits\. .*? is then ([\d.]+) "
            r"times faster than in fp32 at 8 bits and ([\d.]+) times at 2 bits, where it is ([\d.]+) and ([\d.]+) "
            r"times faster"
        ): lambda: [
            *(longer_on_avx2(case) for case in CODED),
            *(
                cell("avx2", column, what="25 MiB between two hosts at 1 Gbit/s, times faster than fp32", case=case)
                for column in (AVX2, ALL)
                for case in BUCKETS
            ),
        ],
    },
    SYSTEMS: {
        r"and ([\d.]+) above Muon, which averages whole": lambda: [
            of_way("dion", "Dion, rank 1/4") - of_way("dion", "Muon, gradients averaged")
        ],
        (
            r"DeMo ends ([\d.]+) above .*? with (\d+) times fewer bytes\. .*? loss is ([\d.]+) nats "
            r"higher with the same"
        ): lambda: [
            of_way("demo", DEMO) - of_way("demo", SIGNS),
            of_way("demo", SIGNS, "sent (MB)") / of_way("demo", DEMO, "sent (MB)"),
            of_way("demo", "the same without the transform") - of_way("demo", DEMO),
        ],
        r"AdamW here, which ends ([\d.]+) below DeMo": lambda: [
            of_way("demo", DEMO) - of_way("demo", "AdamW, 32 bits")
        ],
        r"codes a gradient at (\d+) to (\d+) MB/s": lambda: ends(rates()),
        r"This reducer saves (\d+) to (\d+) % of bf16, and (\d+) to (\d+) % of fp32": lambda: [
            *ends(saved("bfloat16")),
            *ends(saved("float32")),
        ],
        (
            r"([\d.]+) % of the bf16 weights change .*? are ([\d.]+) times as long as a patch\. .*?, they "
            r"are ([\d.]+) times"
        ): lambda: [of_pulse("1e-06", "bf16 weights that change (%)"), of_pulse("1e-06"), of_pulse("0.001")],
    },
    LOCAL: {
        (
            r"Muon inside ends ([\d.]+) nats below AdamW inside\*\* at 2 bits, and ([\d.]+) below AdamW whose "
            r"gradients are averaged in every step, with (\d+) times fewer bytes"
        ): lambda: [
            loss("AdamW", FEW) - loss("Muon", FEW),
            loss("AdamW", EVERY) - loss("Muon", FEW),
            exact("sent (MB)", "AdamW", EVERY) / exact("sent (MB)", "Muon", FEW),
        ],
        r"more than AdamW: ([\d.]+) against ([\d.]+) nats at 32 bits": lambda: [
            steps_cost("Muon"),
            steps_cost("AdamW"),
        ],
        r"Compared with 32 bits, 2 bits cost ([\d.]+) nats with Muon, and ([\d.]+) with AdamW": lambda: [
            bits_cost("Muon"),
            bits_cost("AdamW"),
        ],
    },
}


test_sentences_say_what_the_tables_say = comparison_of(SENTENCES)
