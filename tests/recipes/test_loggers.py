from __future__ import annotations

import csv
import netrc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.errors import RecipeError
from recipes.files import WANDB_ID_FILE
from recipes.loggers import wandb_client
from recipes.loggers.csv_rows import ContinuedCSVLogger
from recipes.loggers.labels import Labels
from recipes.loggers.wandb_client import wandb_mode
from recipes.loggers.wandb_runs import wandb_logger
from recipes.measuring import names
from recipes.measuring.metrics import ACCURACY
from recipes.training.checkpoints import carry_wandb_id
from recipes.training.train import train
from tests.recipes.wandb_files import read_run

Tiny = Callable[..., DictConfig]


@pytest.mark.slow
@pytest.mark.usefixtures("clean_process", "no_key")
def test_wandb_without_a_key_is_offline_and_plots_against_training_time(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny("logger=wandb", "seed=3"), tmp_path)
    written = read_run(tmp_path)
    assert {written.step_metrics[name] for name in names.against_time(ACCURACY)} == {names.TRAIN_TIME}
    assert not written.globs
    validations = [row for row in written.rows if ACCURACY.val in row]
    assert len(validations) == 2
    for row in validations:
        assert {names.TRAIN_TIME, names.VAL_LOSS, names.SAMPLES, names.MB_SENT} <= set(row)
    assert any(ACCURACY.test in row and names.TRAIN_TIME in row for row in written.rows)
    assert written.run.display_name == "quickstart on digits, ddp, seed 3"
    assert written.run.run_group == "quickstart"

    with open(tmp_path / "metrics.csv", newline="") as lines:
        in_csv = [float(row[ACCURACY.val]) for row in csv.DictReader(lines) if row[ACCURACY.val]]
    assert [row[ACCURACY.val] for row in validations] == pytest.approx(in_csv)
    assert "no W&B key is configured" in capsys.readouterr().err


@pytest.mark.usefixtures("clean_process", "no_key")
def test_a_run_that_goes_on_continues_its_wandb_run(tmp_path: Path) -> None:
    labels = Labels("a run", "a group", "quickstart", "ddp")
    ids: list[str] = []
    folders = [tmp_path / "first", tmp_path / "second", tmp_path / "third"]
    for earlier, folder in zip([folders[0], *folders], folders, strict=False):
        folder.mkdir()
        if ids:
            carry_wandb_id(str(earlier / "checkpoints" / "last.ckpt"), folder)
        logger = wandb_logger(str(folder), labels, ACCURACY, "a project")
        ids.append(logger.experiment.id)
        logger.experiment.finish()
        # W&B names a part by the second in which it began, and real parts do not begin in one second.
        (own,) = (part for part in folder.glob("wandb/offline-run-*") if not part.is_symlink())
        own.rename(own.with_name(f"offline-run-20260101_00000{len(ids)}-{ids[0]}"))
        # All parts are there, for the one command that uploads what is offline.
        assert len([*folder.glob("wandb/offline-run-*/*.wandb")]) == len(ids)
    assert len({*ids}) == 1
    carry_wandb_id(None, tmp_path / "second")  # a new run in the same folder
    assert not (tmp_path / "second" / WANDB_ID_FILE).exists()


@pytest.mark.usefixtures("no_key")
def test_wandb_mode_never_needs_a_key_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode() == "offline"


@pytest.mark.usefixtures("no_key")
def test_wandb_key_in_netrc_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "netrc"
    file.write_text("machine api.wandb.ai login user password hidden\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    assert wandb_mode() == "online"
    monkeypatch.setattr(netrc, "netrc", lambda _: (_ for _ in ()).throw(netrc.NetrcParseError("bad")))
    assert wandb_mode() == "offline"


def test_wandb_that_cannot_be_reached_is_logged_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import wandb

    modes = []
    original = wandb.init

    def unreachable(**arguments: Any) -> Any:
        modes.append(arguments["mode"])
        if arguments["mode"] == "online":
            raise wandb.errors.CommError("no network")
        return original(**arguments)

    monkeypatch.setattr(wandb, "init", unreachable)
    monkeypatch.setattr(wandb_client, "wandb_mode", lambda: "online")
    labels = Labels("name", "group", "digits", "ddp", hardware="laptop")
    logger = wandb_logger(str(tmp_path), labels, ACCURACY, "project", tags=["mine", "ddp"])
    run = logger.experiment
    run.finish()
    assert modes == ["online", "offline"]
    assert run.offline
    assert (run.name, run.group, run.job_type, run.project) == ("name", "group", "ddp", "project")
    assert sorted(run.tags) == ["ddp", "digits", "laptop", "mine"]


@pytest.mark.usefixtures("clean_process", "no_key")
def test_a_project_that_wandb_refuses_is_a_line(tmp_path: Path) -> None:
    labels = Labels("name", "group", "digits", "ddp")
    with pytest.raises(RecipeError, match="a setting of logger: Invalid project name 'a/b'.*; choose another"):
        wandb_logger(str(tmp_path), labels, ACCURACY, "a/b")


@pytest.mark.usefixtures("clean_process", "no_key")
def test_only_rank_zero_makes_a_wandb_run(tmp_path: Path) -> None:
    rank_zero_only.rank = 1
    logger = wandb_logger(str(tmp_path), Labels("name", "group", "digits", "ddp"), ACCURACY, "project")
    logger.log_metrics({ACCURACY.val: 0.5}, step=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("clean_process")
def test_tensorboard_has_tags_against_training_time(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("logger=tensorboard", "strategy=gqsgd"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {ACCURACY.val, names.TRAIN_TIME, *names.GQSGD, "time/val_acc", "time/test_acc"} <= tags
    with open(tmp_path / "metrics.csv", newline="") as lines:
        every = list(csv.DictReader(lines))
    # The CSV has the same names; what is an event's step in TensorBoard is a column there.
    assert {tag for tag in tags if not tag.startswith("time/")} == set(every[0]) - {"step"}
    rows = [row for row in every if row[ACCURACY.val]]
    for event, row in zip(events.Scalars("time/val_acc"), rows, strict=True):
        assert event.step == int(1000 * float(row[names.TRAIN_TIME]))
        assert event.value == pytest.approx(float(row[ACCURACY.val]))


def test_csv_logger_keeps_rows_of_the_resumed_run_up_to_its_checkpoint(tmp_path: Path) -> None:
    first = ContinuedCSVLogger(tmp_path)
    for step in range(4):
        first.log_metrics({"a": float(step)}, step)
    first.save()
    second = ContinuedCSVLogger(tmp_path, tmp_path / "metrics.csv", before_step=2)
    second.log_metrics({"b": 9.0}, 2)
    second.save()
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["a"], row["b"]) for row in rows] == [("0", "0.0", ""), ("1", "1.0", ""), ("2", "", "9.0")]


def test_csv_logger_leaves_out_a_line_that_was_cut_off(tmp_path: Path) -> None:
    (tmp_path / "earlier.csv").write_text("a,step\n1.5,0\n2.5,1\n3")
    logger = ContinuedCSVLogger(tmp_path, tmp_path / "earlier.csv", before_step=9)
    logger.log_metrics({"a": 9.0}, 9)
    logger.save()
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [row["a"] for row in csv.DictReader(file)] == ["1.5", "2.5", "9.0"]


def test_csv_logger_starts_anew_without_an_earlier_run(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = ContinuedCSVLogger(tmp_path, tmp_path / "absent.csv", before_step=5)
        logger.log_metrics({"a": value}, 0)
        logger.save()
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [row["a"] for row in csv.DictReader(file)] == ["2.0"]
