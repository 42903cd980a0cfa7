"""Limits of numbers, and folders that take files."""

from __future__ import annotations

import typing
from pathlib import Path

import pytest
from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT_STR, _PRECISION_INPUT_STR_ALIAS
from lightning.pytorch.accelerators import AcceleratorRegistry

from recipes.errors import RecipeError
from recipes.folders import check_writable, claimed
from recipes.limits import ACCELERATORS, PRECISIONS, check_limits
from recipes.overrides import composed
from recipes.strategies.choices import CONF


@pytest.mark.parametrize("experiment", sorted(file.stem for file in (CONF / "exp").glob("*.yaml")))
def test_every_experiment_is_within_the_limits(experiment: str) -> None:
    check_limits(composed([f"+exp={experiment}"]))


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.lr=1e-9", "optimizer.weight_decay=0", "optimizer.momentum=0", "optimizer.warmup=0"],
        ["seed=4294967295", "threads=1", "task.label_smoothing=1", "trainer.gradient_clip_val=0.5"],
        ["trainer.max_epochs=-1", "trainer.max_steps=10", "trainer.precision=16", "trainer.limit_val_batches=0"],
        ["trainer.max_epochs=1", "trainer.limit_train_batches=0.5", "trainer.val_check_interval=3"],
        ["trainer.log_every_n_steps=0", "data.image_size=1"],
    ],
)
def test_numbers_at_the_limits_pass(overrides: list[str]) -> None:
    check_limits(composed(overrides))


def test_text_in_the_place_of_a_number_is_refused() -> None:
    cfg = composed([])
    cfg.optimizer.lr = "fast"
    with pytest.raises(RecipeError, match="optimizer.lr=fast is out of range"):
        check_limits(cfg)
    cfg = composed([])
    cfg.seed = True
    with pytest.raises(RecipeError, match="seed=true is out of range"):
        check_limits(cfg)


def test_precisions_are_those_of_lightning() -> None:
    assert {*typing.get_args(_PRECISION_INPUT_STR), *typing.get_args(_PRECISION_INPUT_STR_ALIAS)} == set(PRECISIONS)


def test_accelerators_are_those_of_lightning() -> None:
    registered = AcceleratorRegistry.available_accelerators()
    assert {"auto", "gpu", *registered} == set(ACCELERATORS)


def test_a_folder_that_takes_files_is_left_as_it_is(tmp_path: Path) -> None:
    check_writable("output", tmp_path)
    check_writable("output", tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(RecipeError, match=f"output={file}/in: {file} is not a folder"):
        check_writable("output", file / "in")


def test_a_folder_has_one_claim_at_a_time(tmp_path: Path) -> None:
    refused = pytest.raises(RecipeError, match=f"{tmp_path} is in use: .* with hydra.run.dir=FOLDER$")
    with claimed("hydra.run.dir", tmp_path), refused, claimed("hydra.run.dir", tmp_path):
        pass
    with claimed("hydra.run.dir", tmp_path):
        assert list(tmp_path.iterdir()) == []
