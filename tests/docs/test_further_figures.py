"""Measured figures on further pages of the documentation are those of the tables that the pages link to."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytest

from benchmarks.registered import SPEEDS
from lightning_gqsgd.predict import sharded, timeline
from lightning_gqsgd.predict.intervals import LONGEST, SHORTEST
from tests.docs.checks import Sentences, comparison_of, ends, rounded
from tests.docs.tables import RESULTS, cell, rows_of, saved_rows
from tests.docs.test_figures import auto, convnet_seeds, local, local_to_4_bits, prediction

ROOT = Path(__file__).resolve().parents[2]


def speeds_of_two_threads(*, alone: bool) -> list[float]:
    rows = [row for row in saved_rows("codec_threads") if row["threads"] == 2]
    return [row["one thread / time"] for row in rows if row["case"].startswith("kernels alone") == alone]


def speed_of_auto(rate: str) -> str:
    return cell("auto", "best fixed / step", case="gqsgd_auto", rate=rate)


def of_resnet18(says: str) -> list[float]:
    """Times the speed of the best fixed choice, of the ResNet-18 cases whose names match."""
    rows = rows_of(RESULTS / "auto_resnet18.md")
    return [float(row["best fixed / step"]) for row in rows if re.search(says, row["case"])]


def errors(rate: str | None = None) -> list[float]:
    """Percent by which predictions are off, without signs, as they were before the table rounded them."""
    return [abs(row["error (%)"]) for row in saved_rows("prediction") if rate in (None, row["rate"])]


#: How 8 bits travel between two hosts of two ranks: what is taken, and the other way.
TWO_RANKS = ("gqsgd (hierarchical)", "gqsgd on one level (two_shot)")


def of_two_ranks(case: str, rate: str) -> str:
    """Times faster than plain DDP, of a training step on two hosts of two ranks."""
    return cell("training_netlab_mlp_2_ranks_per_host", "ddp / step", case=case, rate=rate)


#: A cell of milliseconds, and times faster in brackets.
IN_BRACKETS = r" \| (\d+) \(([\d.]+)×\)"
#: Ways in which two processes of one machine average, in the order of the page's table.
IN_ONE_MACHINE = ("gqsgd over Gloo", "gqsgd", "gqsgd_4bit over Gloo", "gqsgd_4bit")


def in_one_machine(network: str) -> list[str]:
    """What a row says of two processes of one machine: milliseconds, and times faster than plain DDP."""
    page = f"training_one_machine_{network}"
    cells = product(IN_ONE_MACHINE, ("step (ms)", "ddp / step"))
    return [
        cell(page, "step (ms)", case="ddp"),
        *(cell(page, column, case=f"{case} (gather)") for case, column in cells),
    ]


def on_four_hosts(case: str) -> str:
    return cell("local_steps_4_hosts", "loss at the end", case=case, rate="none")


def to_the_loss_of_local_steps(case: str) -> str:
    """Seconds at 10 Mbit/s on four hosts until a case is where averages every 16 steps end."""
    saved = json.loads((RESULTS / "local_steps_4_hosts.json").read_text())["4 hosts, 10mbit"]
    end = saved["diloco, H=16, 4 bits"][0]["losses"][-1]
    (run,) = saved[case]
    return str(next(second for second, loss in zip(run["seconds"], run["losses"], strict=True) if loss <= end))


def of_rival(column: str, way: str) -> str:
    return cell("rival_trainings", column, way=way, rate="100mbit")


def registered(number: int) -> list[dict[str, Any]]:
    """The measured rows of a set of predictions."""
    return [row for row in saved_rows("registered") if row["set"] == number and row["inside"]]


def inside(number: int) -> int:
    return sum(row["inside"] == "yes" for row in registered(number))


def off(number: int) -> float:
    """Median of the absolute errors in percent."""
    return median(abs(row["error (%)"]) for row in registered(number))


def width(row: dict[str, Any]) -> float:
    """An interval's width over its predicted step."""
    shortest, longest = map(float, row["interval (ms)"].split(" to "))
    return (longest - shortest) / row["predicted (ms)"]


def longer(number: int, model: str, link: str, hosts: str = "2 × 1") -> list[float]:
    """Measured over predicted steps of the rows that lie outside."""
    where = {"model": model, "link": link, "hosts × ranks": hosts, "inside": "no"}
    rows = [row for row in registered(number) if all(row[key] == value for key, value in where.items())]
    return [row["measured (ms)"] / row["predicted (ms)"] for row in rows]


def goodput(way: str) -> str:
    return cell("goodput", "goodput", way=way, seed="0")


def of_elastic(column: str) -> list[float]:
    """Of all schedules of kills."""
    return [float(row[column]) for row in rows_of(RESULTS / "goodput.md") if row["way"] == "elastic"]


#: Columns of the least and the largest loss of all seeds.
OF_SEEDS = ("lowest", "highest")
#: Ways that are quoted.
EQUAL_SAMPLES = ("elastic, rounds of 16 steps", "ddp")


def at_equal_samples(column: str, way: str, page: str = "elastic_losses") -> str:
    return cell(page, column, way=way)


def of_dither(column: str, dither: str = "companded, adaptive (default)") -> str:
    """At 8 bits."""
    return cell("tolerance", column, dither=dither, bits="8")


def passed(column: str, dither: str = "companded, adaptive (default)") -> list[str]:
    """How many cases of the grid pass, and of how many."""
    first, *_, last = of_dither(column, dither).split()
    return [first, last]


def on_a_gpu(column: str, case: str) -> str:
    """Of a training step."""
    return cell("training_netlab_resnet18_h200", column, case=case)


#: Ways of averaging, in the order of the page's table.
ON_A_GPU = ("no communication", "ddp", "ddp_bf16", "gqsgd (gather)", "gqsgd_4bit (gather)")


def host_time(bucket: str) -> str:
    """Microseconds of processor for a bucket at 8 bits."""
    return cell("host_time", "each other one (us)", configuration="gqsgd", bucket=bucket)


#: Ways to train the language model.
DILOCO = "DiLoCo, H = 32, 4 bit"
MULOCO = "MuLoCo, H = 32, 2 bit"


def trained(way: str, column: str = "loss at the end") -> float:
    """What a training of the language model ends with."""
    return float(cell("language_model", column, way=way))


def trained_once(way: str, rate: float = 0.0005, seed: int = 0) -> float:
    """What one training of the language model ends with, with one of its learning rates and seeds."""
    file = f"{way.replace(' ', '_')}_{rate}_seed_{seed}.json"
    curve = json.loads((RESULTS / "language_model" / file).read_text())
    return float(curve[-1][2])


#: Ways of averaging, in the order of the sentences about fine-tuning.
TUNED = ("ddp", "8 bit", "4 bit", "2 bit")


def tuned(trained: str, way: str, column: str = "right (%)") -> str:
    """What fine-tuning ends with."""
    return cell("fine_tuning", column, trained=trained, way=way)


def spread_of_seeds(trained: str) -> float:
    """Points between the seeds of a way that differ most."""
    return max(float(tuned(trained, way, "highest")) - float(tuned(trained, way, "lowest")) for way in TUNED)


def of_kernels(stage: int, case: str = "8 bit") -> str:
    """Microseconds of the kernels for GPUs at 25 MB of fp32: encoding, reducing or decoding, in this order."""
    return cell("kernels_cuda_h200", "time (us)", case=case, MB="25", dtype="float32").split(" / ")[stage]


def predicted_sharded(*pages: str) -> list[float]:
    """The median and the largest of the absolute errors of predicted steps under FSDP2, in percent; how many steps are
    inside of their intervals, as `gqsgd advise` prints them, and of how many."""
    rows = [row for page in pages for row in saved_rows(page)]
    errors = [abs(row["error (%)"]) for row in rows]
    ratios = [row["step (ms)"] / row["predicted (ms)"] for row in rows]
    return [median(errors), max(errors), sum(SHORTEST <= ratio <= LONGEST for ratio in ratios), len(rows)]


#: By page and sentence, what the tables say.
SENTENCES: Sentences = {
    "docs/frameworks.md": {
        (
            r"means at 4 bits have ([\d.]+) times the speed of bf16 at 100 Mbit/s, and ([\d.]+) times at 1 Gbit/s"
        ): lambda: [
            cell("replicated_netlab", "bf16 / step", case="bf16, means 4 bit", rate="100mbit"),
            cell("replicated_netlab", "bf16 / step", case="bf16, means 4 bit", rate="1gbit"),
        ],
        r"gradients at 4 have ([\d.]+) times the speed of fp32, and ([\d.]+) times that of bf16": lambda: [
            cell("sharded_netlab", "fp32 / step", case="weights 8 bit, gradients 4 bit", rate="100mbit"),
            cell("sharded_netlab", "bf16 / step", case="weights 8 bit, gradients 4 bit", rate="100mbit"),
        ],
    },
    "docs/prediction.md": {
        (
            r"predictions are off by (\d+) % in the median and by (\d+) % at worst, and (\d+) of (\d+) steps lie "
            r"inside .*? by (\d+) % in the median of the errors and (\d+) % at worst, and (\d+) of (\d+) lie inside"
        ): lambda: [
            *predicted_sharded("sharded_nodes_netlab", "replicated_netlab"),
            *predicted_sharded("sharded_netlab"),
        ],
        (
            r"In sets 1 to 4, (\d+), (\d+), (\d+) and (\d+) of 60 .*? are ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) %"
        ): lambda: [*(inside(number) for number in range(1, 5)), *(off(number) for number in range(1, 5))],
        r"allow for a machine that takes ([\d.]+) to ([\d.]+) times .*? median interval is (\d+) % of": lambda: [
            *(float(end) for end in SPEEDS[4]),
            100 * median(map(width, registered(4))),
        ],
        (
            r"more than ([\d,]+) buckets or pieces, .*? from the (\d+)th on, three from the (\d+)th on, .*? from the "
            r"(\d+)th block and the (\d+)th piece on"
        ): lambda: [f"{timeline.MOST:,}", timeline.FINE, 2 * timeline.FINE, sharded._FINE_BLOCKS, sharded._FINE_PIECES],
        r"of two ranks, took ([\d.]+) and ([\d.]+) times as long as predicted": lambda: ends(
            longer(4, "mlp", "800mbit", "2 × 2")
        ),
        (
            r"Over (\d+) settings, the median of the absolute errors is ([\d.]+) % and the worst is "
            r"([\d.]+) %; (\d+) are"
        ): lambda: [*map(prediction, (1, 2, 3)), str(sum(error <= 10 for error in errors()))],
        (r"over (\d+) settings at .*?: the median is ([\d.]+) % and the worst ([\d.]+) %"): lambda: [
            prediction(number, "prediction_4_hosts") for number in (1, 2, 3)
        ],
        (r"The medians by rate are ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) %"): lambda: [
            median(errors(rate)) for rate in ("50mbit", "200mbit", "1gbit", "none")
        ],
        r"two threads have ([\d.]+) to ([\d.]+) times the speed of one": lambda: ends(
            speeds_of_two_threads(alone=False)
        ),
    },
    "docs/elastic.md": {
        (
            r"Members have ([\d.]+) to ([\d.]+) in five schedules of kills\. A member is back within ([\d.]+) s of .*? "
            r"DiLoCo has ([\d.]+) in fp32 and ([\d.]+) through .*? Averages in lock-step have ([\d.]+), and plain DDP "
            r"has ([\d.]+):"
        ): lambda: [
            *ends(of_elastic("goodput")),
            max(of_elastic("back (s)")),
            *(goodput(way) for way in ("torchft_diloco", "torchft_diloco_4bit", "lock_step", "ddp")),
        ],
        (
            r"end at ([\d.]+) nats per byte, between ([\d.]+) and ([\d.]+), where ddp has ([\d.]+), between ([\d.]+) "
            r"and ([\d.]+) .*?On WikiText-2, they end at ([\d.]+), and ddp at ([\d.]+) .*? ddp is ahead: "
            r"\[([\d.]+)\]\(\S+\) against ([\d.]+)\."
        ): lambda: [
            *(
                at_equal_samples(column, way, "elastic_losses_192000")
                for way in EQUAL_SAMPLES
                for column in ("loss", *OF_SEEDS)
            ),
            *(at_equal_samples("loss", way, "elastic_losses_wikitext2") for way in EQUAL_SAMPLES),
            *(at_equal_samples("loss", way) for way in reversed(EQUAL_SAMPLES)),
        ],
    },
    "README.md": {
        r"([\d.]+) to ([\d.]+) of those that the hosts make alone": lambda: ends(of_elastic("goodput")),
    },
    "docs/performance.md": {
        r"\| step \(ms\) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|": lambda: [
            on_a_gpu("step (ms)", case) for case in ON_A_GPU
        ],
        r"\| ddp / step \| \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|": lambda: [
            on_a_gpu("ddp / step", case) for case in ON_A_GPU[1:]
        ],
        (
            r"bucket of 25 MB at 8 bits, an H200 takes ([\d.]+) µs to encode, ([\d.]+) µs to reduce 8 messages of an "
            r"eighth of it, and ([\d.]+) µs to decode, where a copy takes ([\d.]+) µs"
        ): lambda: [
            of_kernels(0),
            of_kernels(1),
            of_kernels(2),
            of_kernels(0, "copy_"),
        ],
        r"The host takes (\d+) µs of processor for a bucket, .*?, and (\d+) µs with 60 parameters": lambda: [
            host_time(bucket) for bucket in ("one matrix", "60 parameters")
        ],
        (
            r"Over (\d+) settings of two hosts, the median of the absolute errors is ([\d.]+) % and "
            r"the worst is ([\d.]+)"
        ): lambda: [*map(prediction, (1, 2, 3))],
        (
            r"at 100 Mbit/s, 8 bits were ([\d.]+) times faster than plain DDP with `hierarchical` and ([\d.]+) times on"
        ): lambda: [of_two_ranks(case, "100mbit") for case in TWO_RANKS],
        r"\| \[dense layers\]\(\S+\) \| (\d+)" + 4 * IN_BRACKETS: lambda: in_one_machine("mlp"),
        r"takes (\d+) ms through shared memory, ([\d.]+) times as fast as `ddp`, and (\d+) ms over Gloo": lambda: [
            cell("training_one_machine_mlp", "step (ms)", case="native (native)"),
            cell("training_one_machine_mlp", "ddp / step", case="native (native)"),
            cell("training_one_machine_mlp", "step (ms)", case="native over Gloo (native)"),
        ],
        r"\| \[ResNet-18\]\(\S+\) \| (\d+)" + 4 * IN_BRACKETS: lambda: in_one_machine("resnet18"),
        r"At 1 Gbit/s they were ([\d.]+) and ([\d.]+) times faster": lambda: [
            of_two_ranks(case, "1gbit") for case in TWO_RANKS
        ],
    },
    "docs/benchmarks.md": {
        (
            r"validation loss ends at ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) nats per byte, where fp32 "
            r"ends at ([\d.]+) .*these ways has the learning rate ([\d.]+) and the.*With DiLoCo at 4 bits, the loss is "
            r"([\d.]+), the mean of both seeds, after a (\d+)th of"
        ): lambda: [
            *(trained_once(way) for way in ("ddp_bf16", "8 bit", "4 bit", "3 bit", "2 bit", "ddp")),
            trained("ddp", "learning rate"),
            trained(DILOCO),
            trained("ddp", "sent (MB)") / trained(DILOCO, "sent (MB)"),
        ],
        (
            r"with the second one, fp32 ends at ([\d.]+), and 8, 4, 3 and 2 bits end at ([\d.]+), ([\d.]+), "
            r"([\d.]+) and ([\d.]+)\..*ends at ([\d.]+) with the first seed, and with 0\.00025 at ([\d.]+)\."
        ): lambda: [
            *(trained_once(way, seed=1) for way in ("ddp", "8 bit", "4 bit", "3 bit", "2 bit")),
            trained_once("ddp", 0.001),
            trained_once("ddp", 0.00025),
        ],
        r"It ends at ([\d.]+), after a (\d+)th of fp32's bytes.*every step, the loss is ([\d.]+)\.": lambda: [
            trained(MULOCO),
            trained("ddp", "sent (MB)") / trained(MULOCO, "sent (MB)"),
            trained("ddp, Muon"),
        ],
        (
            r"plain DDP gets ([\d.]+) % of the test sentences right, and 8, 4 and 2 bits get ([\d.]+), ([\d.]+) and "
            r"([\d.]+) %, where seeds spread by up to ([\d.]+) points"
        ): lambda: [*(tuned("LoRA", way) for way in TUNED), spread_of_seeds("LoRA")],
        r"With all weights, it is ([\d.]+) %, and ([\d.]+), ([\d.]+) and ([\d.]+) %": lambda: [
            tuned("all weights", way) for way in TUNED
        ],
        (
            r"to shorten a step from (\d+) to (\d+) ms at 100 Mbit/s, and from (\d+) to (\d+) ms with all weights"
        ): lambda: [
            tuned(trained, way, "ms at 100 Mbit/s") for trained in ("LoRA", "all weights") for way in ("ddp", "4 bit")
        ],
    },
    "docs/auto.md": {
        (
            r"steps were ([\d.]+) and ([\d.]+) times faster\s+than plain DDP's, at ([\d.]+) and "
            r"([\d.]+) times the speed"
        ): lambda: [auto("100mbit"), auto("1gbit"), speed_of_auto("100mbit"), speed_of_auto("1gbit")],
        r"Its steps had ([\d.]+) to ([\d.]+) times the speed of the best fixed choice": lambda: ends(
            of_resnet18("^gqsgd_auto$")
        ),
        r"it kept plain DDP, at ([\d.]+) times its speed": lambda: [auto("none")],
    },
    "docs/local_steps.md": {
        (
            r"there ([\d.]+) times faster than `ddp`, ([\d.]+) times faster than\s+`gqsgd_4bit`, and at 2 bits ([\d.]+)"
        ): lambda: [local("diloco, H=16, 4 bits"), local_to_4_bits(), local("diloco, H=16, 2 bits")],
        r"At 100 Mbit/s it gets there ([\d.]+) times faster": lambda: [
            cell("local_steps", "ddp / that", case="diloco, H=16, 4 bits *", rate="100mbit")
        ],
        (r"`ddp` ends at ([\d.]+), `gqsgd_4bit` at ([\d.]+), H = 16 at ([\d.]+) and\s+H = 32 at ([\d.]+) \("): lambda: [
            on_four_hosts(case) for case in ("ddp", "gqsgd_4bit", "diloco, H=16, 4 bits", "diloco, H=32, 4 bits")
        ],
        (
            r"H = 16 is at its ([\d.]+) after (\d+) s, `gqsgd_4bit` needs (\d+) s for it, and `ddp` (\d+) minutes"
        ): lambda: [
            on_four_hosts("diloco, H=16, 4 bits"),
            to_the_loss_of_local_steps("diloco, H=16, 4 bits"),
            to_the_loss_of_local_steps("gqsgd_4bit"),
            str(float(to_the_loss_of_local_steps("ddp")) / 60),
        ],
    },
    "docs/choosing_figures.md": {
        (
            r"steps of `gqsgd_4bit` are ([\d.]+) times\s+faster .*? bf16 hook ([\d.]+) and .*? of rank 4 (\d+\.\d+)\."
        ): lambda: [of_rival("ddp / step", way) for way in ("gqsgd_4bit", "torch bf16 hook", "torch PowerSGD, rank 4")],
        (
            r"of 25 MiB at 4 bits takes ([\d.]+) ms with one connection, ([\d.]+) ms with two and ([\d.]+) ms with four"
        ): lambda: [
            cell("connections_netlab", "time (ms)", case=f"two_shot, 4 bit{more}")
            for more in ("", ", 2 connections", ", 4 connections")
        ],
        r"`gqsgd` passes (\d+) of (\d+) cases": lambda: passed("pass"),
        r"it passes (\d+) of (\d+) cases in which the mean": lambda: passed("a mean is zero"),
        r"and (\d+) of (\d+) if these coordinates are left out": lambda: passed("zeros left out"),
        r"keeps zeros and passes (\d+);": lambda: passed("pass", "linear, stochastic")[:1],
        (
            r"([\d.]+) % of the rows that no rank touches moved under `gqsgd`, by ([\d.]+) % .*?\(\+([\d.]+)\), .*? "
            r"rose by ([\d.]+)\."
        ): lambda: [
            of_dither("rows moved (%)"),
            of_dither("moved by (%)"),
            of_dither("less exact's").strip("+"),
            of_dither("untouched loss, less exact's").strip("+"),
        ],
        r"nearly twice as large, ([\d.]+) % where `gqsgd` has ([\d.]+) %": lambda: [
            of_dither("CNN trained (%)", "linear, stochastic"),
            of_dither("CNN trained (%)"),
        ],
    },
}


test_sentences_of_further_pages_say_what_the_tables_say = comparison_of(SENTENCES)


LOCAL = re.compile(
    r"^\| ([^|]+) \| ([\d.,]+) MB \| ([\d,]+) s \| ([\d,]+) s \| ([\d,]+) s \| ([\d.]+ ± [\d.]+) \| ([^|]*)\|$",
    re.MULTILINE,
)


def test_local_steps_took_what_their_table_says() -> None:
    rows = LOCAL.findall((ROOT / "docs" / "local_steps.md").read_text())
    assert len(rows) == 11
    for name, *said, loss, less in rows:
        case = name.strip("`").replace("DiLoCo", "diloco").replace("FedPAQ", "fedpaq")
        expected = [
            cell("local_steps", "sent (MB)", case=case, rate="none"),
            cell("local_steps", "training (s)", case=case, rate="none"),
            cell("local_steps", "training (s)", case=f"{case} *", rate="100mbit"),
            cell("local_steps", "training (s)", case=f"{case} *", rate="10mbit"),
        ]
        plain = [value.replace(",", "") for value in said]
        assert plain == [rounded(value, like) for value, like in zip(expected, plain, strict=True)], name
        assert loss == cell("local_steps", "loss at the end", case=case, rate="none")
        if case != "ddp":
            assert less.strip() == cell("local_steps", "less ddp's", case=case, rate="none").replace("-", "−"), name


TABLES = re.compile(r"^\| `(\w+)` \| (dense|sparse) \| ([^|]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


def test_trainings_of_sparse_tables_are_those_of_the_table() -> None:
    rows = TABLES.findall((ROOT / "docs" / "sparse.md").read_text())
    assert len(rows) == 4
    for strategy, kind, auc, *steps in rows:
        row = {"strategy": strategy, "table's gradients": kind}
        assert auc == cell("deeplight_criteo_sparse", "AUC", heading="100 Mbit/s", **row)
        links = ("100 Mbit/s", "1 Gbit/s")
        assert steps == [cell("deeplight_criteo_sparse", "step (ms)", heading=link, **row) for link in links]


#: Strategies with codes of which three seeds of the converged network were trained.
CODED = ("gqsgd", "gqsgd_4bit", "gqsgd_3bit", "gqsgd_2bit")


def converged(strategy: str, seed: int) -> float:
    """Percent of the test images that a committed run ends with."""
    file = RESULTS / "convnet_cifar_links" / "runs" / f"{strategy}-seed{seed}" / "result.json"
    return 100 * float(json.loads(file.read_text())["metrics"]["test/acc"])


def test_three_seeds_of_the_converged_network_are_those_of_its_runs_and_their_means() -> None:
    seeds = {}
    for strategy in ("ddp", "ddp_bf16", *CODED):
        said = partial(convnet_seeds, strategy=strategy)
        seeds[strategy] = [float(said(column=f"seed {seed} (%)")) for seed in range(3)]
        assert seeds[strategy][2] == round(converged(strategy, 2), 2)
        assert said(column="mean (%)") == f"{mean(seeds[strategy]):.2f} ± {stdev(seeds[strategy]):.2f}"
        if strategy != "ddp":
            less = [ours - ddp for ours, ddp in zip(seeds[strategy], seeds["ddp"], strict=True)]
            assert said(column="less ddp's") == f"{mean(less):.2f} ± {stdev(less):.2f}".replace("-", "−")


def seed_of_ddp(seed: int) -> float:
    return float(convnet_seeds(f"seed {seed} (%)", "ddp"))


def test_the_mean_loss_of_all_runs_with_codes_is_that_of_the_tables() -> None:
    less = [
        round(float(convnet_seeds(f"seed {seed} (%)", strategy)) - seed_of_ddp(seed), 2)
        for strategy in CODED
        for seed in range(3)
    ]
    below = [-value for value in less if value < 0]
    page = " ".join((RESULTS / "convnet_cifar_links.md").read_text().split())
    match = re.search(
        r"All (\d+) runs of 8 to 2 bits end ([\d.]+) points below .*?, with a standard error of ([\d.]+) points .*?, "
        r"and (\d+) of them below it by ([\d.]+) to ([\d.]+)\.",
        page,
    )
    assert match is not None
    error = stdev(less) / len(less) ** 0.5
    spread = [f"{end:.2f}" for end in ends(below)]
    assert match.groups() == (str(len(less)), f"{-round(mean(less), 4):.2f}", f"{error:.2f}", str(len(below)), *spread)


RUNS = sorted((RESULTS / "convnet_cifar_links" / "runs").iterdir())


@pytest.mark.parametrize(("strategy", "seed"), [(run.name[: -len("-seed0")], int(run.name[-1])) for run in RUNS])
def test_accuracies_of_the_converged_network_are_those_of_its_runs(strategy: str, seed: int) -> None:
    page = (RESULTS / "convnet_cifar_links.md").read_text()
    file = RESULTS / "convnet_cifar_links" / "runs" / f"{strategy}-seed{seed}" / "result.json"
    accuracy, sent = converged(strategy, seed), round(json.loads(file.read_text())["mb_sent"])
    ddp = seed_of_ddp(seed)
    difference = round(accuracy - ddp, 2) + 0.0  # no −0.00
    less = "–" if strategy == "ddp" else f"{difference:+.2f}".replace("-", "−")
    begun = f"| {strategy} | {seed} | {accuracy:.2f} | {less} |"
    (row,) = [line for line in page.splitlines() if line.startswith(begun)]
    assert f"| {sent:,} |" in row
