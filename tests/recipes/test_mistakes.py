"""Mistakes on the command line: each is one line with its remedy, before torch is imported."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lightning_gqsgd.errors import ConfigError
from recipes import compare, run
from recipes.comparison import runner
from recipes.data.named_files import check_named, named_file
from recipes.data.sizes import TRAINING_SAMPLES
from recipes.errors import RecipeError
from recipes.folders import claimed
from recipes.launch import hardware
from recipes.launch.command_line import examine, refusals_in_one_line
from recipes.opening import announce, missing_packages_in_one_line, speaks
from recipes.overrides import composed
from recipes.strategies.choices import check_settings
from recipes.training.checkpoints import find_checkpoint, finished_message, goes_on_with
from tests.recipes.conftest import ROOT, clean_environment, run_script
from workloads.digits import load_digits

#: Command lines, and what is said of them.
MISTAKES = {
    "strategy=gqsgd strategy.bit=3": "RecipeError: strategy.bit=3: .* did you mean strategy.bits?",
    "strategy.bit=3": "RecipeError: strategy.bit=3: strategy=ddp has no bit .*take e.g. strategy=gqsgd strategy.",
    "strategy=ddp strategy.bits=3": "take e.g. strategy=gqsgd strategy.bits=3$",
    "strategy=gqsgd strategy.block_size=64": "a field of GQSGDConfig.*added with .strategy.block_size=64$",
    "strategy=gqsgd4bit": "RecipeError: strategy=gqsgd4bit is not a strategy; did you mean 'gqsgd_4bit'",
    "trainer.max_epoch=2": "RecipeError: trainer.max_epoch=2: .* did you mean trainer.max_epochs?",
    "trainer.deterministic=true": "arguments of lightning.pytorch.Trainer are added with .trainer.deterministic=true",
    "lr=0.1": "RecipeError: lr=0.1: there is no lr; did you mean optimizer.lr?",
    "hardwear=cpu": "did you mean hardware?",
    "model=resnet17": "RecipeError: model=resnet17 is not one of .*resnet18.*did you mean 'resnet1",
    "logger=null": "RecipeError: logger=null is not one of csv, many_loggers, tensorboard, wandb$",
    "~optimizer": "RecipeError: optimizer is not chosen, and a run needs it: take optimizer=NAME, one of default$",
    "exp=quickstart": r"RecipeError: exp=quickstart: .* write \+exp=quickstart$",
    "data=wikitext": r"data, model and task do not fit each other; \+exp=NAME chooses three that do$",
    "optimizer.lr=abc": "RecipeError: optimizer.lr=abc: optimizer.lr is a number, e.g. optimizer.lr=0.1$",
    "trainer.max_epochs=2.5": "trainer.max_epochs is an integer, e.g. trainer.max_epochs=20$",
    "test=maybe": "test is true or false, e.g. test=true$",
    "model.blocks=3": r"model.blocks is a list, e.g. model.blocks=\[1,1,1\]$",
    "data.train_samples=many": "data.train_samples is an integer, e.g. data.train_samples=1000$",
    "trainer.devices": "'trainer.devices' has no value; settings are written key=value",
    "model.blocks=[1": r"cannot read 'model.blocks=\[1': brackets",
    "--epochs 3": "RecipeError: unknown option --epochs; settings are written key=value",
    "seed=0,1": "RecipeError: seed=0,1: a comma list makes several runs; take python recipes/compare.py",
    "-m": "RecipeError: -m makes one run of each value .* leave -m out, or write e.g. -m seed=0,1",
    "trainer.devices=0": "RecipeError: trainer.devices=0 makes no process; take a number of at least 1$",
    "trainer.devices=[]": "RecipeError: trainer.devices=.* names no device",
    "trainer.devices=two": "RecipeError: trainer.devices=two is not a number of processes; take an integer of at le",
    "trainer.devices=true": "RecipeError: trainer.devices=true is not a number of processes",
    "trainer.devices=[0,1]": r"RecipeError: trainer.devices=\[0,1\] names GPUs, and this run has accelerator=cpu",
    "trainer.devices=-1": "RecipeError: trainer.devices=-1 names GPUs",
    "title=../..": "RecipeError: title=../.. would lead out of the folder of all runs; take a name without",
    "optimizer.name=adamm": "RecipeError: optimizer.name=adamm is not one of sgd, adam, adamw; did you mean 'adam'?",
    "+trainer.foo=1": "RecipeError: trainer.foo=1: lightning.pytorch.Trainer has no argument foo; leave it out",
    "+trainer.max_epoch=1": "Trainer has no argument max_epoch; did you mean trainer.max_epochs?",
    "+trainer.logger=false": "RecipeError: trainer.logger=False: recipes give .* its logger themselves; leave it",
    "+model.depth=3": "workloads.resnet.ResNet has no argument depth; it has blocks, bottleneck, channels",
    "strategy=gqsgd +strategy.bogus=1": "RecipeError: strategy.bogus=1: .*GQSGDStrategy has no argument bogus",
    "strategy=gqsgd +strategy.blocksize=64": "did you mean strategy.block_size?",
    "+optimizer.beta=1": "has no argument beta; did you mean optimizer.betas?",
    "model.act=relu": "model.act=relu: there is no model.act; model has name, blocks, width, channels, num_classes$",
    "model.mode=relu": "there is no model.mode; model has name, blocks, width, channels, num_classes$",
    "optim.lr=1": "there is no optim.lr; did you mean optimizer.lr",
    "strategy=gqsgd strategy.bits=9": "RecipeError: strategy.bits=9 is out of range: 1 to 8, 16, 32, or auto",
    "strategy=gqsgd strategy.bits=abc": "RecipeError: strategy.bits=abc is out of range",
    "strategy=gqsgdd": "strategy=gqsgdd is not a strategy; did you mean 'gqsgd'.*all: python recipes/run.py --help.$",
    "strategy=quantum": "strategy=quantum is not a strategy; take e.g. ddp, ddp_bf16, gqsgd, gqsgd_4bit or gqsgd_dil",
    "strategy=": "RecipeError: strategy= names no strategy; take e.g. ddp",
    "data.batch_size=100000": "RecipeError: 1,293 training samples cannot fill one step of 2 .*=646 or less",
    "data.train_samples=1": "RecipeError: 1 training sample cannot fill one step .*; take fewer processes, or more",
    "data.val_samples=1.5": "RecipeError: data.val_samples=1.5 is out of range: 1 to 1436, .* a share of them, such as",
    "data.val_samples=1430": "RecipeError: 7 training samples cannot fill .*; take data.batch_size=3 or less",
    "ckpt_path=nowhere.ckpt": "RecipeError: ckpt_path=nowhere.ckpt is not a file",
    "optimizer.lr=nan": "RecipeError: optimizer.lr=nan is out of range: a finite number above 0, e.g. optimizer.*=0.1$",
    "trainer.log_every_n_steps=-1": "RecipeError: trainer.log_every_n_steps=-1 is out of range: an integer of at le",
    "data.image_size=0": "RecipeError: data.image_size=0 is out of range: an integer of at least 1, e.g. data.image_",
    "optimizer.momentum=1": "RecipeError: optimizer.momentum=1 is out of range: a number from 0 to less than 1",
    "data.shift=-1": "RecipeError: data.shift=-1 is out of range: an integer of at least 0, in pixels",
    "trainer.gradient_clip_val=0": "RecipeError: trainer.gradient_clip_val=0 .* or null for no clipping",
    "seed=-1": "RecipeError: seed=-1 is out of range: an integer from 0 to 4294967295",
    "trainer.max_epochs=-2": "RecipeError: trainer.max_epochs=-2 .* or -1 for no limit",
    "trainer.max_steps=null": "RecipeError: trainer.max_steps=null is out of range",
    "trainer.max_epochs=-1": "RecipeError: trainer.max_epochs=-1 with trainer.max_steps=-1 makes a run without an end",
    "trainer.precision=8": "RecipeError: trainer.precision=8 is not one of transformer-engine, .*bf16-mixed",
    "trainer.limit_val_batches=1.5": "RecipeError: trainer.limit_val_batches=1.5",
    "hydra.run.dir=/dev/full": "RecipeError: hydra.run.dir=/dev/full: /dev/full is not a folder; name a folder",
    "hydra.run.dir=/proc/x": "RecipeError: hydra.run.dir=/proc/x cannot be written to .*; name a folder that can$",
    "resume=true": "RecipeError: resume=true: there is no checkpoints/last.ckpt .*; .* a file with ckpt_path=PATH$",
    "+exp=resnet_cifar data.root=/nowhere": "RecipeError: data.root=/nowhere does not exist; name a folder",
    "+exp=transformer_wikitext data.train_file=no.txt": "RecipeError: data.train_file=no.txt is not a file; name",
}
#: Others that go the same way as one above, through the same function and to a message of its kind.
LIKE_ANOTHER = {
    "trainer.num_nodes=0": "RecipeError: trainer.num_nodes=0 makes no process",
    "trainer.num_nodes=null": "RecipeError: trainer.num_nodes=null makes no process",
    "trainer.devices=null": "RecipeError: trainer.devices=null is not a number of processes; .* a list of GPUs such",
    "hardware.devices=1.5": "RecipeError: hardware.devices=1.5 is not a number of processes",
    "trainer.devices=[a]": r"RecipeError: trainer.devices=\['?a'?\] is not a number of processes",
    "optimizer.schedule=cos": "RecipeError: optimizer.schedule=cos is not one of onecycle, cosine, step",
    "trainer.accelerator=gpuu": "RecipeError: trainer.accelerator=gpuu is not one of .*; did you mean 'gpu'?",
    "optimizer.lr=0": "RecipeError: optimizer.lr=0",
    "optimizer.weight_decay=inf": "RecipeError: optimizer.weight_decay=inf is out of range: a finite number of at l",
    "optimizer.warmup=-0.1": "RecipeError: optimizer.warmup=-0.1",
    "task.label_smoothing=1.5": "RecipeError: task.label_smoothing=1.5 is out of range: a number from 0 to 1",
    "threads=0": "RecipeError: threads=0 is out of range: an integer from 1 to 1024, or null",
    "seed=4294967296": "RecipeError: seed=4294967296",
    "model.width=0": "RecipeError: model.width=0",
    "data.batch_size=0": "RecipeError: data.batch_size=0",
    "trainer.max_epochs=0": "RecipeError: trainer.max_epochs=0 is out of range: an integer of at least 1, or -1 for",
    "trainer.max_steps=0": "RecipeError: trainer.max_steps=0 is out of range: an integer of at least 1, or -1 for n",
    "trainer.max_steps=-5": "RecipeError: trainer.max_steps=-5",
    "trainer.limit_train_batches=0": "RecipeError: trainer.limit_train_batches=0",
    "trainer.accumulate_grad_batches=0": "RecipeError: trainer.accumulate_grad_batches=0",
    "trainer.val_check_interval=0.0": "RecipeError: trainer.val_check_interval=0.0",
    "hydra.run.dir=/dev/full/x": "RecipeError: hydra.run.dir=/dev/full/x: /dev/full is not a folder",
}


@pytest.mark.parametrize(
    ("words", "message"),
    [*MISTAKES.items(), *(pytest.param(*one, marks=pytest.mark.slow) for one in LIKE_ANOTHER.items())],
)
def test_a_mistake_is_one_line_with_its_remedy(refusal: Callable[..., str], words: str, message: str) -> None:
    line = refusal(*words.split())
    assert re.search(message, line), line
    assert "\n" not in line


def test_more_processes_than_a_machine_can_start_are_refused(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "processors", lambda: 2)
    line = refusal("trainer.devices=64")
    assert line.startswith("RecipeError: trainer.devices=64 asks for 64 processes on 2 cores")
    assert line.endswith("take at most 16, 8 per core")
    # srun has started these already, and has bound each to a core of its own.
    monkeypatch.setattr(hardware, "processors", lambda: 1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    monkeypatch.setenv("SLURM_PROCID", "1")
    hardware.check_devices({"trainer": {"accelerator": "cpu", "devices": 16, "num_nodes": 1}})


def test_mistakes_and_first_words_need_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['run.py', 'trainer.devices=0']\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from recipes.run import start\n"
        "assert 'hydra' not in sys.modules\n"
        "try:\n    start()\n"
        "except SystemExit as stopped:\n    print(stopped.code, [name for name in HEAVY if name in sys.modules])\n"
    )
    heavy = "HEAVY = ('torch', 'lightning', 'numpy', 'matplotlib')\n"
    finished = subprocess.run(
        [sys.executable, "-c", heavy + program],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    first, last = finished.stdout.splitlines()
    assert first == "run.py: one training with trainer.devices=0; reading the configuration ..."
    assert last == "2 []"


def test_answers_of_hydra_are_printed_alone(tmp_path: Path) -> None:
    answered = run_script("run.py", "--cfg", "job", "+exp=quickstart", "seed=3", cwd=tmp_path)
    assert yaml.safe_load(answered.stdout)["seed"] == 3
    assert run_script("run.py", "--help", cwd=tmp_path).stdout.startswith("recipes/run.py is powered by Hydra.\n")


def test_right_command_lines_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in set(clean_environment()) ^ set(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["recipes/run.py"])
    right = ["+exp=quickstart", "optimizer.lr=1", "model.blocks=[1,1]", "data.train_samples=100", "+hardware.env.A=1"]
    assert examine([*right, "trainer.devices=auto", "trainer.limit_val_batches=2", "strategy=gqsgd"]) is None
    assert examine(["-m", "seed=0,1", "trainer.devices=1"]) is None
    cfg = composed(["+exp=quickstart", "strategy=gqsgd", "+strategy.block_size=64", "threads=2"])
    assert (cfg.strategy.block_size, cfg.threads) == (64, 2)


@pytest.mark.parametrize(
    ("environment", "of_one_process", "is_said"),
    [
        ({}, False, True),
        ({"LOCAL_RANK": "1"}, False, False),
        ({"RANK": "2", "LOCAL_RANK": "0"}, False, True),
        ({"LOCAL_RANK": "1"}, True, True),
    ],
    ids=["alone", "second of a machine", "first of another machine", "what one process alone finds"],
)
def test_one_process_of_a_machine_says_what_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    of_one_process: bool,
    is_said: bool,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped, refusals_in_one_line():
        raise RecipeError("too few samples", of_one_process=of_one_process)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == ("RecipeError: too few samples\n" if is_said else "")


def test_known_sizes_are_those_of_the_data() -> None:
    assert TRAINING_SAMPLES["recipes.data.digits.DigitsData"] == len(load_digits("digits", 8, 1).train_labels)


def test_only_the_first_process_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert speaks({})
    assert speaks({"RANK": "0", "LOCAL_RANK": "0"})
    assert not speaks({"RANK": "2", "LOCAL_RANK": "0"})
    assert not speaks({"LOCAL_RANK": "1"})
    monkeypatch.setenv("LOCAL_RANK", "1")
    announce("run.py", "one training", [])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["run.py"], ["compare.py"], ["compare.py", "--from", "outputs"]])
def test_an_environment_without_the_packages_of_recipes_is_one_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "hydra.py").write_text("raise ModuleNotFoundError('No module named hydra', name='hydra')")
    done = run_script(*words, cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    expected = rf"{words[0]}: \S+ has no package 'hydra', which recipes need; call `uv sync` .* '\.\[recipes\]' there\n"
    assert re.fullmatch(expected, done.stderr)


def test_a_module_that_is_missing_in_the_clone_is_no_matter_of_installation() -> None:
    with pytest.raises(ModuleNotFoundError), missing_packages_in_one_line("run.py"):
        importlib.import_module("recipes.no_such_module")


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_found_relative_to_the_root_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    (root / "valid.txt").write_text("a text")
    monkeypatch.chdir(tmp_path)
    assert named_file("valid.txt", root) == root / "valid.txt"
    assert named_file(root / "valid.txt", None) == root / "valid.txt"
    assert named_file("valid.txt", None) is None
    check_named({"root": str(root), "train_file": "valid.txt", "valid_file": None})
    with pytest.raises(RecipeError, match=r"data.train_file=train.txt is not a file, neither in .* nor in data.root="):
        check_named({"root": str(root), "train_file": "train.txt"})
    with pytest.raises(RecipeError, match=rf"data.root={root}/more does not exist \({root} does\)"):
        check_named({"root": f"{root}/more"})


@pytest.mark.parametrize("refused", ["stat", "access"])  # in a folder of another user's, and as a file of another's
def test_what_this_user_may_not_read_is_said_to_be_so(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "of_another_user"
    file.touch()

    def refuse(*_: object, **__: object) -> bool:
        if refused == "access":
            return False
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(*((os, "access", refuse) if refused == "access" else (Path, "stat", refuse)))
    with pytest.raises(RecipeError, match=f"data.root={file} may not be read by this user; ask its owner"):
        check_named({"root": str(file)})
    with pytest.raises(RecipeError, match=f"data.train_file={file} may not be read by this user; ask its owner"):
        check_named({"train_file": str(file)})
    with pytest.raises(RecipeError, match=f"ckpt_path={file} may not be read by this user; ask its owner"):
        find_checkpoint(OmegaConf.create({"ckpt_path": str(file)}), tmp_path)


# --- going on ---------------------------------------------------------------------------------------------------------


def test_an_interrupt_names_the_checkpoint_and_the_command(tmp_path: Path) -> None:
    words = ["recipes/run.py", "+exp=quickstart", "resume=true", "title='a b'"]
    before = goes_on_with(tmp_path, words)
    assert "interrupted before the first checkpoint" in before
    assert "python recipes/run.py +exp=quickstart resume=true" in before
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    after = goes_on_with(tmp_path, words)
    assert f"the checkpoint of the last validation is {checkpoint}\n" in after
    assert after.splitlines()[-1].startswith("  python recipes/run.py +exp=quickstart ")
    assert after.endswith(f" ckpt_path={checkpoint}")
    assert "resume=true" not in after


@pytest.mark.parametrize(
    ("overrides", "finished"),
    [
        (["trainer.max_epochs=5"], "trainer.max_epochs=5"),
        (["trainer.max_epochs=6"], None),
        (["trainer.max_epochs=-1", "trainer.max_steps=40"], "trainer.max_steps=40"),
        (["trainer.max_epochs=6", "trainer.max_steps=41"], None),
    ],
)
def test_a_finished_run_says_so(tmp_path: Path, overrides: list[str], finished: str | None) -> None:
    checkpoint = tmp_path / "checkpoints" / "last.ckpt"
    cfg = composed(overrides)
    assert finished_message(cfg, str(checkpoint)) is None  # no result: the run was interrupted
    (tmp_path / "result.json").write_text('{"epochs": 5, "st')
    assert finished_message(cfg, str(checkpoint)) is None
    (tmp_path / "result.json").write_text(json.dumps({"epochs": 5, "steps": 40}))
    message = finished_message(cfg, str(checkpoint))
    assert (message is None) == (finished is None)
    if message is not None:
        assert f"is finished ({finished}), and nothing has been written" in message


def test_a_finished_run_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs" / "quickstart" / "ddp-seed0" / "earlier"
    (folder / "checkpoints").mkdir(parents=True)
    with zipfile.ZipFile(folder / "checkpoints" / "last.ckpt", "w") as archive:
        archive.writestr("last/data.pkl", b"")
    (folder / "result.json").write_text(json.dumps({"epochs": 20, "steps": 400}))
    files = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["recipes/run.py", "+exp=quickstart", "resume=true"])
    run.start()
    assert "nothing to go on with" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == files


@pytest.mark.parametrize("strategy", ["ddp", "gqsgd_4bit", "gqsgd_auto", "dore", "gqsgd_diloco"])
def test_settings_of_every_kind_of_strategy_pass(strategy: str) -> None:
    check_settings(composed([f"strategy={strategy}"]).strategy)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy=gqsgd", "+strategy.reducer=ring"], "reducer='ring'"),
        (["strategy=gqsgd_diloco", "strategy.local_steps=0"], "local_steps=0 is out of range"),
        (["strategy=gqsgd_diloco", "+strategy.delay=32"], "delay=32 must be less than every=32"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_lightning_is_imported(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(composed(overrides).strategy)


def test_the_folder_of_a_run_under_way_is_refused(tmp_path: Path) -> None:
    with claimed("hydra.run.dir", tmp_path), pytest.raises(RecipeError, match=f"^{tmp_path} is in use: "):
        examine(["+exp=quickstart", f"hydra.run.dir={tmp_path}"])


def test_the_folder_of_a_comparison_under_way_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "run_all", None)
    folder = tmp_path / "quickstart"
    folder.mkdir()
    with claimed("output", folder), pytest.raises(SystemExit) as stopped:
        compare.main(["+exp=quickstart", f"output={tmp_path}"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"compare.py: {folder} is in use: another process writes to it")


@pytest.mark.parametrize("folder", ["/dev/full", "/proc/x"])
def test_an_output_that_takes_no_files_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare.main(["+exp=quickstart", f"output={folder}"])
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"compare.py: output={folder}")
    assert line.count("\n") == 1


def test_mistakes_of_a_comparison_are_explained_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare.main(["strategy=ddp"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("compare.py: name one experiment: +exp=NAME, one of ")
    with pytest.raises(SystemExit):
        compare.main(["+exp=quickstart", "-m"])
    assert capsys.readouterr().err == "compare.py: comma lists are the sweep here; leave -m out\n"
    with pytest.raises(SystemExit):
        compare.main(["+exp=quickstart", "--frm", "outputs"])
    refused = "compare.py: unrecognized arguments: --frm outputs; python recipes/compare.py --help has all\n"
    assert capsys.readouterr().err == refused
