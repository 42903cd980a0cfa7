"""Checkpoints of the Trainer: other numbers of ranks, weights alone, safe loading, parameters frozen in between."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, LearningRateFinder, ModelCheckpoint

from lightning_gqsgd.reducers.memory import MemoryStore
from tests.distributed.models import fingerprint
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.integrations.loops import Classifier, data, fitted, trainer_of

MEMORYLESS: dict[str, Any] = {"preset": "gqsgd_4bit"}
REMEMBERING: dict[str, Any] = {"preset": "dore"}


def _continued(_: int, ranks: int, strategy: dict[str, Any], epochs: int, folder: Path) -> list[Any]:
    """One epoch more, from the checkpoint of the last one, with this number of ranks."""
    warned = logged(level=logging.WARNING)
    trainer = trainer_of(strategy, devices=ranks, max_epochs=epochs, limit_train_batches=4)
    module = Classifier()
    path = folder / f"{epochs - 1}.ckpt"
    trainer.fit(module, data(12), ckpt_path=path if epochs > 1 else None)
    trainer.save_checkpoint(folder / f"{epochs}.ckpt")
    return [fingerprint(module), trainer.global_step, trainer.strategy.gqsgd_state.step, warned]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [MEMORYLESS, REMEMBERING], ids=str)
def test_resuming_with_another_number_of_ranks(strategy: dict[str, Any], tmp_path: Path) -> None:
    """The dither goes on; what was remembered is of the old ranks, so that it starts anew, and a warning says so."""
    for epochs, ranks in enumerate((2, 3, 2, 2), start=1):
        results = run(_continued, ranks, tmp_path, ranks, strategy, epochs, tmp_path, initialise=False)
        assert len({bits for bits, *_ in results}) == 1
        for _, steps, hook_steps, warnings in results:
            assert steps == hook_steps == 4 * epochs
            if strategy == MEMORYLESS or epochs in (1, 4):
                assert warnings == []
            else:
                before = {2: 3, 3: 2}[ranks]
                assert len(warnings) == 1
                assert f"memory starts empty: the checkpoint has that of {before} ranks" in warnings[0]
                assert f"this run has {ranks} ranks" in warnings[0]


@on_ranks(2, initialise=False)
def test_checkpoints_of_weights_alone(rank: int, tmp_path: Path) -> list[Any]:
    best = ModelCheckpoint(tmp_path, filename="weights", save_weights_only=True)
    module = Classifier()
    trainer = fitted(module, REMEMBERING, [best], enable_checkpointing=True)["trainer"]
    assert trainer.callbacks[-1] is best  # behind the callback for telemetry, as Lightning wants it
    (validated,) = trainer.validate(Classifier(seed=5), data(2), ckpt_path=best.best_model_path, verbose=False)
    (expected,) = trainer.validate(module, data(2), verbose=False)
    assert validated == expected
    other = trainer_of(MEMORYLESS)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        other.fit(Classifier(), data(), ckpt_path=best.best_model_path)
    result = sorted(torch.load(best.best_model_path, weights_only=True))
    assert "gqsgd" not in result
    assert "state_dict" in result
    return result


@on_ranks(2, initialise=False)
def test_a_validation_says_nothing_of_the_training_that_wrote_the_checkpoint(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    fitted(Classifier(), "ddp", batches=data(2))["trainer"].save_checkpoint(path)
    said: list[str] = []
    trainer = trainer_of(MEMORYLESS)
    trainer.strategy._rank_zero_info = said.append
    trainer.validate(Classifier(), data(2), ckpt_path=path, verbose=False)
    assert said == []


def _safely(_: int, folder: Path) -> list[list[Any]]:
    results = []
    for strategy in (MEMORYLESS, REMEMBERING):
        path = folder / "safe.ckpt"
        whole = fitted(Classifier(), strategy, max_epochs=2)
        fitted(Classifier(), strategy)["trainer"].save_checkpoint(path)
        module = Classifier()
        trainer = trainer_of(strategy, max_epochs=2)
        safely = {"weights_only": True} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
        trainer.fit(module, data(), ckpt_path=path, **safely)  # Lightning before 2.6 leaves it to torch
        results.append([whole["bits"], fingerprint(module)])
    return results


def test_safe_loading(tmp_path: Path) -> None:
    result = run_alike(_safely, 2, tmp_path, tmp_path, initialise=False)
    assert all(whole == resumed for whole, resumed in result)


def _finetuned(_: int, folder: Path) -> list[Any]:
    rows: list[tuple[str, int]] = []
    row = MemoryStore.row
    MemoryStore.row = lambda self, kind, parameter: rows.append((kind, parameter)) or row(self, kind, parameter)  # type: ignore[assignment,func-returns-value,method-assign]

    def epochs(count: int, **options: Any) -> Any:
        module = Classifier()
        callback = BackboneFinetuning(unfreeze_backbone_at_epoch=2, lambda_func=lambda epoch: 1.0)
        trainer = trainer_of(REMEMBERING, [callback], max_epochs=count, limit_train_batches=3)
        trainer.fit(module, data(), **options)
        return trainer, module

    path = folder / "finetuned.ckpt"
    _, whole = epochs(4)
    trainer, _ = epochs(1)
    rows.clear()
    trainer.save_checkpoint(path)
    saved = sorted({number for _, number in rows})
    _, resumed = epochs(4, ckpt_path=path)
    return [fingerprint(whole), fingerprint(resumed), saved]


@pytest.mark.slow
def test_a_run_that_unfreezes_later_is_resumed_before_that(tmp_path: Path) -> None:
    whole, resumed, saved = run_alike(_finetuned, 2, tmp_path, tmp_path, initialise=False)
    assert whole == resumed
    assert saved == [4]  # the head's: nothing was remembered of what was frozen


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_search_for_a_learning_rate_changes_neither_memory_nor_dither(rank: int) -> None:
    """LearningRateFinder trains with rates that diverge, and takes the training back to a checkpoint."""
    results = []
    for searches in (False, True):
        search = LearningRateFinder(num_training_steps=6, max_lr=10, update_attr=False, early_stop_threshold=None)
        module = Classifier()
        trainer = fitted(module, REMEMBERING, [search] if searches else [])["trainer"]
        results.append([fingerprint(module), trainer.strategy.gqsgd_state.step])
    without, after_search = results
    assert after_search == without
