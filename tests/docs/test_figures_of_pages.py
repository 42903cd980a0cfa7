"""Figures of the paper's page, of experiments, and of a few sentences elsewhere are those of benchmarks/results."""

from __future__ import annotations

import argparse
import re
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks import presets
from lightning_gqsgd.codecs import TrellisCodec
from lightning_gqsgd.predict.intervals import LONGEST, SHORTEST
from lightning_gqsgd.research.theory import omega_eden, tree_second_moment
from tests.docs.checks import Checked, Sentences, comparison_of, ends
from tests.docs.pages import text_of
from tests.docs.tables import RESULTS, cell, rows_of, saved_rows
from tests.docs.test_figures import convnet, convnet_seeds, convnet_target

PAPER, TRANSFORMER = "docs/paper.md", "docs/experiments/transformer_wikitext.md"


def link(page: str, column: str, strategy: str, heading: str, seeds: str = "1") -> str:
    """A cell of a page about trainings over links."""
    return cell(f"{page}_links", column, strategy=strategy, heading=heading, seeds=seeds)


def sooner(page: str, heading: str, seeds: str = "1") -> list[str]:
    """How much sooner 4 bits are at a quality than ddp, and than the best baseline, which is bf16."""
    return [
        link(page, column, "gqsgd_4bit", heading, seeds)
        for column in ("times sooner than ddp", "than the best baseline")
    ]


def shorter(heading: str, than: str) -> float:
    """How many times shorter steps of DeepFwFM are with 4 bits."""
    slow, fast = (
        float(link("deeplight_criteo", "step (ms)", name, heading).replace(",", "")) for name in (than, "gqsgd_4bit")
    )
    return slow / fast


def family(preset: str, column: str = "rel. L2 error") -> str:
    return cell("family", column, strategy=preset)


def accuracies() -> list[float]:
    return [float(row["accuracy (%)"]) for row in rows_of(RESULTS / "family.md")]


def dithered(dither: str) -> str:
    return cell("accuracy", "sparse, n = 8", bits="8", dither=dither, block="256")


def whole(strategy: str, column: str, heading: str) -> str:
    return cell("resnet_cifar_netlab", column, strategy=strategy, heading=heading)


def three_seeds(strategy: str, place: int) -> str:
    return link("transformer_wikitext", "perplexity", strategy, "100 Mbit/s", "3").split(" ± ")[place]


def exponential_sums(place: int) -> str:
    """The squared error of the tree on 4, 16 and 64 ranks."""
    text = " ".join((RESULTS / "exponential_sums.md").read_text().split())
    match = re.search(r"squared, ([\d.]+), ([\d.]+) and ([\d.]+) of the mean of 4, 16 and 64", text)
    assert match
    return match[place]


def votes(method: str, rounds: str = "30", steps: str = "15", column: str = "accuracy (%)") -> str:
    row = {"rounds of FedVote": rounds, "local steps": steps, "method": method}
    return cell("votes", column, **row)


def gossip(column: str, rate: str) -> str:
    return cell("gossip", column, case="gossip over the ring, 1 round", rate=rate)


def gaussian(preset: str) -> str:
    return cell("presets", "gaussian", preset=preset, n="8", steps="1")


def rho(preset: str) -> float:
    """The squared error of one rounding, where 8 ranks with noise alone have 15/8 of it."""
    return (float(gaussian(preset)) / 100) ** 2 / (15 / 8)


def behind(case: str) -> str:
    """Nats by which a case ends above ddp."""
    return cell("local_steps", "less ddp's", case=case, rate="none").partition(" ± ")[0]


def sparse(column: str) -> str:
    row = {"heading": "100 Mbit/s", "strategy": "gqsgd_4bit", "table's gradients": "sparse"}
    return cell("deeplight_criteo_sparse", column, **row)


def predicted(column: str, **wanted: object) -> list[float]:
    """A column of the predictions on four hosts, or on two for ``hosts=2``."""
    name = "prediction" if wanted.get("hosts") == 2 else "prediction_4_hosts"
    return [row[column] for row in saved_rows(name) if all(row[key] == value for key, value in wanted.items())]


def longer_with_codes() -> list[float]:
    """Percent by which steps of 8 and 4 bits on two hosts are longer than predicted, where links are fast."""
    found = []
    for case, rate in product(("gqsgd", "gqsgd_4bit"), ("1gbit", "none")):
        row = {"hosts": 2, "case": case, "rate": rate}
        pairs = zip(predicted("measured (ms)", **row), predicted("predicted (ms)", **row), strict=True)
        found += [100 * (measured / guess - 1) for measured, guess in pairs]
    return found


def losses_of_sockets(rate: str) -> float:
    """Time of a mean with 16 sockets on each channel, over that with one, and a queue of 50 milliseconds."""
    rows = [row for row in saved_rows("slow_rings") if (row["queue (ms)"], row["rate"]) == (50, rate)]
    times = {row["sockets per channel"]: row["time (s)"] for row in rows}
    return times[16] / times[1]


RING = "error of a ring's bytes (%)"


def of_other_clusters(*links: str, column: str = "error (%)", machines: str = "4 × L40S") -> list[float]:
    """Percent by which predictions of others' steps are off, without signs, on links of these names, or on all."""
    ours = [row for row in saved_rows("other_clusters") if row["measured by others"] == machines]
    return [abs(row[column]) for row in ours if not links or row["link"] in links]


def small(experiment: str, method: str, setting: str, quantity: str) -> str:
    """A figure of the smallest experiments."""
    return cell("systems", "value", experiment=experiment, method=method, setting=setting, quantity=quantity)


def penalised(optimizer: str, gradients: str, quantity: str) -> str:
    """What a training with an L1 penalty ends with."""
    return small("Adagrad with an L1 penalty", optimizer, gradients, quantity)


def shrinks(method: str, bits: int) -> float:
    return float(small("DGD-DEF", method, f"{bits} bits", "factor"))


SENTENCES: Sentences = {
    "docs/prediction.md": {
        r"a mean takes ([\d.]+) times as long .*? 0\.31 MB, ([\d.]+) times at 1\.25 MB": lambda: [
            losses_of_sockets("50mbit"),
            losses_of_sockets("200mbit"),
        ],
        r"measured steps have ([\d.]+) to ([\d.]+) times the predicted length": lambda: [SHORTEST, LONGEST],
        (
            r"Over the (\d+) rows, the median of the absolute errors is ([\d.]+) %, and the interval holds in (\d+)\. "
            r"On links of a known rate, the worst error is ([\d.]+) %\. Without the three terms, their median is "
            r"([\d.]+) % and the worst ([\d.]+) %"
        ): lambda: [
            len(of_other_clusters()),
            median(of_other_clusters()),
            sum(row["holds"] == "yes" for row in rows_of(RESULTS / "other_clusters.md")),
            max(of_other_clusters("1g", "50m")),
            median(of_other_clusters("1g", "50m", column=RING)),
            max(of_other_clusters("1g", "50m", column=RING)),
        ],
        r"link without a limit is off by (\d+) %": lambda: [max(of_other_clusters("unshaped"))],
        r"two hosts, the step of plain DDP is (\d+) % longer than predicted": lambda: [
            mean(
                (
                    100 * (measured / guess - 1)
                    for measured, guess in zip(
                        predicted("measured (ms)", hosts=2, rate="50mbit", case="ddp"),
                        predicted("predicted (ms)", hosts=2, rate="50mbit", case="ddp"),
                        strict=True,
                    )
                )
            )
        ],
        r"prediction_4_hosts\.md\)\); (\d+) are within 10 %": lambda: [
            sum(abs(error) <= 10 for error in predicted("error (%)"))
        ],
        r"(\d+) of these (\d+) steps are longer than predicted": lambda: [
            sum(error < 0 for hosts in (2, 4) for error in predicted("error (%)", hosts=hosts)),
            sum(len(predicted("error (%)", hosts=hosts)) for hosts in (2, 4)),
        ],
        r"8 and 4 bits on two hosts are (\d+) to (\d+) % longer than predicted": lambda: ends(longer_with_codes()),
    },
    "docs/experiments/convnet_cifar.md": {
        (
            r"([\d.]+) % of the validation images ([\d.]+) times faster than `ddp` and ([\d.]+) times faster than "
            r"`ddp_bf16`\. Over three seeds, it ends ([\d.]+) points below `ddp`,\s+whose own seeds spread by (\d\.\d+)"
        ): lambda: [
            convnet_target(),
            *(convnet(column) for column in ("times sooner than ddp", "than the best baseline")),
            convnet_seeds("less ddp's").partition(" ± ")[0].strip("−"),
            convnet_seeds("mean (%)", "ddp").partition(" ± ")[2],
        ],
    },
    "docs/experiments/deeplight_criteo.md": {
        r"\[([\d.]+) % at 8 bits; under subtractive dither by ([\d.]+) %\]": lambda: [
            dithered("adaptive"),
            dithered("subtractive"),
        ],
        (
            r"A step is ([\d.]+) times faster with 4 bits .*? and ([\d.]+) times faster than under `ddp_bf16`; at 1 "
            r"Gbit/s ([\d.]+) and ([\d.]+) times"
        ): lambda: [
            shorter(heading, than)
            for heading in ("2 hosts, 100 Mbit/s", "2 hosts, 1 Gbit/s")
            for than in ("ddp", "ddp_bf16")
        ],
    },
    "docs/experiments/quickstart.md": {
        r"reach ([\d.]+) to ([\d.]+) % after 20 epochs": lambda: ends(accuracies()),
        r"([\d.]+) points are one image of 360": lambda: [100 / 360],
        r"error of (\d+) presets and two": lambda: [len(accuracies()) - 2],
    },
    "docs/experiments/resnet_cifar.md": {
        r"a step is ([\d.]+) times faster with 4 bits, and ([\d.]+) times with 8": lambda: [
            float(whole("ddp", "step (ms)", "200 Mbit/s")) / float(whole("gqsgd_4bit", "step (ms)", "200 Mbit/s")),
            float(whole("ddp", "step (ms)", "200 Mbit/s")) / float(whole("gqsgd", "step (ms)", "200 Mbit/s")),
        ],
        (
            r"common target ([\d.]+) times faster than `ddp` and ([\d.]+) times faster than `ddp_bf16`; at 1 Gbit/s "
            r"([\d.]+) and ([\d.]+) times"
        ): lambda: [*sooner("resnet_cifar", "2 hosts, 100 Mbit/s"), *sooner("resnet_cifar", "2 hosts, 1 Gbit/s")],
    },
    TRANSFORMER: {
        (
            r"that all reach ([\d.]+) times faster than `ddp` and ([\d.]+) times faster than `ddp_bf16`; at 1 Gbit/s "
            r"([\d.]+) and ([\d.]+) times"
        ): lambda: [
            *sooner("transformer_wikitext", "100 Mbit/s", "3"),
            *sooner("transformer_wikitext", "1 Gbit/s", "3"),
        ],
        (
            r"perplexity is ([\d.]+) ± ([\d.]+) under `ddp`, ([\d.]+) ± ([\d.]+) with 8 bits and "
            r"([\d.]+) ± ([\d.]+) with 4"
        ): lambda: [three_seeds(name, place) for name in ("ddp", "gqsgd", "gqsgd_4bit") for place in (0, 1)],
    },
    "docs/index.md": {
        r"\[([\d.]+) at 8 bits and ([\d.]+) at 4\]": lambda: [family("gqsgd"), family("gqsgd_4bit")],
    },
    "docs/method.md": {
        r"D/\(1−D\): ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+) at 1, 2, 3, 4 bits": lambda: [
            omega_eden(bits) for bits in (1, 2, 3, 4)
        ],
        r"ω in blocks of 1024 coordinates: ([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+) at 1, 2, 3, 4 bits": lambda: [
            TrellisCodec(bits).omega(1024) for bits in (1, 2, 3, 4)
        ],
        r"([\d.]+) to ([\d.]+) ‖mean‖² at any n for gradients that are alike": lambda: [
            tree_second_moment(n, aligned=True) for n in (2, 1024)
        ],
    },
    PAPER: {
        r"times that are (\d+) to (\d+) % shorter than those of the logs over SHM": lambda: ends(
            of_other_clusters("SHM", machines="4 × A100")
        ),
        r"the squared error is ([\d.]+), ([\d.]+) and ([\d.]+) of the mean's at 4, 16": lambda: [
            exponential_sums(place) for place in (1, 2, 3)
        ],
    },
    "docs/systems.md": {
        (
            r"loss and penalty are ([\d.]+) with .*? and ([\d.]+) with .*?, with ([\d.]+) and ([\d.]+) zeros, .*? end "
            r"at ([\d.]+) and ([\d.]+), and at ([\d.]+) and ([\d.]+) if"
        ): lambda: [
            penalised(optimizer, gradients, quantity)
            for gradients, quantity in (
                ("gqsgd_4bit", "loss + penalty"),
                ("gqsgd_4bit", "zeros"),
                ("ternary, clipped", "loss + penalty"),
                ("ternary, not clipped", "loss + penalty"),
            )
            for optimizer in ("CMDAdagrad", "RDAAdagrad")
        ],
        (
            r"the factor is ([\d.]+) at 1 to 8 bits, .*? has ([\d.]+) at 1 bit, diverges at 2, and has ([\d.]+) at 3\. "
            r".*? has ([\d.]+) at 1 bit"
        ): lambda: [
            shrinks("DGD-DEF", 8),
            shrinks("classic error feedback", 1),
            shrinks("classic error feedback", 3),
            shrinks("DGD-DEF without rotation", 1),
        ],
        r"FedVote has ([\d.]+) %, FedPAQ at 2 bits ([\d.]+) % and `signsgd_ef` ([\d.]+) %": lambda: [
            votes("FedVote"),
            votes("FedPAQ, 2 bits"),
            votes("signSGD with error feedback", steps="–"),
        ],
        r"binary model, which has ([\d.]+) % after 30 rounds there": lambda: [
            votes("FedVote", column="of the signs (%)")
        ],
        r"steps FedVote has ([\d.]+) % and FedPAQ at 2 bits ([\d.]+) % with half the bytes": lambda: [
            votes("FedVote", "1", "100"),
            votes("FedPAQ, 2 bits", "1", "100"),
        ],
        r"takes ([\d.]+) to ([\d.]+) times as long as an all-reduce, and the models end (\d+) %": lambda: [
            gossip("step / all-reduce's", "100mbit"),
            gossip("step / all-reduce's", "1gbit"),
            gossip("models apart (%)", "1gbit"),
        ],
    },
    "docs/theory.md": {
        r"\[([\d.]+) % of the mean's square\]\(\S+\) \(([\d.]+) % in the norm\)": lambda: [
            float(cell("accuracy", "gaussian, n = 8", bits="4", dither="adaptive", block="256")) ** 2 / 100,
            cell("accuracy", "gaussian, n = 8", bits="4", dither="adaptive", block="256"),
        ],
        r"ρ is ([\d.]+)e-5, ([\d.]+) and ([\d.]+) at 8, 4 and 3 bits": lambda: [
            rho("gqsgd") * 1e5,
            rho("gqsgd_4bit"),
            rho("gqsgd_3bit"),
        ],
        (
            r"At ([\d.]+), ([\d.]+) and ([\d.]+) bits, `gqsgd`, `gqsgd_4bit` and `gqsgd_2bit` have r = ([\d.]+), "
            r"([\d.]+) and ([\d.]+) on 8 ranks"
        ): lambda: [
            *(
                cell("presets", "bits", preset=preset, n="8", steps="1")
                for preset in ("gqsgd", "gqsgd_4bit", "gqsgd_2bit")
            ),
            float(gaussian("gqsgd")) / 100,
            float(gaussian("gqsgd_4bit")) / 100,
            float(gaussian("gqsgd_2bit")) / 100,
        ],
    },
    "docs/local_steps.md": {
        r"H = 32 at 4 bits sends (\d+) times less than": lambda: [
            float(cell("local_steps", "sent (MB)", case="ddp", rate="none"))
            / float(cell("local_steps", "sent (MB)", case="diloco, H=32, 4 bits", rate="none"))
        ],
        r"H = 32 is ([\d.]+) nats behind .*? plain mean \(FedPAQ\) are ([\d.]+) behind": lambda: [
            behind("diloco, H=32, 4 bits"),
            (float(behind("diloco, H=128, 4 bits")) + float(behind("fedpaq, H=16, 4 bits"))) / 2,
        ],
        r"Momentum from the start costs ([\d.]+) nats": lambda: [
            behind("diloco, H=32, 4 bits, momentum from the start")
        ],
        r"no step waits, on any of these links: at most ([\d.]+) % of the time": lambda: [
            max(
                row["waiting (%)"] for row in rows_of(RESULTS / "local_steps.md") if "fragments, delay 4" in row["case"]
            )
        ],
        r"The price of the delay is ([\d.]+) nats": lambda: [
            float(behind("diloco, H=32, 4 bits, 4 fragments, delay 4")) - float(behind("diloco, H=32, 4 bits"))
        ],
    },
    "docs/sparse.md": {
        r"sparse rows at 4 bits are ([\d.]+) times faster than .*? and ([\d.]+) times faster than dense": lambda: [
            sparse("sparse `ddp` / step"),
            sparse("dense `ddp` / step"),
        ],
    },
}


test_sentences_say_what_the_tables_say = comparison_of(SENTENCES)


def claims_row(row: tuple[str, ...]) -> list[str | None]:
    """Only the package's own claims: those of the paper rest on its logs."""
    if not row[0].startswith("ours"):
        return [None] * 3
    rate = "100mbit" if "100 Mbit/s" in row[0] else "none"
    words = "{}, {} against `ddp`; {}, {} against `ddp_bf16`".format(
        *(
            cell("training_netlab_mlp", f"{than} / step", case=f"{case} (gather)", hosts="2", rate=rate)
            for than in ("ddp", "ddp_bf16")
            for case in ("gqsgd", "gqsgd_4bit")
        )
    )
    return [None, words, None]


def bucket_row(row: tuple[str, ...]) -> list[str | None]:
    """One bucket on four hosts at 1 Gbit/s."""
    case = row[0].partition(" (")[0].replace("`", "")
    page, where = ("exponential_sums", {}) if case.startswith("tree") else ("reducers_netlab", {"rate": "1gbit"})
    return [None, *(cell(page, f"{than} / time", case=case, hosts="4", **where) for than in ("fp32", "bf16"))]


def quality_row(row: tuple[str, ...]) -> list[str | None]:
    """Our results beside the paper's."""
    strategies = [name.partition(" ")[0].strip("`") for name in QUALITY.table.columns[1:]]
    said: list[str | None] = [None]
    for strategy, shown in zip(strategies, row[1:], strict=True):
        if shown == "–":
            said.append(None)
        elif "ResNet-20" in row[0]:
            said.append(whole(strategy, "accuracy (%)", "Three seeds"))
        elif "ResNet-18" in row[0]:
            said.append(link("resnet_cifar", "accuracy (%)", strategy, "2 hosts, 100 Mbit/s"))
        elif "DeepFwFM" in row[0]:
            wanted = {"heading": "100 Mbit/s", "strategy": strategy, "table's gradients": "dense"}
            said.append(cell("deeplight_criteo_sparse", "AUC", **wanted))
        elif "transformer" in row[0]:
            said.append(link("transformer_wikitext", "perplexity", strategy, "100 Mbit/s", "3"))
        else:
            said.append(family(strategy, "accuracy (%)" if "digits" in row[0] else "rel. L2 error"))
    return said


def votes_row(row: tuple[str, ...]) -> list[str | None]:
    found = partial(small, "FedVote", row[0], f"{row[1]} attackers")
    return [None, None, *(found(quantity) for quantity in ("accuracy", "of the binary model", "kB sent per worker"))]


def graph_row(row: tuple[str, ...]) -> list[str | None]:
    found = partial(small, "Graphs of 8 ranks", "gossip", row[0].partition(" ")[0])
    return [None, found("neighbours"), found("contraction")]


SYSTEMS = "docs/systems.md"
QUALITY = Checked(PAPER, "This package's figures on small tasks", ("task", "`ddp`"), quality_row)
TABLES = [
    Checked(PAPER, "What is claimed, and on what it rests", ("claim",), claims_row),
    Checked(PAPER, "Time per step", ("method", "against fp32"), bucket_row),
    QUALITY,
    Checked(SYSTEMS, "FedVote", ("votes",), votes_row),
    Checked(SYSTEMS, "Gossip and DPSVRG", ("graph of 8 ranks",), graph_row),
]


@pytest.mark.parametrize("checked", TABLES, ids=lambda checked: f"{checked.page} {checked.begin}")
def test_tables_are_those_of_the_results(checked: Checked) -> None:
    checked.compare()


def test_the_pages_of_presets_are_what_their_command_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the results' JSON, as which the results' page has them, too; the picture takes long, and is not drawn."""
    monkeypatch.setattr(presets, "save_figure", lambda *_: None)
    options = argparse.Namespace(from_results=True, save=False, docs=str(tmp_path / "presets.md"))
    report = presets.measure(options)
    for page in ("presets.md", presets.ERRORS):
        assert (tmp_path / page).read_text(encoding="utf-8") == text_of(f"docs/{page}"), presets.COMMAND
    results = RESULTS / "presets.md"
    assert [[*row.values()][1:] for row in rows_of(results)] == report._texts()
    assert [note for note in report.notes if note not in results.read_text()] == []
