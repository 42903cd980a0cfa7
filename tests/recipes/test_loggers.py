from __future__ import annotations

import csv
import json
import netrc
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipes.tasks import loggers, names
from recipes.tasks.loggers import ContinuedCSVLogger, wandb_mode
from recipes.tasks.metrics import ACCURACY
from recipes.tasks.training import train

Tiny = Callable[..., DictConfig]


@pytest.fixture
def no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No W&B credentials anywhere."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


def _records(file: Path) -> Iterator[Any]:
    """Records of a .wandb file: LevelDB's log format, blocks of 32 KiB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    contents = file.read_bytes()
    assert contents[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(contents):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", contents, place)
        part = contents[place + 7 : place + 7 + length]
        place += 7 + length
        record = part if kind in (1, 2) else record + part  # 1: whole, 2: first, 3: middle, 4: last
        if kind in (1, 4):
            message = Record()
            message.ParseFromString(record)
            yield message


@pytest.mark.usefixtures("clean_process", "no_key")
def test_wandb_without_a_key_is_offline_and_plots_against_training_time(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("logger=wandb", "seed=3"), tmp_path)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    records = list(_records(file))

    steps = {record.metric.name: record.metric.step_metric for record in records if record.HasField("metric")}
    assert {steps[name] for name in names.against_time(ACCURACY)} == {names.TRAIN_TIME}
    assert not any(record.metric.glob_name for record in records)

    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    validations = [row for row in rows if ACCURACY.val in row]
    assert len(validations) == 2
    for row in validations:
        assert {names.TRAIN_TIME, names.VAL_LOSS, names.SAMPLES, names.MB_SENT} <= set(row)
    assert any(ACCURACY.test in row and names.TRAIN_TIME in row for row in rows)

    (run,) = [record.run for record in records if record.HasField("run")]
    assert run.display_name == "quickstart on digits, ddp, seed 3"
    assert run.run_group == "quickstart"

    with open(tmp_path / "metrics.csv", newline="") as lines:
        written = [float(row[ACCURACY.val]) for row in csv.DictReader(lines) if row[ACCURACY.val]]
    assert [row[ACCURACY.val] for row in validations] == pytest.approx(written)


@pytest.mark.usefixtures("no_key")
def test_wandb_mode_never_needs_a_key_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wandb_mode() == "offline"
    assert "no W&B key is configured" in capsys.readouterr().err
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
    monkeypatch.setattr(loggers, "wandb_mode", lambda: "online")
    logger = loggers.wandb_logger(str(tmp_path), "name", "group", ACCURACY, "project")
    logger.experiment.finish()
    assert modes == ["online", "offline"]


@pytest.mark.usefixtures("clean_process")
def test_tensorboard_has_tags_against_training_time(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("logger=tensorboard"), tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {ACCURACY.val, names.TRAIN_TIME, "time/val_acc", "time/test_acc"} <= set(events.Tags()["scalars"])
    with open(tmp_path / "metrics.csv", newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row[ACCURACY.val]]
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


def test_csv_logger_starts_anew_without_an_earlier_run(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = ContinuedCSVLogger(tmp_path, tmp_path / "absent.csv", before_step=5)
        logger.log_metrics({"a": value}, 0)
        logger.save()
    with open(tmp_path / "metrics.csv", newline="") as file:
        assert [row["a"] for row in csv.DictReader(file)] == ["2.0"]
