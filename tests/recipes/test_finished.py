"""Comparisons of runs that have finished, wherever they were made."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from recipes.compare import main
from recipes.comparison import reporting
from recipes.comparison.finished import find
from recipes.comparison.overview import side_by_side
from recipes.comparison.results import compare
from recipes.comparison.workspace import Definition, save_workspace
from recipes.errors import RecipeError
from recipes.training.train import train
from tests.recipes.conftest import restored_process
from tests.recipes.made_up_runs import made_up_folder
from tests.recipes.wandb_files import WandbFile

CURVE = [0.5, 0.7, 0.8, 0.9]
#: Seconds of a step by profile and strategy.
STEPS = {
    "nvlink": {"ddp": 0.1, "gqsgd": 0.1},
    "pcie": {"ddp": 0.2, "gqsgd": 0.1},
    "multi_node": {"ddp": 0.8, "gqsgd": 0.2},
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two strategies on three kinds of hardware, with two seeds on one of them, in folders as of run.py."""
    root = tmp_path / "outputs" / "quickstart"
    for profile, steps in STEPS.items():
        for strategy, step_s in steps.items():
            for seed in (0, 1) if profile == "nvlink" else (0,):
                _made_up(root, strategy, profile, seed, step_s)
    return root


def _made_up(
    root: Path, strategy: str, profile: str, seed: int, step_s: float, *more: str, time: str = "", ended: int = 0
) -> Path:
    overrides = ("+exp=quickstart", f"strategy={strategy}", f"hardware={profile}", f"seed={seed}", *more)
    folder = root / f"{strategy}-seed{seed}" / (time or f"{profile}-time")
    curve = [value + 0.01 * seed for value in CURVE]
    return made_up_folder(folder, *overrides, accuracies=curve, step_s=step_s, ended=ended)


@pytest.mark.slow
def test_runs_of_several_kinds_of_hardware_stand_side_by_side(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    under_way = runs / "gqsgd-seed0" / "under-way"
    (under_way / "checkpoints").mkdir(parents=True)
    diverged = _made_up(runs, "gqsgd", "pcie", 7, 0.1)
    facts = json.loads((diverged / "result.json").read_text())
    (diverged / "result.json").write_text(json.dumps({**facts, "diverged": "train/loss is nan"}))
    monkeypatch.chdir(tmp_path)
    assert main(["--from", *sorted(str(path) for path in runs.iterdir()), "target=0.8"]) == 0
    said = capsys.readouterr().out
    folder = tmp_path / "outputs" / "compare" / "quickstart-finished"
    parts = {"multi_node-2-x-2": "multi_node", "nvlink-1-x-2": "nvlink", "pcie-1-x-2": "pcie"}
    assert {path.name for path in folder.iterdir()} == {*parts, "comparison.html"}
    for part, profile in parts.items():
        with open(folder / part / "table.csv", newline="") as lines:
            rows = {row["variant"]: row for row in csv.DictReader(lines)}
        assert {name: float(row["step_s"]) for name, row in rows.items()} == pytest.approx(STEPS[profile])
        assert {row["seeds"] for row in rows.values()} == {"2" if profile == "nvlink" else "1"}
        assert (folder / part / "accuracy_time.png").is_file()
        assert (folder / part / "seeds.md").is_file() == (profile == "nvlink")
    assert (folder / "multi_node-2-x-2" / "headline.png").is_file()
    page = (folder / "comparison.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[0].startswith("Training seconds to accuracy 80.0 %")
    assert headings[1].startswith("Step (ms)")
    assert [heading.split(", ")[1] for heading in headings[2:]] == ["multi_node", "nvlink", "pcie"]
    assert page.count("<h3>Seed by seed</h3>") == 1
    for shown in (page, said):
        assert "200.0 (4.0×)" in shown
        assert "100.0 (2.0×)" in shown
    assert f"page: {folder / 'comparison.html'}" in said
    assert "target=0.8 --from" in page  # the command that makes the page
    for line in (
        f"{under_way}: the run has not finished, there is no result.json",
        f"{diverged}: the training diverged, train/loss is nan",
    ):
        assert f"left out: {line}" in said
        assert f"Left out: {line}" in page


def test_a_run_that_went_on_under_another_strategy_is_left_out(tmp_path: Path) -> None:
    _made_up(tmp_path, "ddp", "nvlink", 0, 0.1)
    changed = _made_up(tmp_path, "gqsgd", "nvlink", 0, 0.1)
    facts = json.loads((changed / "result.json").read_text())
    (changed / "result.json").write_text(json.dumps({**facts, "strategies": ["ddp", "gqsgd (bits=4)"]}))
    finished = find([tmp_path])
    assert [found.run.facts["strategy"] for found in finished.chosen] == ["ddp"]
    assert finished.left_out == [f"{changed}: the training went on under another strategy: ddp, then gqsgd (bits=4)"]


def test_one_kind_of_hardware_has_no_overview_and_baselines_come_first(runs: Path) -> None:
    finished = find([*runs.glob("*/nvlink-time")])
    (hardware,) = finished.by_hardware
    assert (hardware.name, hardware.words) == ("nvlink, 1 x 2", "nvlink, 1 x 2 a GPU, NVLink")
    variants = finished.by_hardware[hardware]
    assert [(name, len(runs)) for name, runs in variants.items()] == [("ddp", 2), ("gqsgd", 2)]
    assert side_by_side({hardware.name: compare(variants, 0.8)}, 0.8) == []


def test_a_setting_that_differs_between_strategies_is_named(tmp_path: Path) -> None:
    _made_up(tmp_path, "ddp", "nvlink", 0, 0.1, "optimizer.lr=0.2", "model=resnet20")
    _made_up(tmp_path, "gqsgd", "nvlink", 0, 0.05, "optimizer.lr=0.1")
    _made_up(tmp_path, "gqsgd", "nvlink", 1, 0.05, "optimizer.lr=0.1")
    finished = find([tmp_path])
    assert {"model.name", "optimizer.lr"} < {*finished.keys}
    (variants,) = finished.by_hardware.values()
    assert [*variants] == ["ddp model=resnet20 lr=0.2", "gqsgd model=resnet_digits lr=0.1"]


@pytest.mark.slow
def test_settings_that_differ_make_variants_and_places_do_not(runs: Path) -> None:
    assert find([runs]).keys == ("strategy.name",)  # the seed differs, and so does that of the data
    # No run of this seed has other settings. It is a variant all the same, and no further seed of the others.
    _made_up(runs, "gqsgd", "nvlink", 2, 0.1, "strategy.bits=4")
    assert find([runs]).keys == ("strategy.name", "strategy.bits")
    elsewhere = ("threads=3", "run_root=/elsewhere", "paths.log_dir=/elsewhere", "logger=tensorboard")
    _made_up(runs, "gqsgd", "nvlink", 0, 0.05, *elsewhere, time="elsewhere", ended=1)
    _made_up(runs, "gqsgd", "nvlink", 0, 0.05, "strategy.bits=4", time="again")
    finished = find([runs])
    assert finished.keys == ("strategy.name", "strategy.bits")
    names = {name for variants in finished.by_hardware.values() for name in variants}
    assert names == {"ddp", "gqsgd bits=8", "gqsgd bits=4"}
    assert len(finished.left_out) == 1  # the same training, in another place


@pytest.mark.slow
def test_of_equal_trainings_the_last_one_is_taken_and_this_is_said(runs: Path) -> None:
    later = _made_up(runs, "gqsgd", "nvlink", 0, 0.05, time="later", ended=100)
    earlier = runs / "gqsgd-seed0" / "nvlink-time"
    os.utime(later / "result.json", (0, 0))  # copied before the other one
    finished = find([runs])
    assert {later, earlier} & {found.folder for found in finished.chosen} == {later}
    assert finished.left_out == [f"{earlier}: the same training ended later in {later}"]


def test_of_equal_trainings_that_do_not_say_when_they_ended_the_times_of_the_files_decide(tmp_path: Path) -> None:
    earlier, later = (_made_up(tmp_path, "gqsgd", "nvlink", 0, 0.1, time=time) for time in ("one", "two"))
    for seconds, run in enumerate((earlier, later)):
        facts = json.loads((run / "result.json").read_text())
        del facts["ended"]
        (run / "result.json").write_text(json.dumps(facts))
        os.utime(run / "result.json", (seconds, seconds))
    finished = find([tmp_path])
    assert [found.folder for found in finished.chosen] == [later]
    (line,) = finished.left_out
    assert line.startswith(f"{earlier}: the same training ended later in {later}, judged by the times of their files")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: shutil.rmtree(run), r"nvlink-time does not exist; name folders of runs, e\.g\. --from"),
        (lambda run: (run / "result.json").unlink(), r"no finished run in or below it: .* resume=true"),
        (
            lambda run: (run / "hparams.yaml").unlink(),
            r"hparams\.yaml is missing, the run's configuration; .*leave it",
        ),
        (lambda run: (run / "metrics.csv").unlink(), r"^--from \S+: metrics\.csv is missing, the run's curves"),
        (lambda run: os.truncate(run / "metrics.csv", 200), r"^--from \S+: metrics\.csv has 200 of \d+ bytes; "),
        (lambda run: (run / "result.json").write_text("{"), r"its files cannot be read \("),
        (lambda run: (run / "result.json").write_text("{}"), r"its files cannot be read \(no 'steps'\)"),
        (lambda run: (run / "hparams.yaml").write_text("{"), r"cannot be read \(hparams.yaml cannot be"),
        (
            lambda run: (run / "metrics.csv").write_text("step,val/acc\n" + 100 * "1,good\n"),
            r"cannot be read \(could not",
        ),
    ],
)
def test_mistakes_name_the_folder_and_the_remedy(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    good, run = (_made_up(tmp_path, strategy, "nvlink", 0, 0.1) for strategy in ("ddp", "gqsgd"))
    spoil(run)
    with pytest.raises(RecipeError, match=message) as refused:
        find([good, run])
    assert str(run) in str(refused.value)


def test_runs_of_several_experiments_are_not_compared(runs: Path) -> None:
    other = made_up_folder(runs / "other", "+exp=resnet_cifar", accuracies=CURVE)
    with pytest.raises(RecipeError, match="runs of 2 experiments") as refused:
        find([runs])
    message = str(refused.value)
    assert "quickstart on digits, judged by acc: 8 runs, e.g. " in message
    assert f"resnet_cifar on cifar10, judged by acc: 1 run, e.g. {other}" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target=90"], "target=90 is out of range for accuracy"),
        (["+exp=quickstart"], r"\+exp=quickstart: the runs that --from names have their settings already; .*target="),
        (["--fresh"], "--from runs none; leave one of them out"),
    ],
)
def test_other_settings_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = _made_up(tmp_path / "runs", "ddp", "nvlink", 0, 0.1)
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--from", str(run)])
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_full_disk_ends_a_comparison_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reporting, "write_page", full)
    assert main(["--from", str(_made_up(tmp_path / "runs", "ddp", "nvlink", 0, 0.1))]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compare.py: no more room for its files (No space left on device); make room: finished runs")


def test_profiles_that_compare_does_not_start_point_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["+exp=quickstart", "hardware=multi_node"])
    assert "python recipes/compare.py --from outputs/quickstart/*" in capsys.readouterr().err


@pytest.mark.usefixtures("no_key")
def test_a_workspace_shows_runs_of_several_groups(tmp_path: Path) -> None:
    file = tmp_path / "workspace.json"
    definition = Definition("compare-it", "acc", "project", more_groups=("a", "b-c"))
    assert definition.command.endswith("--also a --also b-c")
    assert save_workspace(definition, file) is None
    (runs,) = json.loads(file.read_text())["spec"]["section"]["runSets"]
    (only,) = runs["filters"]["filters"]
    assert (only["key"], only["op"]) == ({"section": "run", "name": "group"}, "IN")
    assert only["value"] == ["compare-it", "a", "b-c"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_key")
def test_real_runs_are_compared_from_their_folders_and_from_what_wandb_has_left_there(
    tiny: Callable[..., DictConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, strategy in enumerate(("ddp", "gqsgd")):
        with restored_process():
            train(tiny("logger=wandb", f"strategy={strategy}"), tmp_path / "outputs" / "quickstart" / str(number))
    offline = sorted((tmp_path / "outputs").glob("quickstart/*/wandb/offline-run-*"))
    assert len(offline) == 2
    for named in (["outputs/quickstart"], [str(path) for path in offline]):
        assert main(["--from", *named]) == 0
        said = capsys.readouterr().out
        folder = tmp_path / "outputs" / "compare" / "quickstart-finished"
        (part,) = [path for path in folder.iterdir() if (path / "table.csv").is_file()]
        with open(part / "table.csv", newline="") as lines:
            assert [row["variant"] for row in csv.DictReader(lines)] == ["ddp", "gqsgd"]
        assert f"wandb sync {folder}/wandb/offline-run-*" in said
        (own,) = [path for path in (folder / "wandb").glob("offline-run-*") if not path.is_symlink()]
        (file,) = own.glob("*.wandb")
        written = WandbFile(file)
        assert (written.run.run_group, written.run.job_type) == ("quickstart", "comparison")
        assert len([*(folder / "wandb").glob("offline-run-*/*.wandb")]) == 3
        definition = json.loads((folder / "workspace.json").read_text())["definition"]
        assert (definition["group"], definition["by"]) == ("quickstart", ["strategy.name"])
