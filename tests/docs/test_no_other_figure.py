"""No page of the documentation quotes a figure that no table has: what is not compared by a test is named here."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.wire.neighbours import MEMORY_BYTES
from tests.docs import (
    test_figures,
    test_figures_of_choosing,
    test_figures_of_further_systems,
    test_figures_of_pages,
    test_further_figures,
)
from tests.docs.checks import spaced
from tests.docs.pages import PAGES, ROOT, figures, tables, text_of

#: What is no measurement on any page: versions, references, sizes of models.
EVERYWHERE = (
    r"arXiv \d{4}\.\d{5}",
    r"(?:Apache-|(?:torch|PyTorch|Python|Lightning|transformers|Accelerate) )\d\.\d+",
    r"\d[\d.]* M (?:parameters|coordinates|are rows|of them in two tables|without its)",
)

#: Rows of tables that tests compare by these very patterns.
ROWS: dict[str, tuple[re.Pattern[str], ...]] = {
    "docs/benchmarks.md": (
        test_figures.STEP,
        test_figures.CONVNET,
        *(re.compile(rf"^\| {re.escape(begin)}.*$", re.MULTILINE) for begin in test_figures.QUALITIES),
    ),
    "docs/local_steps.md": (test_further_figures.LOCAL,),
    "docs/sparse.md": (test_further_figures.TABLES,),
}

#: Tables that no test compares with results, by the page, the heading and the first columns; and why.
UNCOMPARED: dict[tuple[str, str, tuple[str, ...]], str] = {
    ("docs/paper.md", "Time per step", ("method", "ResNet, P2P 2024")): "the paper's, from its public logs",
    ("docs/paper.md", "Quality", ("task", "default")): "the paper's, from its public logs",
    ("docs/local_systems.md", "Systems", ("preset", "what it adds")): "the papers' settings, which presets have",
    ("docs/presets.md", "At 8 ranks", ("preset",)): "test_the_pages_of_presets_are_what_their_command_writes",
    ("docs/presets.md", "Local steps", ("preset",)): "as above",
    ("docs/presets.md", "Optimizers, rules of training, topologies", ("system",)): "as above",
    ("docs/presets.md", "What is left out", ("system",)): "as above",
    ("docs/reliability.md", "What is promised, and how it is tested", ("promise",)): "limits that its tests hold",
    ("docs/reliability.md", "Measured", ("what",)): "each row has its command",
    ("docs/reliability.md", "Events", ("event",)): "printed by the command of the row on chaos",
    ("docs/sparse.md", "DeepFwFM on Criteo", ("strategy", "dense gradients, MB per step")): "of the command above it",
}

#: Figures that are no measurement, or that the command beside them reproduces. A comment says what they are.
ALLOWED: dict[str, tuple[str, ...]] = {
    "docs/reliability.md": (r"process group \(30 min\) \| the same, 10 min by default",),  # torch's defaults
    "README.md": (r"a quarter of a second .*? steps take 5 ms, 1 Gbit/s is as slow",),  # 20 Mbit/s times 250 ms over 5
    "docs/benchmarks.md": (r"to 89\.8 % of the validation images",),  # the target, which is in the table's heading
    "docs/auto.md": (
        # Constants of the rules, which tests/unit hold.
        r"waits for 1 % of its time|equal within 2 %|below 0\.8 `max_slowdown`",
        r"\(5 % at most\)|less than 25 %|at most 5 % longer|50 steps is 15 % longer|at most 5 % of all steps",
        r"3 bits, which need 0\.1 and more",  # a value of max_slowdown
    ),
    "docs/choosing.md": (
        r"at most 5 % more steps \(`max_slowdown=0\.05`\)",  # what the setting means
        r"0\.125 bits per coordinate more than 128",  # 16/64 - 16/128
        r"a bucket of 25 MiB",  # the bucket's size
    ),
    "docs/choosing_figures.md": (
        r"about 1\.15 times as long .*?--numel 1048576`\)",  # has its command
        r"One mean of 25 MiB",  # its size
    ),
    "docs/cli.md": (
        r"h100 3\.6tbit, a100 2\.4tbit, cpu 16gbit, else 200gbit|e\.g\. 120ms|such as 600GB/s",
    ),  # rates of the makers, examples
    "docs/elastic.md": (
        r"killed about every 20 s|members merge every 2 s|longer than the 20 s|again 5 s later",  # its settings
    ),
    "docs/experiments/convnet_cifar.md": (r"about 20 minutes of two cores",),  # what to expect, not a result
    "docs/experiments/deeplight_criteo.md": (r"With 90 % zeros",),  # what the column of the table is
    "docs/experiments/resnet_cifar.md": (r"is 40 times smaller",),  # 11.2 M over 0.27 M parameters
    "docs/frameworks.md": (
        r"wait for each other for 30 minutes",  # torch's default
    ),
    "docs/index.md": (r"below 1\.00, compression is faster",),  # how to read a column
    "recipes/README.md": (
        r"label smoothing 0\.1|take 0\.1 × processes|4 and 182 MB|0\.5 MB of English",  # settings, sizes
        r"about 1 kB each while they are hashed",  # a size
        r"AUC of 0\.807 there, the network comes to about 0\.70",  # of the fallback, by the page's first command for it
        r"n / 2 times the message",  # a formula
    ),
    "docs/local_steps.md": (
        r"its first 15 seconds",  # --most-seconds of the command
        r"is \+0\.00 ± 0\.56 points .*?\(`python recipes/compare\.py [^`]*`\)",  # has its command
    ),
    "docs/local_systems.md": (
        r"learning rate 0\.7, Nesterov momentum 0\.9|momentum 0\.4|Momentum of 0\.9",  # settings
    ),
    "docs/method.md": (
        r"ω ≤ 1\.5e-5",  # 2^-14 / (4 (1 + 2^-7))
        r"0\.08 for equal Gaussian ones",  # tests/statistics/test_systems.py
    ),
    "docs/paper.md": (
        # The paper's, or its logs'; or what the doctests of this page make of them.
        r"1\.56 times faster than QSGD and 1\.49 times than PowerSGD \(logs 2024\)",
        r"a ring 1\.5 times\. Let C .*? ring C \+ 0\.75h:",
        r"So 3\.56 would be about 1\.4 against an fp32 ring",
        r"by up to 2\.8 points of top-1",
        r"at 8 bits loses 9\.3 of perplexity, the exponential operator 0\.7",
        r"repeated 100 times; AUC is 0\.9999 on them",
        r"variance is 16 times too large",
        r'"n\^0\.17"',
    ),
    "docs/performance.md": (
        # Constants of the rules, which tests/unit hold.
        r"saves at least 5 % of a step|within 3 % of each other",
        r"all-reduces of 25 MiB|A bucket of 25 MiB",  # sizes of messages
        rf"{MEMORY_BYTES >> 20} MiB for each rank and stage",  # what is reserved
        r"less than 20 seconds besides",  # the limit of a probe
        # Rates of the makers.
        r"rated 3\.6tbit in each direction for an H100, 2\.4tbit for an A100, 16gbit for a CPU, and 200gbit",
    ),
    "docs/prediction.md": (
        r"16 to 33 MB|the 1 MB that a probe sends",  # sizes of messages
        r"up to 25 ms of latency",  # of the settings
        r"to end within 20 seconds",  # the limit of a probe
        r"within 10 % \(",  # a bound; how many are within it is compared
        r"they hold in 59 of the 64 settings",  # tests/unit/test_tcp_terms.py counts them
        r"segments of up to 1 MiB|a mean of 12 MiB",  # sizes
        # Settings.
        r"a queue of 141 ms \| a queue of 50 ms|A queue of 50 ms|between 50 and 400 ms of traffic",
        r"as with two from 5 MB on|holds 0\.31 MB at 50 Mbit/s",
        r"reached 9\.53 Gbit/s there",  # given with the rows
    ),
    "docs/sparse.md": (
        r"\(1\.6 m \+ 64\)|\(default 1\.0;",  # formulas and a default
        r"8\.3 bits where 2 % of the rows",  # test_gaps_of_rows_take_so_many_bits
        r"Of the 0\.30 MB, 0\.25 are the dense layers",  # 1.92 MB of 32 bits at 4.125 bits
    ),
    "docs/systems.md": (
        r"at most 1\.5 root mean squares|of which 5 % matter|λ = 0\.01|1\.6 m \+ 64",  # settings
        r"the all-reduce sends 1\.5\.",  # 2 (n - 1) / n
        r"F − F\* = 3\.5e-05 .*? 2\.8e-04\.",  # tests/docs/test_words_of_systems.py
        r"At 0\.001, a rate of pretraining",  # a row of the table
    ),
    "docs/theory.md": (
        # tests/statistics/test_eden.py
        r"off\sby 2\.5 % at 128 coordinates and 2 bits, and by 6 % at 1 bit|at most 32 coordinates are not small",
        r"Beside one that is 32 times .*? in\sblocks of 256, and 3 % at 3 bits in blocks of 128",
        r"lemma 3\.1|theorem 2\.1|section 2\.2",  # places in papers
        # tests/statistics/test_theory_page.py
        r"below 0\.36 of the largest|it is 0\.27, and less",
        r"correlation of 0\.5 and steps|below 1 % of the square error|correlation of 0\.95, 37 %",
        r"up to 1\.6 % larger",  # tests/statistics/test_estimators.py
        r"is 1\.5 times too large|\(4\.5, where 256 of them|within 5 % of ω",  # held by tests/statistics/test_eden.py
        r"ρ = 0\.1, without drift",  # an example
        r"these three presets need 1\.1 to 1\.2 bits more",  # the doctest above it
        r"1\.4 bits at 3\.12 \(`gqsgd_3bit`\), and 1\.7 at 2\.12",  # log2 of the errors of companded codes at 8 ranks
    ),
}


def left(page: str, text: str) -> list[str]:
    """The figures of a page that nothing accounts for."""
    sentences = list(test_figures.SENTENCES)
    with_tables = (test_figures_of_choosing, test_figures_of_pages)
    for module in (test_further_figures, test_figures_of_further_systems, *with_tables):
        sentences += module.SENTENCES.get(page, {})
    for checked in (checked for module in with_tables for checked in module.TABLES):
        if checked.page == page:
            text = text.replace(checked.table.source, "\n")
    for table in tables(page):
        keys = [key for key in UNCOMPARED if key[:2] == (page, table.heading)]
        if any(table.columns[: len(begin)] == begin for _, _, begin in keys):
            text = text.replace(table.source, "\n")
    for row in ROWS.get(page, ()):
        text = row.sub("", text)
    if page == "docs/preset_errors.md":  # test_the_pages_of_presets_are_what_their_command_writes
        text = text[: text.index("## Relative L2 error")]
    for pattern in (*sentences, *ALLOWED.get(page, ()), *EVERYWHERE):
        text = re.sub(spaced(pattern), "…", text, flags=re.DOTALL)
    return figures(text)


@pytest.mark.parametrize("page", PAGES)
def test_no_other_figure_is_quoted(page: str) -> None:
    assert left(page, text_of(page)) == []


def test_a_figure_is_noticed_in_a_sentence_a_table_and_the_words_of_a_picture() -> None:
    text = text_of("docs/index.md")
    for more in ("It is 3.5 times faster.", "| a | 12 % |", "![9 ms](x.png)", "The loss is 0.25 lower."):
        assert len(left("docs/index.md", f"{text}\n{more}\n")) == 1, more
    for code in ("`lr=0.25`", "```\n9 ms\n```", "\n    x = 0.25\n"):
        assert left("docs/index.md", f"{text}\n{code}\n") == []


def test_gaps_of_rows_take_so_many_bits() -> None:
    rows = np.flatnonzero(np.random.default_rng(0).random(2_000_000) < 0.02)
    assert round(8 * len(row_numbers.write(rows)) / len(rows), 1) == 8.3


@pytest.mark.parametrize("page", ALLOWED)
def test_what_is_allowed_is_there(page: str) -> None:
    text = text_of(page)
    assert [pattern for pattern in ALLOWED[page] if not re.search(spaced(pattern), text, re.DOTALL)] == []
    assert [key for key in UNCOMPARED if not Path(ROOT, key[0]).is_file()] == []
