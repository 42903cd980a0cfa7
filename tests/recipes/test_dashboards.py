"""A comparison with logger=wandb: what is on disk afterwards, without a key and without a network."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.compare import main
from recipes.comparison import dashboard, workspace
from recipes.comparison.dashboard import publish
from recipes.comparison.grouping import grouping
from recipes.comparison.plan import CELL_FILE, make_plan
from recipes.comparison.workspace import Definition, save_workspace
from recipes.configuration import compose_configuration
from recipes.errors import RecipeError
from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY, PERPLEXITY
from recipes.training.train import train
from tests.recipes.conftest import ROOT, TINY, clean_environment, restored_process, run_script
from tests.recipes.wandb_files import WandbFile, read_run

GROUP = "compare-quickstart"


# --- a comparison -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A finished comparison: its folder, what it has printed, and the environment it ran in."""

    folder: Path
    output: str
    environment: dict[str, str]

    def cell(self, name: str) -> Path:
        return self.folder / "cells" / name


OVERRIDES = (*TINY, "trainer.devices=1", "threads=1", "strategy=ddp,gqsgd", "logger=wandb", "logger.tags=[mine]")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("here", "as users start it")]
)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """ddp and gqsgd without a key: trained and compared in this process, or in a process each."""
    root = tmp_path_factory.mktemp("compared")
    (root / "home").mkdir()
    environment = {"NETRC": str(root / "none"), "WANDB_CACHE_DIR": str(root / "cache"), "HOME": str(root / "home")}
    if request.param == "here":
        output = _compare_here(root, environment)
    else:
        finished = run_script("compare.py", *OVERRIDES, cwd=root, timeout=280, environment=environment)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert "Traceback" not in finished.stdout + finished.stderr
        output = finished.stdout
    return Compared(root / "outputs" / "compare" / "quickstart", output, {**clean_environment(), **environment})


def _compare_here(root: Path, environment: dict[str, str]) -> str:
    """Train every cell of the comparison and compare them; returns what the comparison has printed."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, restored_process():
        patch.chdir(root)
        for name in set(os.environ) - set(clean_environment()):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        for cell in make_plan(OVERRIDES).cells:
            with restored_process():
                train(compose_configuration(cell.overrides), cell.folder)
            (cell.folder / CELL_FILE).write_text(json.dumps(cell.config))
        with contextlib.redirect_stdout(output):
            assert main(OVERRIDES) == 0
    assert output.getvalue().count("finished before") == 2
    return output.getvalue()


def test_cells_belong_to_the_comparison(compared: Compared) -> None:
    for strategy in ("ddp", "gqsgd"):
        cell = read_run(compared.cell(f"{strategy}-seed0"))
        assert (cell.run.run_group, cell.run.job_type) == (GROUP, strategy)
        assert sorted(cell.run.tags) == sorted(["quickstart", strategy, "cpu", "mine"])
        assert cell.config["strategy"]["name"] == strategy
        assert cell.config["optimizer"]["lr"] == 0.1
        assert cell.config["machine"]["cores"] >= 1
        assert set(cell.config["machine"]["versions"]) == {"python", "torch", "lightning", "lightning_gqsgd"}
        assert {cell.step_metrics[name] for name in names.against_time(ACCURACY)} == {names.TRAIN_TIME}
        assert not cell.globs


def test_rows_with_the_metric_have_every_x_axis(compared: Compared) -> None:
    for strategy in ("ddp", "gqsgd"):
        rows = read_run(compared.cell(f"{strategy}-seed0")).rows
        of_metric = [row for row in rows if {ACCURACY.train, ACCURACY.val, ACCURACY.test} & set(row)]
        assert len(of_metric) == 6 + 2 + 1  # steps, validations, test
        for row in of_metric:
            assert set(workspace.AXES) <= set(row)


def test_csv_and_wandb_have_the_same_names(compared: Compared) -> None:
    folder = compared.cell("gqsgd-seed0")
    logged = {name for row in read_run(folder).rows for name in row if not name.startswith("_")}
    with open(folder / "metrics.csv", newline="") as lines:
        written = set(next(csv.reader(lines)))
    assert set(names.GQSGD) <= logged
    assert written - {"step"} == logged - {names.GLOBAL_STEP}


def test_the_comparison_is_a_run_with_table_plots_and_artifact(compared: Compared) -> None:
    (folder,) = (path for path in (compared.folder / "wandb").glob("offline-run-*") if not path.is_symlink())
    (file,) = folder.glob("*.wandb")
    run = WandbFile(file)
    assert (run.run.run_group, run.run.job_type) == (GROUP, "comparison")
    assert sorted(run.run.tags) == ["comparison", "cpu", "mine", "quickstart"]
    assert run.config["strategy"] == {"name": "comparison"}

    (row,) = run.rows
    table = json.loads((folder / "files" / row["comparison/path"]).read_text())
    with open(compared.folder / "table.csv", newline="") as lines:
        expected = list(csv.DictReader(lines))
    shown = [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]
    assert [line["variant"] for line in shown] == ["ddp", "gqsgd"]
    assert [line["final"] for line in shown] == [float(line["final"]) for line in expected]
    plots = {path.stem for path in compared.folder.glob("*.png")}
    assert {key.split("/")[1] for key in row if key.startswith("plots/")} == plots
    assert all((folder / "files" / row[f"plots/{plot}/path"]).stat().st_size > 100 for plot in plots)

    (artifact,) = [artifact for artifact in run.artifacts if artifact.type == "comparison"]
    assert artifact.name == GROUP
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert set(files) == {
        path.name for path in compared.folder.iterdir() if path.suffix in (".png", ".svg", ".md", ".csv", ".html")
    }
    assert all(file.read_bytes() == (compared.folder / name).read_bytes() for name, file in files.items())
    # What a later upload needs lies in the one folder, and nothing in the home directory.
    local = [Path(entry.local_path) for one in run.artifacts for entry in one.manifest.contents]
    assert all(path.is_relative_to(compared.folder / "wandb") for path in local)
    assert not list(Path(compared.environment["HOME"]).rglob("artifacts"))


def test_the_printed_command_uploads_all_runs(compared: Compared) -> None:
    (line,) = [line for line in compared.output.splitlines() if "wandb sync" in line]
    command = line[line.index("wandb sync") :]
    assert command == f"wandb sync {compared.folder}/wandb/offline-run-*"
    finished = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m {command} --dry-run', sys.executable],
        env=compared.environment,
        cwd=compared.folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Would sync 3 run(s)" in finished.stderr


def test_the_workspace_is_written_and_can_be_made_by_the_printed_command(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = compared.folder / "workspace.json"
    assert f"W&B: workspace {file}" in compared.output
    written = json.loads(file.read_text())
    assert written["url"] is None
    (line,) = [line for line in compared.output.splitlines() if "recipes/workspace.py" in line]
    command = shlex.split(line[line.index("python ") :])
    assert command[:6] == ["python", str(ROOT / "recipes" / "workspace.py"), "--group", GROUP, "--metric", "acc"]

    from recipes.workspace import main as make_workspace

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", compared.environment["NETRC"])
    assert make_workspace([*command[2:], "--file", str(tmp_path / "again.json")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["definition"] == written["definition"]


def test_a_comparison_survives_whatever_wandb_does(
    compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb
    from rich.console import Console

    output = tmp_path / "outputs"
    shutil.copytree(compared.folder, output / "quickstart", symlinks=True)
    plan = make_plan([*OVERRIDES, f"output={output}"])
    assert all(cell.is_finished() for cell in plan.cells)
    table = plan.folder / "table.csv"

    def unreachable(*_: Any, **__: Any) -> Any:
        raise wandb.errors.CommError("no network\nand more about it")

    monkeypatch.setattr(dashboard, "start_wandb", unreachable)
    monkeypatch.setattr(wandb, "Api", unreachable)
    for module in (dashboard, workspace):
        monkeypatch.setattr(module, "wandb_mode", lambda: "online")
    publish(plan, ACCURACY, "title", [table], Console(soft_wrap=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "W&B: no network"
    assert lines[1] == f"W&B: upload what is offline with: wandb sync {plan.folder}/wandb/offline-run-*"
    assert lines[2].startswith("W&B: W&B has not taken the workspace: no network; it is in ")
    assert len(lines) == 3
    assert table.read_bytes() == (compared.folder / "table.csv").read_bytes()
    # The comparison's earlier run is gone, those of the cells are there.
    assert all(path.is_symlink() for path in (plan.folder / "wandb").glob("offline-run-*"))
    assert len(list((plan.folder / "wandb").glob("offline-run-*/*.wandb"))) == 2


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_group_of_a_comparison() -> None:
    (cell,) = make_plan(["+exp=quickstart", "strategy=ddp", "logger=wandb"]).cells
    assert cell.config["logger"]["group"] == GROUP
    assert cell.overrides[-1] == f"logger.group={GROUP}"
    (own,) = make_plan(["+exp=quickstart", "strategy=ddp", "logger=wandb", "logger.group=mine"]).cells
    assert own.config["logger"]["group"] == "mine"
    shaped = ["hardware=netlab", "hardware.rate=1gbit"]
    (netlab,) = make_plan(["+exp=quickstart", "strategy=ddp", "logger=wandb", *shaped]).cells
    assert netlab.overrides[-1] == "logger.group=compare-quickstart-netlab-2-hosts-1gbit"
    (plain,) = make_plan(["+exp=quickstart", "strategy=ddp"]).cells
    assert "group" not in plain.config["logger"]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["strategy=ddp,gqsgd", "seed=0,1"], ()),
        (["strategy=gqsgd", "strategy.bits=2,4", "seed=0,1"], ("strategy.bits",)),
        (["strategy=gqsgd,qsgd", "+strategy.block_size=64,128"], ("strategy.block_size",)),
        (["strategy=ddp", "model=resnet20,resnet18"], ("model.name",)),
        (["strategy=ddp,gqsgd", "optimizer.lr=0.1,0.2"], ("optimizer.lr",)),
    ],
)
def test_lines_of_the_workspace_are_the_variants(overrides: list[str], keys: tuple[str, ...]) -> None:
    cells = make_plan(["+exp=quickstart", *overrides]).cells
    assert grouping([cell.config for cell in cells]) == ("strategy.name", *keys)


# --- the workspace ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_key")
def test_workspace_definition(tmp_path: Path) -> None:
    definition = Definition(GROUP, "perplexity", "project", by=("strategy.name", "strategy.bits"), plots=("step_time",))
    assert save_workspace(definition, tmp_path / "folder" / "workspace.json") is None
    section = json.loads((tmp_path / "folder" / "workspace.json").read_text())["spec"]["section"]

    (runs,) = section["runSets"]
    (only,) = runs["filters"]["filters"]
    assert (only["key"], only["op"], only["value"]) == ({"section": "run", "name": "group"}, "=", GROUP)
    grouped = [(key["section"], key["name"]) for key in runs["grouping"]]
    assert grouped == [("config", "strategy.value.name"), ("config", "strategy.value.bits")]

    panels = {
        one["name"]: [(panel["config"].get("xAxis"), panel["config"].get("metrics")) for panel in one["panels"]]
        for one in section["panelBankConfig"]["sections"]
    }
    first, times, codec, last = panels
    assert first.startswith("perplexity against time, steps, samples")
    axes = [names.TRAIN_TIME, names.GLOBAL_STEP, names.SAMPLES, names.EPOCH, names.MB_SENT]
    assert panels[first] == [(axis, [PERPLEXITY.val]) for axis in axes]
    assert times == "step time: step, exposed, encode, decode"
    shown = [names.STEP_S, names.EXPOSED_S, names.ENCODE_S, names.DECODE_S]
    assert panels[times] == [(names.GLOBAL_STEP, [name]) for name in shown]
    assert codec == "gqsgd: bits, relative L2 error, non-finite blocks"
    assert [metrics for _, metrics in panels[codec]] == [
        [names.MESSAGE_BITS],
        [names.REL_L2],
        [names.NONFINITE_BLOCKS],
    ]
    assert len(panels[last]) == 2


@pytest.mark.usefixtures("no_key")
@pytest.mark.parametrize("group", ["lr=0.1", "a<b", "it's"])
def test_groups_that_filters_would_change_are_refused(group: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="filters of a workspace cannot express"):
        save_workspace(Definition(group, "acc", "project"), tmp_path / "workspace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_key")
def test_workspace_is_created_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    import wandb_workspaces.workspaces as ws

    saved = []

    class Api:
        default_entity = "somebody"

        def __init__(self, **_: Any) -> None: ...

    def save(self: Any) -> None:
        saved.append((self.entity, self.project, self.name))

    monkeypatch.setattr(wandb, "Api", Api)
    monkeypatch.setattr(ws.Workspace, "save", save)
    monkeypatch.setattr(ws.Workspace, "url", property(lambda self: f"https://there/{self.entity}/{self.project}"))
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    definition, file = Definition(GROUP, "acc", "project"), tmp_path / "workspace.json"
    for _ in range(2):
        assert save_workspace(definition, file) == "https://there/somebody/project"
    assert saved == [("somebody", "project", GROUP)]
    save_workspace(Definition(GROUP, "acc", "other", entity="team"), file)
    assert saved[1:] == [("team", "other", GROUP)]


@pytest.mark.usefixtures("no_key")
def test_a_key_without_an_entity_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "Api", lambda **_: SimpleNamespace(default_entity=None))
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with pytest.raises(RecipeError, match="the key has no default entity, name one with --entity; it is in "):
        save_workspace(Definition(GROUP, "acc", "project"), tmp_path / "workspace.json")


@pytest.mark.usefixtures("no_key")
def test_a_missing_network_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    from recipes.workspace import main as make_workspace

    def unreachable(**_: Any) -> Callable[..., Any]:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "Api", unreachable)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    file = tmp_path / "workspace.json"
    with pytest.raises(SystemExit) as stopped:
        make_workspace(["--group", GROUP, "--metric", "acc", "--file", str(file)])
    assert stopped.value.code == f"RecipeError: W&B has not taken the workspace: no network; it is in {file}"
    assert json.loads(file.read_text())["url"] is None
