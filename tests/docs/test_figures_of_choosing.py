"""Figures on the pages about choosing a method are those of the tables of benchmarks/results."""

from __future__ import annotations

import math
import re
from decimal import Decimal

import pytest

from tests.docs.checks import Checked, Sentences, comparison_of, numbers
from tests.docs.tables import RESULTS, cell, rows_of

PAGE, FIGURES = "docs/choosing.md", "docs/choosing_figures.md"
#: The columns of gradients in tables of errors, in the order of this page.
KINDS = ("gaussian", "heavy-tailed", "CNN trained", "LM trained")
PRESETS = ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit")


def error(preset: str, kind: str) -> str:
    """Percent by which one mean of 8 gradients is off."""
    return cell("presets", kind, preset=preset, n="8", steps="1")


def companded(kind: str, codec: str, bits: str) -> str:
    return cell("companded", kind, **{"codec or curve": codec, "bits on the wire": bits})


def step(strategy: str, column: str = "step (ms)", heading: str = "1 Gbit/s") -> str:
    return cell("resnet_cifar_netlab", column, strategy=strategy, heading=heading)


def computing() -> str:
    """Seconds that a step of ResNet-18 computes."""
    match = re.search(r"most of a step is computation, ([\d.]+) s", (RESULTS / "resnet_cifar_netlab.md").read_text())
    assert match
    return match[1]


def two_ranks(case: str) -> str:
    """Milliseconds on two hosts of two ranks at 100 Mbit/s."""
    return cell("reducers_netlab_2_ranks_per_host", "time (ms)", case=case, hosts="2", rate="100mbit")


def fast_link(case: str) -> str:
    """Times faster than fp32 over 10 Gbit/s."""
    return cell("reducers_netlab", "fp32 / time", case=case, hosts="2", rate="10gbit")


def at_most(share: float) -> float:
    """How many times shorter a step can become that waits for this share of its time."""
    return 1 / (1 - share)


def noise(task: str, column: str) -> str:
    return cell("noise_bits", column, task=task)


def of_layers(column: str) -> list[float]:
    """The transformer's rows of a column of the table about a width for each parameter."""
    return [float(row[column]) for row in rows_of(RESULTS / "noise_layers.md") if row["task"] == "transformer"]


#: Columns without and with side information.
SHARED = ("companded", "companded, shared")


def shared(column: str, samples: str) -> str:
    """Percent by which the mean of a transformer's gradients is off at 3 bits."""
    row = {"averaged": "transformer, gradients", "samples per rank": samples, "bits": "3"}
    return cell("side_information", column, **row)


SENTENCES: Sentences = {
    PAGE: {
        r"8 bits are ([\d.]+) times as fast as fp32, and 4 bits ([\d.]+) times": lambda: [
            fast_link("two_shot, 8 bit"),
            fast_link("two_shot, 4 bit"),
        ],
        r"about 1/\(1 − e\) times faster: ([\d.]+) times at e = 0\.05, ([\d.]+) at\s+0\.3, (\d+) at 0\.8\.": lambda: [
            at_most(0.05),
            at_most(0.3),
            at_most(0.8),
        ],
        r"\[(\d+) ms instead of (\d+)\]": lambda: [two_ranks("hierarchical, 4 bit"), two_ranks("two_shot, 4 bit")],
        r"\[([\d.]+) % where `two_shot` has ([\d.]+) %\]": lambda: [
            error("gqsgd_sum", "gaussian"),
            error("gqsgd", "gaussian"),
        ],
    },
    FIGURES: {
        (
            r"a ResNet takes the same (\d) bits, and a transformer from ([\d.]+) bits fewer to\s+([\d.]+) bits more"
        ): lambda: [
            cell("noise_layers", "bits, a width each", task="ResNet", ranks="8", batch="64"),
            -min(of_layers("difference")),
            max(of_layers("difference")),
        ],
        r"The R/V of single parameters is ([\d.]+) to\s+([\d.]+) times that of all": lambda: [
            min(of_layers("R/V, least layer")),
            max(of_layers("R/V, largest layer")),
        ],
        r"batches of 32 at ([+−]\d[\d.]*) ± ([\d.]+)\s+points with ([\d.]+) bits": lambda: [
            noise("digits, batch 32", "difference").partition(" ± ")[0],
            noise("digits, batch 32", "difference").partition(" ± ")[2],
            noise("digits, batch 32", "average bits"),
        ],
        r"small network on CIFAR-10 at ([+−]\d[\d.]*) ± ([\d.]+) points with ([\d.]+) bits": lambda: [
            noise("CIFAR-10, small network", "difference").partition(" ± ")[0],
            noise("CIFAR-10, small network", "difference").partition(" ± ")[2],
            noise("CIFAR-10, small network", "average bits"),
        ],
        r"at a perplexity higher by (\d[\d.]*) ± ([\d.]+) with ([\d.]+) bits": lambda: [
            noise("WikiText-2, transformer", "difference").partition(" ± ")[0],
            noise("WikiText-2, transformer", "difference").partition(" ± ")[2],
            noise("WikiText-2, transformer", "average bits"),
        ],
        r"computes for ([\d.]+) s of its (\d+) ms": lambda: [computing(), step("ddp")],
        r"at most ([\d.]+) times faster; 4 bits make it ([\d.]+) times faster": lambda: [
            float(step("ddp")) / 1000 / float(computing()),
            float(step("ddp")) / float(step("gqsgd_4bit")),
        ],
        (
            r"is off by ([\d.]+) % if they are Gaussian, ([\d.]+) % if they are heavy-tailed, and ([\d.]+) % .*? it is "
            r"([\d.]+), ([\d.]+) and ([\d.]+) %"
        ): lambda: [
            companded(kind, codec, "4.12")
            for codec in ("companded, blocks of 128", "linear, blocks of 128")
            for kind in KINDS[:3]
        ],
        (
            r"from ([\d.]+) to ([\d.]+) % with 64 samples .*? a gain of ([\d.]+) bits, and from ([\d.]+) "
            r"to ([\d.]+) % with 512"
        ): lambda: [
            *(shared(column, "64") for column in SHARED),
            math.log2(float(shared(SHARED[0], "64")) / float(shared(SHARED[1], "64"))),
            *(shared(column, "512") for column in SHARED),
        ],
        r"heavy tails no longer matter \(([\d.]+) %\)": lambda: [
            companded("heavy-tailed", "companded, blocks of 128, rotated", "4.12")
        ],
        (
            r"is off by ([\d.]+) % if they are Gaussian, and by ([\d.]+) % .*? by ([\d.]+) and ([\d.]+) %; at 3 bits "
            r"by ([\d.]+) and ([\d.]+) %, and with `companded` by ([\d.]+) and ([\d.]+) %"
        ): lambda: [
            error(preset, kind)
            for preset in ("gqsgd_2bit", "gqsgd 2 bit, companded", "gqsgd_2bit 3 bit", "gqsgd_3bit")
            for kind in ("gaussian", "CNN trained")
        ],
    },
}


def whole_row(row: tuple[str, ...]) -> list[str | None]:
    """The step against that of ddp."""
    heading = next(
        heading
        for begin, heading in (("1 Gbit/s", "1 Gbit/s"), ("200", "200 Mbit/s"), ("two", "Three seeds"))
        if row[0].startswith(begin)
    )
    return [None, *(step(strategy, "step vs ddp", heading) for strategy in ("gqsgd", "gqsgd_4bit", "ddp_bf16"))]


#: What the first cell of a row about bits has, and the column of errors.
ERRORS = {
    "relative error of the mean of 8 Gaussian": "gaussian",
    "of heavy-tailed gradients": "heavy-tailed",
    "of real gradients of a ResNet-20": "CNN trained",
    "of a small language model": "LM trained",
}
QUALITIES = {
    "accuracy of a small network": ("accuracy (%), less ddp's", "CIFAR-10, seed by seed"),
    "perplexity of a transformer": ("perplexity, less ddp's", "WikiText-2, seed by seed"),
}


def bits_row(row: tuple[str, ...]) -> list[str | None]:
    for begin, kind in ERRORS.items():
        if row[0].startswith(begin):
            return [None, *(error(preset, kind) for preset in PRESETS)]
    for begin, (column, heading) in QUALITIES.items():
        if row[0].startswith(begin):
            found = (
                [cell("few_bits", name, strategy=preset, heading=heading) for name in (column, "± over seeds")]
                for preset in PRESETS[1:]
            )
            return [None, None, *(" ± ".join(pair) for pair in found)]
    if row[0].startswith("bytes"):
        page = "docs/presets.md"
        return [None, *(cell(page, "sent / fp32", preset=preset, heading="At 8 ranks") for preset in PRESETS)]
    ddp, *means = (
        cell("resnet_cifar_netlab", "accuracy (%)", strategy=strategy, heading="Three seeds")
        for strategy in ("ddp", "gqsgd", "gqsgd_4bit")
    )
    assert f"(`ddp`: {ddp})" in row[0]
    return [None, *means, None, None]


TABLES = (
    Checked(FIGURES, "When it pays, measured", ("link", "gqsgd"), whole_row),
    Checked(FIGURES, "Errors by number of bits", ("number of bits",), bits_row),
)


test_sentences_say_what_the_tables_say = comparison_of(SENTENCES)


@pytest.mark.parametrize("checked", TABLES, ids=lambda checked: " ".join(checked.begin))
def test_tables_are_those_of_the_results(checked: Checked) -> None:
    checked.compare()


def test_a_difference_is_noticed() -> None:
    wrong = Checked(FIGURES, "When it pays, measured", ("link", "gqsgd"), lambda row: [None, row[1], "99.9", row[3]])
    with pytest.raises(AssertionError, match="99.9"):
        wrong.compare()
    assert Decimal(numbers("−3.05 ± 5.24")[0]) == Decimal("-3.05")
