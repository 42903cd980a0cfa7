"""Trainings of some seconds in this process: what callbacks count and what is written."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch import Callback
from omegaconf import DictConfig
from torch import nn

from lightning_gqsgd.frameworks import distributed
from recipes.errors import RecipeError
from recipes.launch.command_line import refusals_in_one_line
from recipes.measuring import names
from recipes.measuring.communication import CommunicationCounter, ring_factor
from recipes.measuring.metrics import ACCURACY
from recipes.measuring.stopwatch import Stopwatch
from recipes.strategies.baselines import BaselineDDPStrategy
from recipes.tasks.image_classification import ImageClassifier
from recipes.tasks.optimizers import OptimizerSettings
from recipes.tasks.task import Task
from recipes.training.checkpoints import find_checkpoint, full_disk_in_one_line
from recipes.training.train import train

pytestmark = pytest.mark.usefixtures("clean_process")

Tiny = Callable[..., DictConfig]

STEPS = 3  # per epoch: 100 samples in batches of 32


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that moves by 1 s in every training step and by 100 s in every validation step, and at no other time."""
    fake = SimpleNamespace(now=0.0)
    training, validation = Task.training_step, Task.validation_step

    def slow_training(self: Task, batch: Any, batch_idx: int) -> Any:
        fake.now += 1
        return training(self, batch, batch_idx)

    def slow_validation(self: Task, batch: Any, batch_idx: int) -> Any:
        fake.now += 100
        return validation(self, batch, batch_idx)

    monkeypatch.setattr(Task, "training_step", slow_training)
    monkeypatch.setattr(Task, "validation_step", slow_validation)
    monkeypatch.setattr(Stopwatch, "mark", lambda self: fake.now)
    return fake


# --- time and resuming -----------------------------------------------------------------------------------------------


def test_training_time_leaves_validation_out(tiny: Tiny, tmp_path: Path, clock: SimpleNamespace) -> None:
    train(tiny(), tmp_path)
    assert clock.now > 2 * 100
    validations = [row for row in _rows(tmp_path) if ACCURACY.val in row]
    assert [float(row[names.TRAIN_TIME]) for row in validations] == [STEPS, 2 * STEPS]
    assert [float(row[names.SAMPLES]) for row in validations] == [STEPS * 32, 2 * STEPS * 32]
    (test,) = [row for row in _rows(tmp_path) if ACCURACY.test in row]
    assert float(test[names.TRAIN_TIME]) == 2 * STEPS
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["train_time"] == 2 * STEPS
    assert facts["step_s"]["median"] == 1


def test_training_time_leaves_callbacks_out_that_a_strategy_inserts(
    tiny: Tiny, tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            clock.now += 10

    connect = BaselineDDPStrategy.connect

    def inserting(self: BaselineDDPStrategy, model: Any) -> None:
        connect(self, model)
        model.trainer.callbacks.insert(0, Slow())

    monkeypatch.setattr(BaselineDDPStrategy, "connect", inserting)
    train(tiny("test=false"), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["train_time"] == 2 * STEPS


@pytest.mark.parametrize("same_folder", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_resumed_run_goes_on_where_the_first_stopped(
    tiny: Tiny, tmp_path: Path, clock: SimpleNamespace, same_folder: bool
) -> None:
    warnings.filterwarnings("error", message="Checkpoint directory .* exists and is not empty")  # it has to be
    first = tmp_path / "runs" / "first"
    second = first if same_folder else tmp_path / "runs" / "second"
    train(tiny(), first)
    train(tiny("trainer.max_epochs=3", "resume=true", f"run_root={tmp_path / 'runs'}"), second)
    rows = _rows(second)
    steps = [int(row["step"]) for row in rows if names.TRAIN_LOSS in row]
    assert steps == list(range(3 * STEPS))
    times = [float(row[names.TRAIN_TIME]) for row in rows if names.TRAIN_LOSS in row]
    assert times == [step + 1 for step in range(3 * STEPS)]
    assert [int(row["epoch"]) for row in rows if ACCURACY.val in row] == [0, 1, 2]
    facts = json.loads((second / "result.json").read_text())
    assert facts["samples"] == 3 * STEPS * 32
    assert facts["steps"] == 3 * STEPS


def test_resuming_gives_the_same_weights_as_one_run(tiny: Tiny, tmp_path: Path) -> None:
    constant = ("optimizer.schedule=cosine", "optimizer.warmup=0")
    train(tiny(*constant, "trainer.max_epochs=2"), tmp_path / "one")
    # The schedule knows the length of the run, so the interrupted run is one of two epochs as well.
    stopped = tiny(*constant, "trainer.max_epochs=2")
    with pytest.MonkeyPatch.context() as patch:
        _stop_after_first_epoch(patch)
        train(stopped, tmp_path / "two")
    train(tiny(*constant, f"ckpt_path={tmp_path / 'two/checkpoints/last.ckpt'}"), tmp_path / "rest")
    one, rest = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for name in ("one", "rest")
    )
    for name, value in one.items():
        torch.testing.assert_close(rest[name], value, rtol=0, atol=0, msg=name)


def _stop_after_first_epoch(patch: pytest.MonkeyPatch) -> None:
    def stop(self: Task) -> None:
        self.trainer.should_stop = True

    patch.setattr(Task, "on_train_epoch_end", stop)


def test_checkpoint_is_safe_to_load_and_small(tiny: Tiny, tmp_path: Path) -> None:
    train(tiny("trainer.max_epochs=1"), tmp_path)
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == STEPS
    assert checkpoint["callbacks"]["TrainingClock"]["samples"] == STEPS * 32
    assert not any("network" in str(key) for key in checkpoint.get("hyper_parameters", {}))


def test_a_full_disk_is_one_line_and_leaves_the_earlier_checkpoint(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, save = tmp_path / "checkpoints" / "last.ckpt", torch_io._atomic_save

    def save_one(state: dict[str, Any], path: Any) -> None:
        if checkpoint.exists():
            Path(path).write_bytes(b"the beginning")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, path)

    monkeypatch.setattr(torch_io, "_atomic_save", save_one)
    with pytest.raises(SystemExit) as stopped, refusals_in_one_line(), full_disk_in_one_line(tmp_path):
        train(tiny(), tmp_path)
    assert stopped.value.code == 1
    said = f"FullDiskError: no more room for the files of {tmp_path} (No space left on device); make room, and go on"
    assert f"{said} with ckpt_path={checkpoint}\n" in capsys.readouterr().err
    assert torch.load(checkpoint, weights_only=True)["epoch"] == 0
    assert [file.name for file in checkpoint.parent.iterdir()] == ["last.ckpt"]


def test_newest_of_several_runs_is_resumed(tiny: Tiny, tmp_path: Path) -> None:
    for number in (1, 2):
        file = tmp_path / f"run{number}" / "checkpoints" / "last.ckpt"
        file.parent.mkdir(parents=True)
        file.touch()
    os.utime(tmp_path / "run1" / "checkpoints" / "last.ckpt", (2e9, 2e9))
    found = find_checkpoint(tiny("resume=true", f"run_root={tmp_path}"), tmp_path / "run3")
    assert found == str(tmp_path / "run1" / "checkpoints" / "last.ckpt")


# --- names and files -------------------------------------------------------------------------------------------------


def test_fallback_is_named_everywhere(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = tiny("+data@cifar=cifar10").copy()
    cfg.data = {**cfg.cifar, "download": False, "cache_dir": str(tmp_path / "cache"), "batch_size": 32}
    cfg.data.train_samples = 100
    cfg.model.channels = 3
    train(cfg, tmp_path / "run")
    output = capsys.readouterr()
    assert "CIFAR-10 is not here" in output.err
    assert "quickstart on digits32 (fallback)" in output.out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["data"] == "digits32 (fallback)"
    assert "digits32 (fallback)" in (tmp_path / "run" / "hparams.yaml").read_text()
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 10_000


def test_every_promised_metric_is_in_the_csv(tiny: Tiny, tmp_path: Path) -> None:
    accuracy = train(tiny(), tmp_path)
    rows = _rows(tmp_path)
    training = {names.TRAIN_LOSS, ACCURACY.train, names.LEARNING_RATE, names.STEP_S, names.EXPOSED_S}
    always = {names.TRAIN_TIME, names.SAMPLES, names.MB_SENT, "step", "epoch"}
    assert training | always <= set(rows[0])
    (validation, _) = [row for row in rows if ACCURACY.val in row]
    assert {names.VAL_LOSS} | always <= set(validation)
    assert {names.TEST_LOSS, ACCURACY.test} | always <= set(rows[-1])
    assert accuracy == pytest.approx(float(rows[-1][ACCURACY.test]))
    assert 0 < accuracy <= 1


@pytest.mark.slow
def test_a_run_of_few_steps_has_a_row_and_no_warning(tiny: Tiny, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        train(tiny("trainer.log_every_n_steps=50", "trainer.max_steps=2", "test=false"), tmp_path)
    assert [str(warning.message) for warning in caught if "logging interval" in str(warning.message)] == []
    assert len([row for row in _rows(tmp_path) if names.TRAIN_LOSS in row]) == 1


@pytest.mark.slow
def test_without_test_the_last_validation_is_the_result(tiny: Tiny, tmp_path: Path) -> None:
    accuracy = train(tiny("test=false", "checkpoint=false"), tmp_path)
    assert accuracy == pytest.approx(float([row for row in _rows(tmp_path) if ACCURACY.val in row][-1][ACCURACY.val]))
    assert not (tmp_path / "checkpoints").exists()


def test_accumulated_batches_are_one_step_and_one_exchange(tiny: Tiny, tmp_path: Path, clock: SimpleNamespace) -> None:
    train(tiny("trainer.accumulate_grad_batches=3", "trainer.max_epochs=2"), tmp_path)
    facts = json.loads((tmp_path / "result.json").read_text())
    assert facts["steps"] == 2
    assert facts["samples"] == 2 * STEPS * 32
    assert facts["train_time"] == 2 * STEPS
    assert facts["step_s"]["median"] == 3  # each of the three batches takes a second
    assert [float(row[names.STEP_S]) for row in _rows(tmp_path) if names.STEP_S in row] == [3, 3]


# --- baselines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "hook"),
    [
        ("ddp", ""),
        ("ddp_bf16", "bf16_compress_hook"),
        pytest.param("ddp_fp16", "fp16_compress_hook", marks=pytest.mark.slow),
    ],
)
def test_hooks_are_installed_on_cpu(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, hook: str
) -> None:
    found: list[str] = []
    teardown = BaselineDDPStrategy.teardown

    def spy(self: BaselineDDPStrategy) -> None:
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            found.append(self.model._get_ddp_logging_data().get("comm_hook", ""))
        teardown(self)

    monkeypatch.setattr(BaselineDDPStrategy, "teardown", spy)
    train(tiny(f"strategy={strategy}", "trainer.max_epochs=1", "test=false"), tmp_path)
    assert found == [hook]


def test_powersgd_over_gloo_has_one_bucket_and_says_so(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[str] = []
    teardown = BaselineDDPStrategy.teardown

    def spy(self: BaselineDDPStrategy) -> None:
        if isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            sizes.append(self.model._get_ddp_logging_data()["rebuilt_bucket_sizes"])
        teardown(self)

    monkeypatch.setattr(BaselineDDPStrategy, "teardown", spy)
    arguments = ("strategy=powersgd", "strategy.powersgd_start=2", "model.width=96", "trainer.max_epochs=1")
    train(tiny(*arguments, "test=false"), tmp_path)  # 2.7 MB of gradients: two buckets of DDP's own sizes
    assert len(sizes) == 1
    assert int(sizes[0]) > 2**20  # a comma stands between the sizes of several buckets
    assert re.search(r"buckets +one, sent after the backward pass: torch's PowerSGD", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), {}, "0.bias and 1.bias have different dtypes"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), {}, "0.weight has sparse gradients.*take model.sparse=false"),
        (nn.Linear(2, 2), {"bucket_cap_mb": 5}, "bucket_cap_mb limits buckets.*leave strategy.bucket_cap_mb out"),
    ],
)
def test_powersgd_over_gloo_is_refused_where_gradients_do_not_fit_one_bucket(
    module: nn.Module, arguments: dict[str, int], words: str
) -> None:
    strategy = BaselineDDPStrategy(hook="powersgd", process_group_backend="gloo", **arguments)
    strategy.model = module
    with pytest.raises(RecipeError, match=f"powersgd over Gloo: {words}.* or take strategy=ddp_bf16"):
        strategy.configure_ddp()


def test_unknown_hook_is_refused() -> None:
    with pytest.raises(RecipeError, match="hook='int8' is not one of"):
        BaselineDDPStrategy(hook="int8")


def test_process_group_of_another_size_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda *_: 3)
    with pytest.raises(RuntimeError, match="this run asks for 1 processes, but the process group .* has 3"):
        train(tiny(), tmp_path)


def test_process_group_is_destroyed_at_exit_on_every_backend(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(distributed.atexit, "register", registered.append)
    train(tiny("trainer.max_epochs=1"), tmp_path)
    assert distributed._destroy in registered
    assert torch.distributed.is_initialized()
    distributed._destroy()
    assert not torch.distributed.is_initialized()
    distributed._destroy()  # again does nothing


@pytest.mark.parametrize(("hook", "bytes_per_coordinate"), [("none", 4), ("bf16", 2), ("fp16", 2)])
def test_baselines_count_the_rings_bytes(hook: str, bytes_per_coordinate: int) -> None:
    strategy = BaselineDDPStrategy(hook=hook)
    strategy._numel_by_itemsize = [(1000, 4), (24, 4)]
    assert strategy.bytes_sent_in_step(ring_factor(4)) == 1.5 * 1024 * bytes_per_coordinate


def test_powersgd_counts_what_its_state_reports() -> None:
    strategy = BaselineDDPStrategy(hook="powersgd")
    strategy._numel_by_itemsize = [(1000, 4)]
    state: Any = SimpleNamespace(total_numel_after_compression=0)
    strategy._powersgd = state
    assert strategy.bytes_sent_in_step(ring_factor(2)) == 4000  # before it starts to compress
    state.total_numel_after_compression = 100
    assert strategy.bytes_sent_in_step(ring_factor(2)) == 400


# --- bytes of gqsgd --------------------------------------------------------------------------------------------------


class _Trainer(SimpleNamespace):
    """As much of a Trainer as `CommunicationCounter` looks at."""

    def __init__(self) -> None:
        self.total = 0.0  # bytes that the strategy has sent
        telemetry = SimpleNamespace(totals=lambda: {"bytes_sent": self.total})
        strategy = SimpleNamespace(gqsgd_state=SimpleNamespace(telemetry=telemetry))
        super().__init__(global_step=0, log_every_n_steps=2, world_size=2, strategy=strategy)


def _step(counter: CommunicationCounter, trainer: Any, total: float) -> None:
    trainer.global_step += 1
    trainer.total = total
    counter.on_train_batch_end(trainer, SimpleNamespace(log=lambda *_: None), None, None, 0)  # type: ignore[arg-type]


def test_counter_follows_the_strategys_total_through_a_resumed_run() -> None:
    module: Any = SimpleNamespace(parameters=lambda: [torch.nn.Parameter(torch.zeros(1000))])
    trainer: Any = _Trainer()
    counter = CommunicationCounter("ddp")
    counter.on_train_start(trainer, module)
    for total in (1000, 2000, 3000):
        _step(counter, trainer, total)
    counter.on_train_end(trainer, module)
    assert counter.bytes_sent == 3000  # that of the third step, which has no row, included
    assert counter.bits_per_coordinate(2) == 8
    resumed = CommunicationCounter("gqsgd")
    resumed.load_state_dict(counter.state_dict())
    assert resumed.strategies == ["ddp", "gqsgd"]
    same = CommunicationCounter("gqsgd")
    same.load_state_dict(resumed.state_dict())
    assert same.strategies == ["ddp", "gqsgd"]
    trainer.total = 0.0  # the strategy's own total starts anew
    resumed.on_train_start(trainer, module)
    _step(resumed, trainer, 1000)
    _step(resumed, trainer, 2000)
    assert resumed.state_dict()["bytes_sent"] == 5000
    assert resumed.coordinates == 5000


def test_ring_factor() -> None:
    assert [ring_factor(n) for n in (1, 2, 4)] == [0, 1, 1.5]
    assert CommunicationCounter("ddp").bits_per_coordinate(1) is None


def test_both_sides_of_an_image_are_judged_and_one_is_trained() -> None:
    settings = OptimizerSettings("sgd", 0.1, 0.0, False, (0.9, 0.999), 0.0, "cosine", 0.0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    images = torch.randn(4, 3, 2, 2)
    one, both = (ImageClassifier(network, settings, num_classes=2, both_sides=flag) for flag in (False, True))
    assert torch.equal(both(images), network(images))
    assert torch.equal(one.judged(images), network(images))
    assert torch.equal(both.judged(images), (network(images) + network(images.flip(3))) / 2)
    assert torch.equal(both.judged(images), both.judged(images.flip(3)))
