"""Going on from a checkpoint: what has to stay as it was, and what is no checkpoint."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

from recipes.errors import RecipeError
from recipes.overrides import composed
from recipes.training.continuing import check_continued, uncompared
from recipes.training.train import train
from tests.errors import check_refused_in_one_line


def _earlier(folder: Path, *overrides: str) -> Path:
    """The checkpoint of a run with these settings, without weights."""
    checkpoint = folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True)
    with zipfile.ZipFile(checkpoint, "w") as archive:
        archive.writestr("last/data.pkl", b"")
    (folder / "hparams.yaml").write_text(_settings(overrides))
    return checkpoint


@lru_cache
def _settings(overrides: tuple[str, ...]) -> str:
    """The settings that a run with these overrides records."""
    return yaml.safe_dump(OmegaConf.to_container(composed(overrides), resolve=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["optimizer.lr=0.5"],
            r"^optimizer.lr=0.5 \(there: 0.1\): a run that goes on keeps what the run of .* had; set",
        ),
        (["data.batch_size=16"], r"^data.batch_size=16 \(there: 32\)"),
        (
            ["optimizer.lr=0.5", "data.batch_size=16"],
            r"optimizer.lr=0.5 \(there: 0.1\), data.batch_size=16 \(there: 32\)",
        ),
        (["data.val_samples=null"], r"^data.val_samples=null \(there: 0.1\)"),  # these images would be trained on
        (["model.width=8"], r"^model.width=8 \(there: 16\)"),
        (["model.blocks=[1,2]"], r"^model.blocks=\[1,2\] \(there: \[1,1,1\]\)"),
        (
            ["model=convnet", "trainer.devices=4"],
            r"^model._target_=workloads.convnet.ConvNet \(there: workloads.resnet.ResNet\).* more: ",
        ),
        (["task.label_smoothing=0.1"], r"^task.label_smoothing=0.1 \(there: 0.0\)"),
        (["seed=3"], r"^seed=3 \(there: 0\)"),
        (["trainer.devices=4"], r"^trainer.num_nodes \* trainer.devices=4 \(there: 2\)"),
        (["trainer.accumulate_grad_batches=2"], r"^trainer.accumulate_grad_batches=2 \(there: 1\)"),
        (["+data.crop=3"], r"^data.crop=3 \(there: not set\)"),
    ],
)
def test_settings_that_a_checkpoint_overrides_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    checkpoint = _earlier(tmp_path / "run")
    cfg = composed([f"ckpt_path={checkpoint}", *overrides])
    with pytest.raises(RecipeError, match=message) as caught:
        check_continued(cfg, str(checkpoint))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(f"or leave ckpt_path={checkpoint} out for a new run")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("trainer.max_epochs=90", "trainer.max_steps=1000", "logger=tensorboard", "threads=2", "test=false"),
        ("data.test_samples=100", "trainer.devices=1", "trainer.num_nodes=2", "trainer.log_every_n_steps=1"),
        ("+data.noise=0", "+trainer.deterministic=true", "title=other", "run_root=elsewhere"),
    ],
)
def test_settings_that_only_this_run_has_may_change(tmp_path: Path, overrides: Sequence[str]) -> None:
    checkpoint = _earlier(tmp_path / "run")
    assert uncompared(str(checkpoint)) is None
    check_continued(composed(["resume=true", *overrides]), str(checkpoint))


def test_a_run_goes_on_whose_model_has_no_name_in_its_file(tmp_path: Path) -> None:
    checkpoint = _earlier(tmp_path / "run")  # a run records the name of the class then
    check_continued(composed([f"ckpt_path={checkpoint}", "~model.name"]), str(checkpoint))


def test_a_checkpoint_without_settings_beside_it_is_not_compared_and_this_is_said(tmp_path: Path) -> None:
    checkpoint = _earlier(tmp_path / "run")
    (tmp_path / "run" / "hparams.yaml").unlink()
    check_continued(composed(["resume=true", "optimizer.lr=0.5"]), str(checkpoint))
    said = uncompared(str(checkpoint))
    assert said is not None
    assert "are not compared" in said


@pytest.mark.parametrize("text", ["[1, 2]", "{", "a: !unknown {}"])
def test_settings_that_cannot_be_read_are_one_line(tmp_path: Path, text: str) -> None:
    checkpoint = _earlier(tmp_path / "run")
    (tmp_path / "run" / "hparams.yaml").write_text(text)
    cfg = composed(["resume=true"])
    check_refused_in_one_line(RecipeError, "delete it to go on without it", check_continued, cfg, str(checkpoint))


def test_a_file_that_is_no_checkpoint_is_one_line(refusal: Callable[..., str], tmp_path: Path) -> None:
    text, cut, other = (tmp_path / name for name in ("notes.txt", "cut.ckpt", "other.zip"))
    text.write_text("no checkpoint")
    torch.save({"global_step": 3}, tmp_path / "whole.ckpt")
    cut.write_bytes((tmp_path / "whole.ckpt").read_bytes()[:-100])
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("pictures/1.txt", "no weights")
    for file, reason in ((text, "is not a checkpoint, or its end is missing"), (cut, "end"), (other, "is an archive")):
        line = refusal(f"ckpt_path={file}")
        assert line.startswith(f"RecipeError: {file} ")
        assert reason in line
        assert "\n" not in line


@pytest.mark.usefixtures("clean_process")
def test_a_file_of_torch_that_no_run_has_written_is_refused(tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    file = tmp_path / "weights" / "weights.pt"
    file.parent.mkdir()
    torch.save({"weights": torch.zeros(2)}, file)
    with pytest.raises(RecipeError, match="is not a checkpoint of a run, or is damaged"):
        train(tiny(f"ckpt_path={file}"), tmp_path / "run")


@pytest.mark.usefixtures("clean_process")
def test_a_run_records_the_settings_that_are_compared(tiny: Callable[..., DictConfig], tmp_path: Path) -> None:
    train(tiny("model.width=8", "trainer.max_epochs=1", "test=false"), tmp_path / "one")
    checkpoint = tmp_path / "one" / "checkpoints" / "last.ckpt"
    check_continued(tiny(f"ckpt_path={checkpoint}", "model.width=8"), str(checkpoint))
    with pytest.raises(RecipeError, match=r"model.width=16 \(there: 8\)"):
        train(tiny(f"ckpt_path={checkpoint}", "model.width=16"), tmp_path / "two")


def test_a_run_that_is_killed_leaves_no_result_of_an_earlier_run_in_its_folder(
    tiny: Callable[..., DictConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny("trainer.max_epochs=1"), tmp_path)
    result, checkpoint = tmp_path / "result.json", tmp_path / "checkpoints" / "last.ckpt"
    assert result.is_file()

    def killed(*arguments: object, **more: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr("lightning.pytorch.Trainer.fit", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train(tiny("trainer.max_epochs=2", "resume=true"), tmp_path)
    assert not result.is_file()
    assert checkpoint.is_file()
    with pytest.raises(RuntimeError, match="killed"):
        train(tiny("trainer.max_epochs=1", "strategy=gqsgd"), tmp_path)
    assert not checkpoint.is_file()  # `resume=true` would go on with the weights of another strategy
