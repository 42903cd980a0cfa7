from __future__ import annotations

import csv
import io
import json
import locale
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text

from lightning_gqsgd.presets import PRESETS
from netlab.lab import NetLabError
from pictures.style import COLOURS
from recipes import compare as compare_script
from recipes.comparison import plan as planning
from recipes.comparison import runner
from recipes.comparison.embedding import dark, on_dark
from recipes.comparison.page import Section, headlines, write_page
from recipes.comparison.pairs import pair_table, pairs_of, write_pairs
from recipes.comparison.plan import CELL_FILE, Cell, make_plan
from recipes.comparison.plots import save_curves
from recipes.comparison.processes import command
from recipes.comparison.reporting import _fitting, _table, _title, _write_pairs, check_one_data_set
from recipes.comparison.results import (
    Run,
    cells,
    common_target,
    compare,
    contenders,
    headings,
    read_rows,
    write_tables,
)
from recipes.comparison.runner import LOG
from recipes.comparison.seeds_and_curves import write_curves, write_seeds
from recipes.errors import RecipeError
from recipes.files import METRICS_FILE, RESULT_FILE
from recipes.measuring import names
from recipes.measuring.amounts import megabytes_in_words, parameters_in_words
from recipes.measuring.metrics import ACCURACY, PERPLEXITY, Metric
from recipes.opening import print_in_any_locale
from recipes.strategies.choices import ALL, strategies
from recipes.training.continuing import read_configuration
from recipes.training.report import finish, over_rounds
from tests.recipes.conftest import ROOT, TINY, run_script
from tests.recipes.made_up_runs import made_up_run

# --- the plan ---------------------------------------------------------------------------------------------------------


def test_comma_lists_are_the_sweep_seed_by_seed(tmp_path: Path) -> None:
    plan = make_plan(["+exp=quickstart", "strategy=ddp,gqsgd", "seed=0,1", f"output={tmp_path}"])
    assert [(cell.variant, cell.seed) for cell in plan.cells] == [("ddp", 0), ("gqsgd", 0), ("ddp", 1), ("gqsgd", 1)]
    assert plan.folder == tmp_path / "quickstart"
    assert {cell.folder.name for cell in plan.cells} == {"ddp-seed0", "gqsgd-seed0", "ddp-seed1", "gqsgd-seed1"}
    assert plan.cells[3].overrides == ("+exp=quickstart", "strategy=gqsgd", "seed=1")
    assert plan.cells[3].config["seed"] == 1
    assert plan.cells[3].config["strategy"]["bits"] == 8


def test_other_lists_make_variants_with_telling_names() -> None:
    plan = make_plan(["+exp=quickstart", "strategy=gqsgd", "strategy.bits=2,4", "optimizer.lr=0.1"])
    assert [cell.variant for cell in plan.cells] == ["gqsgd bits=2", "gqsgd bits=4"]
    assert [cell.config["strategy"]["bits"] for cell in plan.cells] == [2, 4]
    named = make_plan(["+exp=quickstart", "strategy=gqsgd", "strategy.name=mine"])
    assert [cell.variant for cell in named.cells] == ["mine"]


def test_lists_in_brackets_are_values() -> None:
    plan = make_plan(["+exp=quickstart", "strategy=ddp", "model.blocks=[1,2]"])
    assert plan.cells[0].config["model"]["blocks"] == [1, 2]


def test_default_strategies() -> None:
    assert [cell.variant for cell in make_plan(["+exp=quickstart"]).cells] == ["ddp", "gqsgd"]


def test_all_is_every_preset_and_the_baselines_of_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ("ddp", "ddp_bf16", *PRESETS) == ALL
    readme = (ROOT / "recipes" / "README.md").read_text()
    assert re.search(rf"strategy=all trainer.devices=4 +# {len(ALL)} runs\n", readme)
    (choices,) = [line for line in readme.splitlines() if line.startswith("| `strategy` |")]
    assert re.findall(r"`(\w+)`", choices)[1:] == strategies()
    monkeypatch.setattr(planning, "ALL", ("ddp", "dore", "terngrad"))  # each takes its time to compose
    plan = make_plan(["+exp=quickstart", "strategy=all", "trainer.devices=4"])
    assert [cell.variant for cell in plan.cells] == ["ddp", "dore", "terngrad"]
    assert {cell.config["trainer"]["devices"] for cell in plan.cells} == {4}
    assert plan.cells[-1].overrides == ("+exp=quickstart", "strategy=terngrad", "trainer.devices=4")
    (single,) = make_plan(["+exp=quickstart", "strategy=ddp", "title=all"]).cells
    assert single.config["title"] == "all"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["+exp=quickstart", "strategy=ddp,all"], "strategy=ddp,all: 'all' includes the others; take strategy=all"),
        (["+exp=quickstart", "trainer.max_epochs=0"], "trainer.max_epochs=0 is out of range"),
        (["strategy=ddp"], r"\+exp=NAME, one of convnet_cifar, deeplight_criteo, quickstart"),
        (["+exp=quickstart", "strategy=dpp"], "strategy=dpp is not a strategy; did you mean 'ddp'"),
        (["+exp=quickstart", "optimizer.rate=1"], "rate"),
        (["+exp=quickstart", "target=90"], r"target=90 is out of range.*target=0\.9"),
        (["+exp=quickstart", "target=high"], "target='high' cannot be read"),
        (["+exp=quickstart", "hardware=multi_node"], r"hardware=multi_node: .* take python recipes/run\.py"),
        (["+exp=quickstart", "hardware=netlab", "hardware.nodes=2,1"], r"hardware\.nodes=1 must be at least 2"),
        (["+exp=quickstart", "hardware=netlab", "hardware.rate=fast"], "rate 'fast' is not a number and a unit"),
        (["+exp=quickstart", "links=1gbit"], "links=1gbit needs hardware=netlab"),
        (["+exp=quickstart", "hardware=netlab", "links=fast"], "links=fast: rate 'fast' is not a number and a unit"),
        (["+exp=quickstart", "hardware=netlab", "hardware.rate=1gbit", "links=1gbit"], "leave hardware.rate out"),
        (["+exp=quickstart", "hardware=netlab", "links=1gbit", "probe_steps=2"], "probe_steps=2 is out of range: 8"),
        (
            ["+exp=quickstart", "hardware=netlab", "links=100mbit,100mbit"],
            r"links=100mbit,100mbit names one rate twice \(100mbit\); list every rate once",
        ),
        (["+exp=quickstart", "hardware=netlab", "links=1gbit,1000mbit"], r"twice \(1gbit and 1000mbit\)"),
        (["+exp=quickstart", "strategy=ddp", "optimizer.lr=0.1,inf"], "optimizer.lr=inf is out of range"),
        (["+exp=quickstart", "strategy=ddp,ddp"], "list every strategy and seed once"),
        (["+exp=quickstart", "model.blocks=[1"], "cannot read"),
        (["+exp=quickstart", "resume=true"], "resume=true: the seconds, bytes and curves of a run that goes on"),
        (["+exp=quickstart", "ckpt_path=a/last.ckpt"], "ckpt_path=a/last.ckpt: .* leave ckpt_path out"),
        (["+exp=quickstart", "hydra.sweep.dir=a"], "hydra.sweep.dir=a: .* take output=FOLDER"),
    ],
)
def test_mistakes_come_up_before_anything_runs(arguments: list[str], message: str) -> None:
    with pytest.raises((RecipeError, NetLabError), match=message):
        make_plan(arguments)


def test_a_wrong_number_of_threads_comes_up_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(RecipeError, match="OMP_NUM_THREADS=many is not a number of threads"):
        make_plan(["+exp=quickstart"])


def test_hardware_is_part_of_configuration_and_names() -> None:
    arguments = ["+exp=resnet_cifar", "strategy=ddp", "hardware=netlab", "hardware.nodes=3"]
    plan = make_plan([*arguments, "hardware.rate=100mbit"])
    (cell,) = plan.cells
    assert plan.folder.name == "resnet_cifar-netlab-3-hosts-100mbit"
    assert (cell.config["trainer"]["num_nodes"], cell.config["trainer"]["devices"]) == (3, 1)
    assert command(cell)[:2] == [sys.executable, str(ROOT / "recipes" / "run.py")]
    assert {"hardware=netlab", "hardware.nodes=3", "hardware.rate=100mbit"} < set(command(cell))
    other = make_plan([*arguments[:-1], "hardware.nodes=2", "hardware.rate=100mbit"])
    assert other.folder.name == "resnet_cifar-netlab-2-hosts-100mbit"
    assert make_plan(["+exp=quickstart", "hardware=pcie"]).folder.name == "quickstart-pcie"


@pytest.mark.slow
def test_links_are_probed_with_trainings_that_they_share() -> None:
    arguments = ["+exp=resnet_cifar", "strategy=ddp,gqsgd", "seed=0,1", "hardware=netlab", "logger=wandb"]
    arguments += ["callbacks=early_stopping", "callbacks.early_stopping.patience=3"]
    plan = make_plan([*arguments, "links=100mbit,1gbit", "probe_steps=12"])
    assert [cell.config["hardware"]["rate"] for cell in plan.cells] == ["none"] * 4
    assert plan.cells == make_plan([*arguments, "hardware.rate=none"]).cells
    assert [(probe.link, probe.variant, probe.seed) for probe in plan.probes] == [
        *(("100mbit", "ddp", 0), ("100mbit", "gqsgd", 0)),
        *(("1gbit", "ddp", 0), ("1gbit", "gqsgd", 0)),
    ]
    for probe in plan.probes:
        config = probe.config
        assert (config["hardware"]["rate"], config["trainer"]["max_steps"]) == (probe.link, 12)
        assert (config["logger"]["name"], config["test"], config["checkpoint"]) == ("csv", False, False)
        assert not config.get("callbacks")
    folders = {cell.folder for cell in (*plan.cells, *plan.probes)}
    assert len(folders) == 8


@pytest.mark.slow
def test_probes_of_local_steps_have_averages() -> None:
    arguments = ["+exp=quickstart", "hardware=netlab", "links=10mbit"]
    for given, steps in (
        (["strategy=ddp,gqsgd_diloco"], [30, 3 * 32]),
        (["strategy=gqsgd_diloco", "strategy.local_steps=16", "probe_steps=60"], [60]),
    ):
        plan = make_plan([*arguments, *given])
        assert [probe.config["trainer"]["max_steps"] for probe in plan.probes] == steps


@pytest.mark.parametrize(
    ("seconds", "steps", "means"),
    [
        ([3, 1, 2], 1, [3, 1, 2]),
        ([5, 1, 1, 1, 7, 1, 1, 7], 3, [3, 3]),  # the first steps are left out
        ([1, 2], 4, [1.5]),
        ([], 4, []),
    ],
)
def test_a_step_with_local_steps_is_the_mean_over_a_round(seconds: list[float], steps: int, means: list[float]) -> None:
    assert over_rounds(np.array(seconds, dtype=np.float64), steps).tolist() == means


def test_small_amounts_are_not_written_as_zero() -> None:
    assert [megabytes_in_words(value) for value in (0, 1.6e-4, 0.0412, 0.97, 1234.56)] == [
        *("0.0", "0.00016", "0.041", "1.0", "1,234.6")
    ]
    assert [parameters_in_words(count) for count in (4810, 79_000, 11_173_962)] == [
        *("4,810 parameters", "0.08 M parameters", "11.17 M parameters")
    ]


@pytest.mark.slow
def test_rates_are_a_sweep_like_others(tmp_path: Path) -> None:
    plan = make_plan(["+exp=quickstart", "strategy=ddp,gqsgd", "hardware=netlab", "hardware.rate=100mbit,1gbit"])
    assert plan.folder.name == "quickstart-netlab-2-hosts"
    assert [cell.variant for cell in plan.cells] == [
        "ddp rate=100mbit",
        "ddp rate=1gbit",
        "gqsgd rate=100mbit",
        "gqsgd rate=1gbit",
    ]
    both = make_plan(["+exp=quickstart", "strategy=ddp", "hardware=cpu,netlab"])
    assert both.folder.name == "quickstart"
    assert [cell.variant for cell in both.cells] == ["ddp hardware=cpu", "ddp hardware=netlab"]
    run = made_up_run(tmp_path, [0.5])
    run.facts.update(data="digits", model="small", processes=2)
    assert _title(plan, {"ddp": [run]}, None) == "quickstart on digits: small, 2 processes, netlab 100mbit / 1gbit"
    plain = make_plan(["+exp=quickstart", "strategy=ddp"])
    assert _title(plain, {"ddp": [run]}, None) == "quickstart on digits: small, 2 processes"


def _finish(cell: Cell, folder: Path) -> Cell:
    folder.mkdir()
    (folder / "cell.json").write_text(json.dumps(cell.config))
    (folder / "result.json").write_text("{}")
    return Cell(cell.variant, cell.seed, cell.overrides, cell.config, folder)


def test_a_cell_is_finished_only_with_its_own_configuration(tmp_path: Path) -> None:
    (cell,) = make_plan(["+exp=quickstart", "strategy=ddp"]).cells
    done = _finish(cell, tmp_path / "cell")
    assert done.is_finished()
    (changed,) = make_plan(["+exp=quickstart", "strategy=ddp", "optimizer.lr=0.3"]).cells
    assert not Cell(changed.variant, changed.seed, changed.overrides, changed.config, done.folder).is_finished()
    (done.folder / "result.json").unlink()
    assert not done.is_finished()
    (done.folder / "cell.json").write_text("{")
    assert not done.is_finished()


# --- results ----------------------------------------------------------------------------------------------------------


def test_run_is_read_back(tmp_path: Path) -> None:
    run = made_up_run(tmp_path, [0.5, 0.8, 0.7], step_s=0.1, codec=True)
    assert run.time.tolist() == pytest.approx([1, 2, 3])
    assert run.epoch.tolist() == [0.5, 1, 1.5]
    assert run.mb_sent.tolist() == [10, 20, 30]
    assert run.best == 0.8
    assert run.codec_s == pytest.approx(0.015)
    assert run.time_to(0.75) == 2
    assert run.time_to(0.9) == math.inf


def test_a_run_without_validation_has_the_final_test_as_its_point(tmp_path: Path) -> None:
    made_up_run(tmp_path, [])
    with open(tmp_path / "metrics.csv", "w") as file:
        file.write(f"{names.TRAIN_TIME},{names.SAMPLES},{names.MB_SENT},{ACCURACY.test},step\n7,700,70,0.6,7\n")
    run = Run.load(tmp_path)
    assert (run.time.tolist(), run.value.tolist()) == ([7], [0.6])


def test_the_final_test_is_not_called_a_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_up_run(tmp_path, [0.5, 0.3])
    rows = read_rows(tmp_path / "metrics.csv")
    with open(tmp_path / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], ACCURACY.test])
        writer.writeheader()
        writer.writerows([*rows, {**rows[1], ACCURACY.val: "", ACCURACY.test: 0.9, names.SAMPLES: 1100}])
    finish(tmp_path, {**run.facts, "title": "quickstart", "strategy": "ddp", "diverged": None}, None)
    assert "  validation accuracy  30.00 % (best 50.00 %)\n" in capsys.readouterr().out
    assert Run.load(tmp_path).value.tolist() == [0.5, 0.3]


def test_a_probe_gives_its_step_to_a_training(tmp_path: Path) -> None:
    trained, probe = (
        made_up_run(tmp_path / "run", [0.5, 0.8], step_s=0.1, codec=True),
        made_up_run(tmp_path / "probe", [0.1], step_s=3),
    )
    timed = trained.at_speed_of(probe)
    assert timed.time.tolist() == pytest.approx([30, 60])  # ten steps of 3 s each
    assert timed.facts["train_time"] == pytest.approx(60)
    assert timed.facts["exposed_s"] == {"median": 0.75}
    assert (timed.value.tolist(), timed.mb_sent.tolist(), timed.rel_l2) == ([0.5, 0.8], [10, 20], trained.rel_l2)
    assert math.isnan(timed.codec_s)  # the probe had no codec
    assert compare({"ddp": [timed]}, 0.75)[0].time_to_target == pytest.approx(60)


def test_lower_is_better_for_perplexity(tmp_path: Path) -> None:
    fast = made_up_run(tmp_path / "fast", [300, 150, 160], final=155, metric=PERPLEXITY)
    slow = made_up_run(tmp_path / "slow", [400, 300, 200], final=200, metric=PERPLEXITY)
    assert (fast.best, slow.best) == (150, 200)
    target = common_target({"ddp": [slow], "gqsgd": [fast]})
    assert target == pytest.approx(202)
    assert (fast.time_to(target), slow.time_to(target), slow.time_to(100)) == (2, 3, math.inf)
    lines = compare({"ddp": [slow], "gqsgd": [fast, slow]}, target)
    assert cells(lines[1])[2:4] == ["177.50 ± 31.82", "150.00"]
    assert headings(PERPLEXITY, target)[2:5] == ["perplexity", "best", "time to 202.0 (s)"]
    for axis in ("time", "mb_sent"):
        save_curves({"ddp": [slow], "gqsgd": [fast]}, axis, "title", tmp_path / f"{axis}.png", target)
        with Image.open(tmp_path / f"{axis}.png") as picture:
            assert picture.width == 900


def test_page_is_one_file_that_says_the_most_important_first(variants: dict[str, list[Run]], tmp_path: Path) -> None:
    target = common_target(variants)
    lines = compare(variants, target)
    sections = [Section(f"links of {rate} <bit>", tmp_path, variants, lines, target) for rate in (1, 2)]
    write_page(sections, "ddp & others", "python recipes/compare.py 'a b'", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=.?(?!data:|\")\w*:?//", text)
    assert "<script" not in text
    assert text.count("<picture>") == 2 * 6
    assert text.count("data:image/svg+xml;base64,") == 2 * 6 * 4  # light and dark, wide and narrow
    alternatives = re.findall(r'<img alt="([^"]*)"', text)
    assert len(alternatives) == 2 * 6
    assert all("ddp" in words and "gqsgd" in words for words in alternatives)
    assert "<h1>ddp &amp; others</h1>" in text
    assert "links of 2 &lt;bit&gt;" in text
    assert text.count("<tr>") == 2 * 4 + 3  # seed by seed, once
    assert len(re.findall(r" id=(\S+?)[ >]", text)) == len(set(re.findall(r" id=(\S+?)[ >]", text)))
    assert len(set(re.findall(r"<picture>.*?</picture>", text))) == 6  # the same runs make the same pictures


def test_a_wide_table_says_that_it_scrolls_and_can_be_reached_with_the_keyboard(
    variants: dict[str, list[Run]], tmp_path: Path
) -> None:
    target = common_target(variants)
    section = Section("title", tmp_path, variants, compare(variants, target), target)
    write_page([section], "title", "command", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    regions = re.findall(
        r'<div class="wide( many)?" tabindex=0 role=region aria-label="([^"]+)">\n<p class=hint>', text
    )
    assert regions == [(" many", "Strategies"), ("", "Seed by seed")]


def test_a_dark_page_has_pictures_that_can_be_seen_there() -> None:
    assert on_dark("#ffffff") == "#171717"
    assert on_dark("#000000") == "#ebebeb"
    assert on_dark("#0b3c8c") != "#0b3c8c"
    for colour in COLOURS.values():
        assert _contrast(on_dark(colour), on_dark("#ffffff")) > 4.5, colour
    assert dark('<svg x="1"><g style="stroke: #ffffff"/></svg>') == (
        '<svg fill="#ebebeb" x="1"><g style="stroke: #171717"/></svg>'
    )


def _contrast(one: str, other: str) -> float:
    """The contrast of two colours, 1 to 21 (WCAG 2.1)."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_loss_does_not_stand_out_and_differences_have_a_spread(tmp_path: Path) -> None:
    def runs(name: str, finals: tuple[float, float], step_s: float) -> list[Run]:
        return [
            made_up_run(tmp_path / f"{name}{seed}", [0.5, 0.9], step_s, seed=seed, final=final)
            for seed, final in enumerate(finals)
        ]

    variants = {"ddp": runs("ddp", (0.90, 0.92), 0.1), "gqsgd": runs("gqsgd", (0.91, 0.91), 0.2)}
    lines = compare(variants, 0.8)
    found = headlines(lines, 0.8, variants=variants)
    assert found[0][0] == "2.0× later"
    assert found[-1][0] == "+0.00 ± 1.41"
    section = Section("", tmp_path, variants, lines, 0.8)
    write_page([section], "title", "command", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert '<div class="tile"><b>2.0× later' in text
    assert "<main>" in text
    assert "<h2>Seed by seed</h2>" in text  # the only section needs no title of its own
    assert "<th scope=row>gqsgd</th><td>+0.00</td><td>1.41</td><td>+1.00</td><td>−1.00</td>" in text
    assert '<div class="tile good"><b>' not in text.split("2.0× later")[0]


def test_strategies_are_compared_seed_by_seed(tmp_path: Path) -> None:
    def run(name: str, seed: int, final: float) -> Run:
        return made_up_run(tmp_path / f"{name}{seed}", [0.5], seed=seed, final=final)

    variants = {
        "ddp": [run("ddp", 0, 0.90), run("ddp", 1, 0.92), run("ddp", 3, 0.91)],
        "gqsgd": [run("gqsgd", 3, 0.93), run("gqsgd", 0, 0.91), run("gqsgd", 2, 0.99)],  # seed 2 has no partner
        "gqsgd_4bit": [run("gqsgd_4bit", 1, 0.90)],
    }
    two, one = pairs_of(variants)
    assert dict(two.differences) == pytest.approx({0: 0.01, 3: 0.02})
    assert (two.mean, two.spread) == pytest.approx((0.015, 0.02 / 8**0.5))
    assert math.isnan(one.spread)
    heads, *rows = pair_table([two, one])
    assert heads == ["strategy", "accuracy (%), less ddp's", "± over seeds", "seed 0", "seed 3"]
    assert rows == [["gqsgd", "+1.50", "0.71", "+1.00", "+2.00"]]  # one seed says nothing
    assert pair_table([one]) == pair_table(pairs_of({"gqsgd": variants["gqsgd"]})) == []
    written = write_pairs(heads, rows, tmp_path).read_text()
    assert written.splitlines()[2] == "| gqsgd | +1.50 | 0.71 | +1.00 | +2.00 |"


@pytest.mark.parametrize("metric", [ACCURACY, pytest.param(PERPLEXITY, marks=pytest.mark.slow)])
def test_a_difference_from_one_seed_is_no_headline(tmp_path: Path, metric: Metric) -> None:
    def runs(name: str, seeds: tuple[int, ...], step_s: float) -> list[Run]:
        return [made_up_run(tmp_path / f"{name}{seed}", [0.9], step_s, seed, metric=metric) for seed in seeds]

    for seeds, said in (((0,), False), ((0, 1), True)):
        variants = {"ddp": runs("ddp", seeds, 0.2), "gqsgd": runs("gqsgd", seeds, 0.1)}
        lines = compare(variants, 0.9)
        meanings = [meaning for _, meaning in headlines(lines, 0.9, variants=variants)]
        assert any("at the end" in meaning for meaning in meanings) == said
        write_page([Section("", tmp_path, variants, lines, 0.9)], "title", "command", tmp_path / "page.html")
        assert ("at the end, gqsgd against ddp" in (tmp_path / "page.html").read_text()) == said


def test_headlines_compare_with_the_reference_and_the_best_baseline(variants: dict[str, list[Run]]) -> None:
    bf16 = {"ddp_bf16": variants["gqsgd"]}
    lines = compare({**variants, **bf16}, 0.9)
    found = headlines(lines, 0.9)
    assert [value for value, _ in found[:2]] == ["4.2× sooner", "1.7× sooner"]
    assert found[0][1] == "gqsgd_4bit than ddp, to accuracy 90.0 %"
    assert found[1][1] == "gqsgd_4bit than ddp_bf16, to accuracy 90.0 %"
    assert found[2][0] == "1.0× less"
    reference, own, others = contenders(compare({**variants, "ddp lr=0.2": variants["gqsgd"]}, 0.9))
    assert [reference.variant, *(line.variant for line in own)] == ["ddp", "ddp lr=0.2"]
    assert [line.variant for line in others] == ["gqsgd", "gqsgd_4bit"]
    unreached = compare({**variants, **bf16}, 1.01)
    assert headlines(unreached, 1.01)[0] == ("4.2× shorter", "gqsgd_4bit than ddp, a step")  # not all get there
    slower = compare({"ddp": variants["gqsgd"], "gqsgd": variants["ddp"]}, 0.9)
    assert headlines(slower, 0.9)[0][0] == "2.4× later"  # curves differ by their noise
    assert headlines(compare({"gqsgd": variants["gqsgd"]}, 0.9), 0.9) == []
    assert headlines(compare({"ddp": variants["ddp"]}, 0.9), 0.9) == []


def test_table(variants: dict[str, list[Run]], tmp_path: Path) -> None:
    target = common_target(variants)
    assert target == pytest.approx(0.99 * min(run.best for runs in variants.values() for run in runs))
    lines = compare(variants, target)
    assert [line.variant for line in lines] == ["ddp", "gqsgd", "gqsgd_4bit"]
    assert [line.step_ratio for line in lines] == pytest.approx([1, 0.4, 0.24])
    assert all(math.isfinite(line.time_to_target) for line in lines)
    assert lines[0].final == pytest.approx(0.95)
    assert lines[0].final_spread == pytest.approx(0.01)
    assert len(cells(lines[0])) == len(headings(ACCURACY, target))
    markdown, plain = write_tables(lines, target, "title", tmp_path)
    assert "| ddp | 3 | 95.00 ± 1.00 |" in markdown.read_text()
    with open(plain, newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["step_s"]) == pytest.approx(0.2)
    assert float(rows[1]["target"]) == pytest.approx(target)


def test_files_and_tables_do_not_depend_on_the_locale(
    variants: dict[str, list[Run]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", write_through=True))
    lines = compare(variants, 0.9)
    settings = tmp_path / "config.yaml"
    settings.write_text("title: ±", encoding="utf-8")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")  # ASCII, unless Python ignores the locale (-X utf8)
    try:
        markdown, _ = write_tables(lines, 0.9, "title", tmp_path)
        write_page([Section("", tmp_path, variants, lines, 0.9)], "title", "command", tmp_path / "page.html")
        write_pairs(["± over seeds"], [["0.1"]], tmp_path)
        assert read_configuration(settings) == {"title": "±"}
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    assert "±" in markdown.read_text(encoding="utf-8")
    print_in_any_locale()
    compare_script._console().print("±")
    assert printed.getvalue() == b"?\n"


def test_error_and_bits_above_the_bound(variants: dict[str, list[Run]], tmp_path: Path) -> None:
    lines = compare(variants, 0.9)
    heads = headings(ACCURACY, 0.9)
    assert heads[-3:] == ["message bits", "rel. L2 error", "bits above bound"]
    assert all(math.isnan(value) for value in (lines[0].message_bits, lines[0].rel_l2, lines[0].bits_above_bound))
    assert cells(lines[0])[-3:] == ["–"] * 3
    # Every sample counts once, however often it was logged.
    assert lines[1].rel_l2 == pytest.approx(0.1)
    assert lines[1].bits_above_bound == pytest.approx(6 + math.log2(0.1))
    assert cells(lines[1])[-3:] == ["6.00", "0.1", "2.68"]
    markdown, plain = write_tables(lines, 0.9, "title", tmp_path)
    assert "bits above bound: message bits less log2(1/r)" in markdown.read_text()
    with open(plain, newline="") as file:
        assert float(list(csv.DictReader(file))[1]["bits_above_bound"]) == pytest.approx(2.678, abs=1e-3)
    markdown, _ = write_tables(lines[:1], 0.9, "title", tmp_path)
    assert "log2" not in markdown.read_text()


def test_an_error_above_one_needs_no_bits(tmp_path: Path) -> None:
    (line,) = compare({"cd_adam": [made_up_run(tmp_path, [0.5] * 6, codec=True, rel_l2=1.2)]}, target=0.9)
    assert line.bits_above_bound == 6


@pytest.mark.parametrize(
    ("width", "left_out"),
    [(80, {"message bits", "best (%)"}), (70, {"message bits", "best (%)", "seeds", "step vs ddp"}), (160, set())],
)
def test_table_fits_the_console(variants: dict[str, list[Run]], width: int, left_out: set[str]) -> None:
    two = {name: runs[:1] for name, runs in variants.items() if name != "gqsgd_4bit"}
    heads, rows = headings(ACCURACY, 0.984), [cells(line) for line in compare(two, 0.984)]
    shown, padding = _fitting(heads, rows, width)
    assert {heading for number, heading in enumerate(heads) if number not in shown} == left_out
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(
        _table("title", [heads[one] for one in shown], [[row[one] for one in shown] for row in rows], padding)
    )
    text = console.export_text()
    assert all(row[one] in text for row in rows for one in shown)


def test_square_brackets_are_the_users_words(capsys: pytest.CaptureFixture[str]) -> None:
    name = "ddp callbacks=[early_stopping], seed 0"
    compare_script._console().print(name)
    assert capsys.readouterr().out == f"{name}\n"
    screen = io.StringIO()
    with runner._live([name], Console(file=screen, width=160, force_terminal=True, markup=False)) as line:
        line(0, "epoch 1 of [wikitext]", False, None)
        line(0, Text("failed", "red"), True, None)
    assert name in screen.getvalue()
    assert "failed" in screen.getvalue()
    assert "[red]" not in screen.getvalue()


def test_table_says_what_is_not_known(tmp_path: Path) -> None:
    (line,) = compare({"gqsgd": [made_up_run(tmp_path, [0.5])]}, target=0.9)
    assert "not reached" in cells(line)
    assert cells(line)[7] == "–"  # no ddp to compare with
    assert "±" not in cells(line)[2]


def test_every_seed_and_every_point_of_the_curves_is_in_a_file(tmp_path: Path) -> None:
    def runs(step_s: float, *finals: float) -> list[Run]:
        made = enumerate(finals)
        return [made_up_run(tmp_path / f"{step_s}{seed}", [0.5, 0.8], step_s, seed, final=end) for seed, end in made]

    variants = {"ddp": runs(0.2, 0.8, 0.7), "gqsgd": runs(0.1, 0.81, 0.72)}
    with open(write_seeds(variants, 0.8, tmp_path), newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["variant"], row["seed"], row["final"]) for row in rows] == [
        *(("ddp", "0", "0.8"), ("ddp", "1", "0.7"), ("gqsgd", "0", "0.81"), ("gqsgd", "1", "0.72"))
    ]
    last = rows[-1]
    assert [float(last[name]) for name in ("best", "train_loss", "val_loss", "mb_sent")] == [0.8, 1.0, 0.5, 20.0]
    assert float(last["step_ratio"]) == 0.5
    assert float(last["time_to_target"]) == 2.0
    with open(write_curves(variants, tmp_path), newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == 8
    assert points[-1] == {
        **{"variant": "gqsgd", "seed": "1", "step": "20", "epoch": "1.0", "seconds": "2.0", "mb_sent": "20.0"},
        **{"train/loss": "1.0", "val/loss": "0.5", "val/acc": "0.8"},
    }
    twice = variants["gqsgd"][0].at_speed_of(variants["ddp"][0])
    with open(write_curves({"gqsgd": [twice]}, tmp_path), newline="") as file:
        assert [row["seconds"] for row in csv.DictReader(file)] == ["2.0", "4.0"]


def test_the_loss_has_curves_of_its_own(variants: dict[str, list[Run]], tmp_path: Path) -> None:
    lines = compare(variants, 0.9)
    section = Section("title", tmp_path / "links", variants, lines, 0.9)
    shown = section.in_loss
    assert shown is not None
    assert {line.metric.key for line in shown.lines} == {"loss"}
    assert shown.lines[0].best == min(1 / (1 + place) for place in range(len(variants["ddp"][0].value)))
    write_page([section], "title", "command", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<input type=radio") == page.count("<label for=s0-") == 5
    assert "loss against MB sent" in page
    assert "accuracy against epochs; accuracy (%) at the end: ddp 9" in page
    assert all(f"<code>links/{name}</code>" in page for name in ("table.csv", "seeds.csv", "curves.csv"))
    silent = {"ddp": [replace(run, val_loss=math.nan * run.val_loss) for run in variants["ddp"]]}
    assert Section("title", tmp_path, silent, compare(silent, 0.9), 0.9).in_loss is None


# --- the real thing ---------------------------------------------------------------------------------------------------

#: What a comparison of two strategies writes, in the order in which it says so.
FILES = [
    "table.md",
    *("table.csv", "seeds.csv", "curves.csv"),
    *(f"{shown}_{axis}.png" for shown in ("accuracy", "loss") for axis in ("time", "epoch", "mb_sent")),
    "step_time.png",
    "comparison.html",
]


def test_the_differences_of_an_earlier_comparison_are_removed(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    two = {
        name: [made_up_run(tmp_path / f"{name}{seed}", [0.5], seed=seed) for seed in (0, 1)] for name in ("ddp", "a")
    }
    for variants, expected in ((two, True), ({name: runs[:1] for name, runs in two.items()}, False)):
        section = Section("title", tmp_path, variants, compare(variants, 0.4), 0.4)
        assert _write_pairs(section, tmp_path, console) == ([tmp_path / "seeds.md"] if expected else [])
        assert (tmp_path / "seeds.md").exists() == expected


def test_runs_on_a_stand_in_are_not_compared_with_runs_on_the_data(tmp_path: Path) -> None:
    arguments = ["+exp=resnet_cifar", "strategy=ddp,gqsgd", "seed=0,1", f"output={tmp_path}"]
    plan = make_plan(arguments)
    for cell in plan.cells:
        made_up_run(cell.folder, [0.5, 0.8], seed=cell.seed)
    check_one_data_set(plan, set())
    changed = plan.cells[-1].folder
    facts = json.loads((changed / RESULT_FILE).read_text())
    (changed / RESULT_FILE).write_text(json.dumps({**facts, "data": "digits32 (fallback)"}))
    with pytest.raises(
        RecipeError, match=r"different data: digits: .*; digits32 \(fallback\): gqsgd-seed1\. .*--fresh"
    ):
        check_one_data_set(plan, set())
    check_one_data_set(plan, {changed})
    other = make_plan([*arguments, "data.train_samples=1000,2000"])
    for cell in other.cells:
        made_up_run(cell.folder, [0.5], seed=cell.seed)
        facts = json.loads((cell.folder / RESULT_FILE).read_text())
        name = f"part {cell.config['data']['train_samples']}"
        (cell.folder / RESULT_FILE).write_text(json.dumps({**facts, "data": name}))
    check_one_data_set(other, set())  # a list of data is the user's own comparison


def listed(output: str) -> list[str]:
    """The files that a comparison names, but the headline's, which are there if one strategy happens to be faster."""
    files = re.findall(r"^(?:table|plot|page): (\S+)$", output, re.MULTILINE)
    return [file for file in files if not Path(file).name.startswith("headline")]


def test_a_run_whose_curves_were_cut_off_is_made_again(tmp_path: Path) -> None:
    (cell,) = make_plan((*TINY, "strategy=ddp", f"output={tmp_path}")).cells
    made_up_run(cell.folder, [0.5, 0.8], final=0.8)
    (cell.folder / CELL_FILE).write_text(json.dumps(cell.config))
    assert cell.is_finished()
    os.truncate(cell.folder / METRICS_FILE, 100)
    assert not cell.is_finished()


@pytest.mark.slow
def test_compare_a_finished_strategy_with_one_that_two_processes_train(tmp_path: Path) -> None:
    arguments = (*TINY, "data.batch_size=16", "model.width=16", "strategy=ddp,gqsgd", f"output={tmp_path}")
    plan = make_plan(arguments)
    finished, running = plan.cells
    made_up_run(finished.folder, [0.5, 0.8], final=0.8)
    (finished.folder / CELL_FILE).write_text(json.dumps(finished.config))
    result = (finished.folder / RESULT_FILE).read_bytes()

    compared = run_script("compare.py", *arguments, cwd=tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert compared.stdout.count("finished before") == 1
    assert (finished.folder / RESULT_FILE).read_bytes() == result
    assert listed(compared.stdout) == [str(plan.folder / name) for name in FILES]
    assert all((plan.folder / name).stat().st_size > 100 for name in FILES)
    with open(plan.folder / "table.csv", newline="") as file:
        assert [row["variant"] for row in csv.DictReader(file)] == ["ddp", "gqsgd"]

    output = (running.folder / LOG).read_text()
    assert output.count("epoch 1/2") == 1  # rank 0 only
    assert str(running.folder / "metrics.csv") in output
    facts = json.loads((running.folder / RESULT_FILE).read_text())
    assert (facts["processes"], facts["steps"], facts["samples"]) == (2, 6, 6 * 32)
    assert 8 < facts["bits_per_coordinate"] < 16  # small parameters are not compressed
    assert (running.folder / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_compare_two_strategies_then_go_on_with_a_failing_third(tmp_path: Path) -> None:
    arguments = ("compare.py", *TINY, "trainer.devices=1", "test=false")
    finished = run_script(*arguments, "strategy=ddp,ddp_bf16", cwd=tmp_path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    folder = tmp_path / "outputs" / "compare" / "quickstart"
    assert listed(finished.stdout) == [str(folder / name) for name in FILES]
    assert all((folder / name).stat().st_size > 100 for name in FILES)
    assert "ddp_bf16" in (folder / "table.md").read_text()
    times = {file: file.stat().st_mtime_ns for file in folder.glob("cells/*/result.json")}
    assert len(times) == 2

    (folder / "cells" / "gqsgd-seed0" / "metrics.csv").mkdir(parents=True)  # where the third run writes a file
    again = run_script(*arguments, "strategy=ddp,ddp_bf16,gqsgd", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stdout.count("finished before") == 2
    assert times == {file: file.stat().st_mtime_ns for file in folder.glob("cells/*/result.json")}
    assert "gqsgd, seed 0: exit code" in again.stdout
    assert "table: " in again.stdout  # of the two others
