"""Every measured figure in README and on the overview of benchmarks is that of a table in benchmarks/results."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_kernels import layouts_of, stage_bytes
from lightning_gqsgd import presets
from lightning_gqsgd.config.resolving import resolve, setting_of
from tests.docs.checks import compare_sentence, ends, spaced
from tests.docs.pages import PAGES, text_of
from tests.docs.tables import RESULTS, cell

ROOT = Path(__file__).resolve().parents[2]
RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "no limit": "none"}
NETWORKS = {"dense layers": "training_netlab_mlp", "ResNet-18": "training_netlab_resnet18"}
#: Coordinates of the gradient of which bytes are counted.
NUMEL = 1 << 22


def gaussian_error(preset: str) -> str:
    """Percent by which the mean of eight Gaussian gradients is off under a preset."""
    facts = json.loads((RESULTS / "presets.json").read_text())["facts"]
    (fact,) = (f for f in facts if (f["case"], f["ranks"], f["kind"], f["steps"]) == (preset, 8, "gaussian", 1))
    return str(100 * fact["error"])


def auto(rate: str, page: str = "auto") -> str:
    return cell(page, "ddp / step", case="gqsgd_auto", hosts="2", rate=rate)


def prediction(number: int, page: str = "prediction") -> str:
    """The numbers of the last sentence below a table of predictions, in order."""
    text = (RESULTS / f"{page}.md").read_text()
    match = re.search(
        r"Over (\d+) settings, the median of the absolute errors is ([\d.]+) %, the worst is ([\d.]+) %", text
    )
    assert match
    return match[number]


def below_ddp(strategy: str) -> float:
    """Points by which three seeds of the converged network end below plain DDP's on the mean."""
    return -float(convnet_seeds("less ddp's", strategy).partition(" ± ")[0].replace("−", "-"))


def moved(dtype: torch.dtype) -> float:
    """Bytes per coordinate that the GPU's kernels read and write in encoding, reducing and decoding 8 bits, 8 ranks."""
    setting = setting_of(resolve(presets.make_config("gqsgd"), 8), 8, dtype)
    layouts = [layout for _, layout in layouts_of(NUMEL, setting)]
    return sum(stage_bytes(layouts, dtype.itemsize, 8).values()) / NUMEL


def speeds_on_one_machine() -> list[str]:
    """Times faster than plain DDP: 8 and 4 bits, two networks."""
    return [
        cell(page, "ddp / step", case=f"{case} (gather)", hosts="1")
        for page in ("training_one_machine_mlp", "training_one_machine_resnet18")
        for case in ("gqsgd", "gqsgd_4bit")
    ]


def convnet(column: str, strategy: str = "gqsgd_4bit", link: str = "20 Mbit/s") -> str:
    return cell("convnet_cifar_links", column, heading=f"2 hosts, {link}", strategy=strategy)


def convnet_target() -> str:
    """The accuracy that all strategies reach."""
    match = re.search(r"minutes to ([\d.]+) %", (RESULTS / "convnet_cifar_links.md").read_text())
    assert match
    return match[1]


def convnet_seeds(column: str, strategy: str = "gqsgd_4bit") -> str:
    return cell("convnet_cifar_links", column, heading="Three seeds", strategy=strategy)


def local(case: str) -> str:
    """How many times sooner than plain DDP a case is at plain DDP's loss at 10 Mbit/s."""
    return cell("local_steps", "ddp / that", case=f"{case} *", rate="10mbit")


def local_to_4_bits() -> str:
    return str(Decimal(local("diloco, H=16, 4 bits")) / Decimal(local("gqsgd_4bit")))


#: Sentences with figures: what the sentence says, and what the tables say.
SENTENCES = {
    (
        r"off by ([\d.]+) % at 8 bits, ([\d.]+) % at 4 and ([\d.]+) % at 3, without bias, and by ([\d.]+) % at\s2 bits"
    ): lambda: [
        gaussian_error("gqsgd"),
        gaussian_error("gqsgd_4bit"),
        gaussian_error("gqsgd_3bit"),
        gaussian_error("gqsgd_2bit"),
    ],
    r"reaches ([\d.]+) % accuracy ([\d.]+) times sooner than ddp, and ([\d.]+) times sooner than ddp_bf16": lambda: [
        convnet_target(),
        convnet("times sooner than ddp"),
        convnet("than the best baseline"),
    ],
    (
        r"no number of bits ends more than ([\d.]+) points below ddp, and the seeds of ddp itself spread by ([\d.]+)"
    ): lambda: [
        max(map(below_ddp, ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit"))),
        convnet_seeds("mean (%)", "ddp").partition(" ± ")[2],
    ],
    (
        r"8, 4 and 2 bits end ([\d.]+), ([\d.]+) and ([\d.]+) points below ddp, 3 bits end ([\d.]+) above it, and "
        r"ddp's own seeds spread by ([\d.]+)"
    ): lambda: [
        below_ddp("gqsgd"),
        below_ddp("gqsgd_4bit"),
        below_ddp("gqsgd_2bit"),
        -below_ddp("gqsgd_3bit"),
        convnet_seeds("mean (%)", "ddp").partition(" ± ")[2],
    ],
    r"move ([\d.]+) bytes per fp32 value and ([\d.]+) per bf16 value": lambda: [
        moved(torch.float32),
        moved(torch.bfloat16),
    ],
    r"one machine, steps have ([\d.]+) to ([\d.]+) times the speed of `ddp`": lambda: ends(speeds_on_one_machine()),
}


def pages_with(pattern: str) -> list[str]:
    return [page for page in PAGES if re.search(spaced(pattern), text_of(page))]


@pytest.mark.parametrize("pattern", SENTENCES)
def test_sentences_say_what_the_tables_say(pattern: str) -> None:
    pages = pages_with(pattern)
    assert pages, "the sentence is gone: take its pattern out, too"
    for page in pages:
        compare_sentence(page, pattern, SENTENCES[pattern])


STEP = re.compile(
    r"^\| (?P<network>dense layers|ResNet-18) \| (?P<hosts>\d) \| (?P<link>[^|]+) \| (?P<cells>.*) \|$", re.MULTILINE
)


def step_cells(network: str, hosts: str, link: str) -> list[str]:
    """What a row of step times has to say: milliseconds, and times faster than ddp and than ddp_bf16."""
    cells = []
    reducer = "gather" if hosts == "2" else "two_shot"
    for name in ("ddp", "ddp_bf16", "powersgd of rank 4", "gqsgd", "gqsgd_4bit"):
        case = f"{name} ({reducer})" if name.startswith("gqsgd") else name
        row = {"case": case, "hosts": hosts, "rate": RATES[link]}
        cells.append(cell(NETWORKS[network], "step (ms)", **row))
        if case.startswith("gqsgd"):
            ratios = (cell(NETWORKS[network], f"{than} / step", **row) for than in ("ddp", "ddp_bf16"))
            cells[-1] += " ({}×, {}×)".format(*ratios)
    return cells


def test_step_times_are_those_of_the_tables() -> None:
    rows = list(STEP.finditer((ROOT / "docs/benchmarks.md").read_text()))
    assert len(rows) == 7
    for row in rows:
        assert row["cells"].split(" | ") == step_cells(row["network"], row["hosts"], row["link"].strip())


def test_powersgd_is_fastest_on_the_slowest_links_and_slower_than_ddp_on_fast_ones() -> None:
    for network in NETWORKS:
        slow, fast = (step_cells(network, "2", link) for link in ("100 Mbit/s", "no limit"))
        assert float(slow[2]) < min(float(one.split()[0]) for one in slow[:2] + slow[3:])
        assert float(fast[2]) > float(fast[0])


#: What rows about the quality of trainings begin with.
QUALITIES = (
    "transformer, WikiText-2: perplexity",
    "small network, CIFAR-10",
)


#: The presets of few bits, in the order of the columns of tables.
FEW_BITS = ("gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit")


def test_qualities_at_few_bits_are_those_of_the_tables() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text()
    for begin, heading, column in (
        ("small network, CIFAR-10", "Small convolutional network, CIFAR-10", "accuracy (%)"),
        ("transformer, WikiText-2: perplexity after 600", "Transformer, WikiText-2", "perplexity"),
    ):
        match = re.search(rf"^\| {re.escape(begin)}[^|]* \| (.*) \|$", text, re.MULTILINE)
        assert match, begin
        for said, strategy in zip(match[1].split(" | "), ("ddp", *FEW_BITS), strict=True):
            assert said == cell("few_bits", column, strategy=strategy, heading=heading), (begin, strategy)


CONVNET = re.compile(
    r"^\| (\d+ [MG]bit/s) \| ([\d. ±]+), ([\d. ±]+), ([\d. ±]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE
)


def test_figures_of_the_small_network_are_those_of_the_table() -> None:
    rows = CONVNET.findall((ROOT / "docs/benchmarks.md").read_text())
    assert len(rows) == 3
    for link, *said in rows:
        accuracies = [convnet("accuracy (%)", strategy, link) for strategy in ("ddp", "ddp_bf16", "gqsgd_4bit")]
        ratios = [convnet(column, link=link) for column in ("times sooner than ddp", "than the best baseline")]
        assert said == accuracies + ratios, link
