"""Hydra as people know it: groups, several loggers, sweeps, folders of the user's own, and what nothing reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from omegaconf import DictConfig, OmegaConf
from torch import nn

from recipes.configuration import compose_configuration, for_hydra
from recipes.errors import RecipeError
from recipes.files import RESULT_FILE
from recipes.launch import sweeps
from recipes.launch.sweeps import check_sweeper, is_search
from recipes.loggers.chosen import chosen_loggers, wandb_settings
from recipes.overrides import composed, first_combination, parse
from recipes.own_folders import folders_of, named_targets, with_search_path
from recipes.strategies.choices import CONF
from recipes.tasks.image_classification import ImageClassifier
from recipes.tasks.optimizers import OwnOptimizer, make_optimizer, scaled
from recipes.training import train as training
from recipes.training.building import (
    build,
    build_callbacks,
    build_data,
    build_network,
    build_optimizer,
    build_task,
    build_trainer,
)
from recipes.training.train import train
from recipes.unread import READ, check_read
from tests.recipes.conftest import run_script

#: A module of the user's, which only files in a folder of the user's own may name.
OWN = "own_code_of_a_user"
CODE = """
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from recipes.data.digits import DigitsData
from recipes.measuring.metrics import Metric
from recipes.tasks.click_prediction import ClickPredictor


class Net(nn.Module):
    def __init__(self, hidden, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def forward(self, images):
        return self.layers(images)


class Data(DigitsData):
    pass


class Mine(Trainer):
    def __init__(self, greeting, **further):
        super().__init__(**further)
        self.greeting = greeting


class Seen(Callback):
    ends = 0

    def on_train_end(self, trainer, module):
        Seen.ends += 1
        assert trainer.greeting == "hello"


class Module(LightningModule):
    pass


class Judged(ClickPredictor):
    metric = "f1"


class OfOnesOwn(ClickPredictor):
    metric = Metric("f1", "F1")


class Untrained(ClickPredictor):
    pass
"""
FILES = {
    "model/net.yaml": f"_target_: {OWN}.Net\nhidden: ${{width}}\nclasses: ${{data.num_classes}}\n",
    "data/mine.yaml": f"defaults:\n  - digits\n_target_: {OWN}.Data\n",
    "optimizer/rmsprop.yaml": "_target_: torch.optim.RMSprop\nlr: 0.001\nalpha: 0.9\nschedule: cosine\nwarmup: 0.1\n",
    "trainer/mine.yaml": f"defaults:\n  - default\n_target_: {OWN}.Mine\ngreeting: hello\n",
    "callbacks/seen.yaml": f"seen:\n  _target_: {OWN}.Seen\n",
    "experiment/own.yaml": (
        "# @package _global_\ndefaults:\n  - override /model: net\n  - override /data: mine\n"
        "  - override /optimizer: rmsprop\n  - override /trainer: mine\n  - override /callbacks: seen\n"
        "title: own\nwidth: 16\ntrainer:\n  max_epochs: 1\n"
    ),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of configurations of a user's own, whose module can be imported."""
    folder = tmp_path / "mine, own"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / f"{OWN}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, OWN, raising=False)
    return folder


# --- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "quickstart" else pytest.mark.slow)
        for name in sorted(file.stem for file in (CONF / "exp").glob("*.yaml"))
    ],
)
def test_an_experiment_is_chosen_by_either_name(name: str) -> None:
    assert compose_configuration([f"experiment={name}"]) == compose_configuration([f"+exp={name}"])


def test_debugging_goes_over_an_experiment_wherever_it_stands() -> None:
    for words in (["debug=overfit", "+exp=quickstart"], ["experiment=quickstart", "+debug=overfit"]):
        trainer = compose_configuration(words).trainer
        assert (trainer.overfit_batches, trainer.max_epochs) == (3, 50)
    assert compose_configuration(["debug=overfit", "trainer.max_epochs=2"]).trainer.max_epochs == 2


@pytest.mark.parametrize("name", ["fast_dev_run", "overfit", "profiler"])
def test_each_way_to_debug_trains(
    name: str, tiny: Callable[..., DictConfig], tmp_path: Path, clean_process: None
) -> None:
    train(tiny(f"debug={name}", "trainer.max_epochs=1"), tmp_path)
    facts = json.loads((tmp_path / RESULT_FILE).read_text())
    assert facts["steps"] == (1 if name == "fast_dev_run" else 3)
    assert (tmp_path / "fit-profile.txt").is_file() == (name == "profiler")
    assert not (tmp_path / "checkpoints").exists()


def test_callbacks_of_several_files_stand_side_by_side(tmp_path: Path) -> None:
    cfg = composed(["callbacks=[early_stopping,model_checkpoint,rich_progress,lr_monitor]"])
    made = build_callbacks(cfg.callbacks, tmp_path)
    kinds = [EarlyStopping, ModelCheckpoint, RichProgressBar, LearningRateMonitor]
    assert list(map(type, made)) == kinds
    assert made[1].dirpath == str(tmp_path / "checkpoints")
    assert build_callbacks(None, tmp_path) == build_callbacks({"seen": None}, tmp_path) == []


def test_callbacks_take_part_in_a_training(
    tiny: Callable[..., DictConfig], tmp_path: Path, clean_process: None
) -> None:
    # The loss cannot fall by a million: the second validation is one without improvement.
    words = ["callbacks=[early_stopping,model_checkpoint,rich_progress]", "callbacks.early_stopping.min_delta=1e6"]
    train(tiny(*words, "callbacks.early_stopping.patience=1", "trainer.max_epochs=9"), tmp_path)
    facts = json.loads((tmp_path / RESULT_FILE).read_text())
    assert facts["epochs"] == 2
    assert {file.name for file in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}


@pytest.mark.parametrize(
    ("callback", "monitor", "words"),
    [
        ("early_stopping", "val_acc", "; did you mean 'val/acc'"),
        ("early_stopping", "test/acc", ""),
        ("model_checkpoint", "val_acc", "; did you mean 'val/acc'"),
        ("early_stopping", "step", ""),  # a ModelCheckpoint may watch it
        ("model_checkpoint", "val/acc5", "; did you mean 'val/acc'"),  # digits have 10 classes
    ],
)
def test_a_monitor_that_nothing_logs_is_refused_before_training(
    tiny: Callable[..., DictConfig], tmp_path: Path, clean_process: None, callback: str, monitor: str, words: str
) -> None:
    cfg = tiny(f"callbacks={callback}", f"callbacks.{callback}.monitor={monitor}")
    with pytest.raises(RecipeError, match=f"has monitor={monitor}, and nothing logs that in training{words}"):
        train(cfg, tmp_path)


def test_any_callback_of_lightning_is_allowed_and_nothing_else_of_its_modules() -> None:
    timer = build(OmegaConf.create({"_target_": "lightning.pytorch.callbacks.Timer", "duration": "00:00:01:00"}))
    assert isinstance(timer, Callback)
    for target in ("lightning.pytorch.callbacks.nothing", "lightning.pytorch.callbacks.Trainer", "os.system"):
        with pytest.raises(RecipeError, match="is not one of"):
            build(OmegaConf.create({"_target_": target}))


def test_paths_move_results_data_and_caches() -> None:
    words = ["data=image_folder", "paths.log_dir=elsewhere", "paths.data_dir=/data", "paths.cache_dir=/cache"]
    cfg = compose_configuration(words, with_hydra=True)
    assert (cfg.run_root, cfg.data.root) == ("elsewhere/digits/ddp-seed0", "/data")
    assert cfg.hydra.sweep.dir.startswith("elsewhere/multirun/")
    assert compose_configuration(["data=cifar10", "paths.cache_dir=/cache"]).data.cache_dir == "/cache"


# --- loggers ----------------------------------------------------------------------------------------------------------


def test_several_loggers_have_a_node_each() -> None:
    cfg = composed(["logger=[csv,wandb,tensorboard]", "logger.wandb.project=mine"])
    assert list(chosen_loggers(cfg)) == ["logger.wandb", "logger.tensorboard"]
    assert wandb_settings(cfg).project == "mine"
    assert list(chosen_loggers(composed(["logger=many_loggers"]))) == ["logger.wandb", "logger.tensorboard"]
    for choice, name in {"wandb": "wandb", "[csv]": "csv", "csv": "csv"}.items():
        assert chosen_loggers(composed([f"logger={choice}"]))["logger"].name == name
    assert wandb_settings(composed([])) is None


def test_what_hydra_is_told_stays_as_it_is_when_it_is_told_again() -> None:
    words = ["+exp=quickstart", "debug=overfit", "logger=[wandb,tensorboard]", "seed=1"]
    once = for_hydra(words)
    assert once[-1] == "+debug=overfit"
    assert for_hydra(once) == once


# --- what nothing reads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+callbacks=nonsense"], "callbacks is chosen without the plus.*its choices are early_stopping, lr_monitor"),
        (["callbacks=nonsense"], "callbacks=nonsense is not one of early_stopping"),
        (["callbacks=[early_stopping,nonsense]"], "callbacks=nonsense is not one of early_stopping"),
        (["+callbacks.early_stopping.patience=3"], "has no _target_.* choose callbacks=early_stopping"),
        (["+callbaks=early_stopping"], "callbaks=early_stopping: nothing reads callbaks; did you mean callbacks"),
        (["+lr=0.1"], "lr=0.1: nothing reads lr; leave it out"),
        (["+extras.print_config=true"], r"extras=\.\.\.: nothing reads extras; leave it out"),
        (["+hardware.ratte=1"], r"nothing reads hardware\.ratte; did you mean hardware\.rate\?"),
        (["+paths.logdir=x"], r"nothing reads paths\.logdir; did you mean paths\.log_dir\?"),
        (["+model=resnet20"], "model is chosen without the plus, model=resnet20"),
        (["debug=fast"], "debug=fast is not one of fast_dev_run, overfit, profiler"),
        (["logger=[wandb,tensorbord]"], "logger=tensorbord is not one of .* did you mean 'tensorboard'"),
        (["experiment=quickstat"], "experiment=quickstat is not one of .* did you mean 'quickstart'"),
    ],
)
def test_what_is_not_used_is_an_error_with_its_remedy(words: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        composed(words)


def test_an_entry_that_another_one_refers_to_is_read() -> None:
    assert composed(["+width=24", "model.width=${width}"]).model.width == 24
    assert composed(["+my.width=24", "model.width=${my.width}"]).model.width == 24


def test_everything_at_the_top_of_the_configuration_is_known() -> None:
    assert {*compose_configuration([])} <= {*READ}
    for hardware in sorted(file.stem for file in (CONF / "hardware").glob("*.yaml")):
        check_read(compose_configuration([f"hardware={hardware}"]))


# --- folders of the user's own ----------------------------------------------------------------------------------------


def test_the_folder_travels_as_an_override(own: Path, tmp_path: Path) -> None:
    for words in (["--config-dir", str(own), "seed=1"], ["seed=1", f"-cd={own}"]):
        given = with_search_path(words)
        assert given[0] == "seed=1"
        assert folders_of(given) == [own]
        assert with_search_path(given) == given
    both = with_search_path([f"hydra.searchpath=[file://{tmp_path}]", "--config-dir", str(own)])
    assert folders_of(both) == [tmp_path, own]
    with pytest.raises(RecipeError, match="--config-dir nowhere is not a folder"):
        with_search_path(["--config-dir", "nowhere"])


def test_what_the_users_own_files_name_is_trained(own: Path, tmp_path: Path, clean_process: None) -> None:
    words = with_search_path(["--config-dir", str(own), "experiment=own", "trainer.devices=1", "threads=1"])
    cfg = composed(words)
    OmegaConf.resolve(cfg)
    targets = named_targets([own])
    assert targets == {f"{OWN}.{name}" for name in ("Net", "Data", "Mine", "Seen")} | {"torch.optim.RMSprop"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "own_targets", lambda: targets)
        train(cfg, tmp_path)
    assert sys.modules[OWN].Seen.ends == 1
    facts = json.loads((tmp_path / RESULT_FILE).read_text())
    assert (facts["model"], facts["epochs"]) == ("Net", 1)
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert "square_avg" in saved["optimizer_states"][0]["state"][0]  # of RMSprop


def test_results_beside_choices_are_not_read_and_a_broken_choice_is_named(own: Path) -> None:
    targets = named_targets([own])
    result = own / "outputs" / "run" / "hparams.yaml"
    result.parent.mkdir(parents=True)
    result.write_text("_target_: os.system\nmachine: !!python/object:torch.version {}\n")
    assert named_targets([own]) == targets
    (own / "model" / "broken.yaml").write_text("_target_: [\n")
    with pytest.raises(RecipeError, match=r"broken\.yaml cannot be read \(while parsing .*; correct the file"):
        named_targets([own])


def test_a_choice_of_ones_own_is_known_and_a_misspelt_one_is_not(own: Path) -> None:
    folder = ["--config-dir", str(own)]
    with pytest.raises(RecipeError, match="experiment=owm is not one of .*own.* did you mean 'own'"):
        composed(with_search_path([*folder, "experiment=owm"]))
    with pytest.raises(RecipeError, match="there is no model.hiden; did you mean model.hidden"):
        composed(with_search_path([*folder, "experiment=own", "model.hiden=3"]))


def test_a_task_is_judged_by_any_metric_if_its_file_names_the_same(own: Path) -> None:
    target = f"{OWN}.OfOnesOwn"

    def judged_by(key: str) -> str:
        cfg = OmegaConf.create({"_target_": target, "metric": key})
        return build_task(cfg, frozenset({target}), network=nn.Linear(2, 1), settings=None).metric.key

    assert judged_by("f1") == "f1"
    with pytest.raises(RecipeError, match=r"task\.metric=auc, and .*OfOnesOwn is judged by f1; write metric: f1 into"):
        judged_by("auc")


@pytest.mark.parametrize(
    ("node", "target", "said"),
    [
        ("model", "missing.Net", r"_target_=missing\.Net: .*put that folder on PYTHONPATH"),
        (
            "model",
            f"{OWN}.Nett",
            r"own_code_of_a_user\.Nett: No module named '.*\.Nett'.*; correct the name, start",
        ),
        ("model", "torch.nn.LazyBatchNorm1d", r"has no shape for weight before its first batch.*in __init__"),
        ("model", f"{OWN}.Module", r"makes a Module, .*subclass of recipes\.tasks\.task\.Task"),
        ("data", f"{OWN}.Net", r"_target_=own_code_of_a_user\.Net: missing a required argument: 'hidden'"),
        ("task", f"{OWN}.Seen", r"got an unexpected keyword argument 'network'; leave the entry out"),
        (
            "task",
            f"{OWN}.Judged",
            r"is judged by 'f1'; give the class a recipes\.measuring\.metrics\.Metric as",
        ),
        ("task", f"{OWN}.Untrained", r"no parameter of task\._target_=.*\.Untrained and its model requires a gradient"),
        ("trainer", f"{OWN}.Seen", r"is not a class that inherits from lightning\.pytorch\.Trainer"),
        ("callbacks", f"{OWN}.Module", r"makes a Module, and recipes need a lightning.*Callback"),
        ("optimizer", "torch.optim.RMSprop", r"unexpected keyword argument 'betas'; leave the entry out"),
    ],
)
def test_a_target_of_ones_own_that_does_not_fit_is_refused_in_words(
    own: Path, tmp_path: Path, node: str, target: str, said: str
) -> None:
    cfg, targets = OmegaConf.create({"_target_": target}), frozenset({target})
    makers: dict[str, Callable[[], object]] = {
        "model": lambda: build_network(cfg, targets),
        "data": lambda: build_data(cfg, targets),
        "task": lambda: build_task(cfg, targets, network=None, settings=None),
        "trainer": lambda: build_trainer({"_target_": target}, tmp_path, targets),
        "callbacks": lambda: build_callbacks({"mine": cfg}, tmp_path, targets),
        "optimizer": lambda: build_optimizer({"_target_": target, "lr": 0.1, "betas": [0.9, 0.99]}, targets),
    }
    with pytest.raises(RecipeError, match=said):
        makers[node]()


@pytest.mark.parametrize("node", ["model", "data", "task", "trainer", "optimizer"])
def test_a_target_on_the_command_line_is_refused(node: str, tmp_path: Path) -> None:
    cfg = compose_configuration([f"+{node}._target_=os.system" if node in ("trainer", "optimizer") else "seed=0"])
    if node not in ("trainer", "optimizer"):
        cfg[node]._target_ = "os.system"
    makers: dict[str, Callable[[], object]] = {
        "model": lambda: build_network(cfg.model),
        "data": lambda: build_data(cfg.data),
        "task": lambda: build_task(cfg.task, frozenset()),
        "trainer": lambda: build_trainer(cfg.trainer, tmp_path),
        "optimizer": lambda: build_optimizer(cfg.optimizer),
    }
    with pytest.raises(RecipeError, match=r"_target_='os\.system' is not one of"):
        makers[node]()


# --- rates ------------------------------------------------------------------------------------------------------------


def test_the_rate_belongs_to_a_global_batch() -> None:
    node = OmegaConf.to_container(compose_configuration(["optimizer.scale_lr=256"]).optimizer)
    settings = build_optimizer(node)
    assert scaled(settings, 1024).lr == 4 * settings.lr
    assert scaled(settings, 256) == settings
    unscaled = build_optimizer({**node, "scale_lr": None})
    assert scaled(unscaled, 1024) == unscaled
    own = OwnOptimizer(torch.optim.Adagrad, {"lr": 0.01}, scale_lr=32)
    module = ImageClassifier(torch.nn.Linear(2, 2), own, num_classes=2)
    made = make_optimizer(module, scaled(own, 64), 10)
    assert type(made["optimizer"]) is torch.optim.Adagrad
    assert made["optimizer"].defaults["lr"] == 0.02
    with pytest.raises(RecipeError, match=r"optimizer\.scale_lr=32 scales optimizer\.lr, and there is none"):
        scaled(OwnOptimizer(torch.optim.Adagrad, scale_lr=32), 64)


def test_a_scaled_rate_is_trained_with_and_said(
    tiny: Callable[..., DictConfig], tmp_path: Path, clean_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optimizer.scale_lr=16", "trainer.accumulate_grad_batches=3", "optimizer.schedule=step"]
    train(tiny(*words, "optimizer.warmup=0", "trainer.max_epochs=1"), tmp_path)
    # 32 samples of one process, three times, over 16.
    assert "0.6 = 0.1 x 96 samples of a step / 16" in capsys.readouterr().out
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["optimizer_states"][0]["param_groups"][0]["initial_lr"] == pytest.approx(0.6)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_the_first_job_of_a_search_can_be_checked() -> None:
    words = ["optimizer.lr=interval(0.01,0.3)", "seed=choice(3,4)", "trainer.max_epochs=range(2,5)", "title=a"]
    first = first_combination(parse(words))
    assert first == ("optimizer.lr=0.01", "seed=3", "trainer.max_epochs=2", "title=a")


def test_a_search_without_optuna_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "PLUGIN", "hydra_plugins.not_installed")
    for word in ("hparams_search=optuna", "hydra/sweeper=optuna"):
        overrides = OverridesParser.create().parse_overrides([word])
        assert is_search(overrides)
        with pytest.raises(RecipeError, match=f"{word} needs hydra-optuna-sweeper; install it: uv sync --extra optuna"):
            check_sweeper(overrides)
    assert not is_search(parse(["seed=0,1"]))


@pytest.mark.slow
def test_every_job_of_a_sweep_has_processes_of_its_own(tmp_path: Path) -> None:
    words = ["+exp=quickstart", "data.train_samples=100", "data.val_samples=null", "model.blocks=[1,1]"]
    small = ["model.width=8", "trainer.max_epochs=1", "strategy=gqsgd", "seed=0,1", "hydra.sweep.dir=sweep"]
    run_script("run.py", "-m", *words, *small, cwd=tmp_path, timeout=280)
    facts = [json.loads(file.read_text()) for file in sorted((tmp_path / "sweep").glob(f"*/{RESULT_FILE}"))]
    assert [(fact["seed"], fact["processes"]) for fact in facts] == [(0, 2), (1, 2)]
