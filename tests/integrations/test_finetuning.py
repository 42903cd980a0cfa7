"""Parameters that are frozen and unfrozen during a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning

from lightning_gqsgd.config import ConfigError
from tests.distributed.models import fingerprint
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text
from tests.integrations.loops import NATIVE, STRATEGIES, Classifier, data, fitted


class Schedule(BaseFinetuning):
    """The head alone, then all, then the backbone alone; with ``late``, freezes after the model has been wrapped."""

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.late = late

    def freeze_before_training(self, pl_module: Any) -> None:
        if not self.late:
            self.freeze(pl_module.backbone)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(trainer.current_epoch > 0)
        pl_module.head.requires_grad_(trainer.current_epoch < 2)

    def finetune_function(self, *args: Any) -> None:
        raise NotImplementedError


class Whole(Classifier):
    """All parameters belong to the optimizer from the start."""

    def configure_optimizers(self) -> Any:
        trained = {name: p.requires_grad for name, p in self.named_parameters()}
        self.requires_grad_(True)
        optimizer = super().configure_optimizers()
        for name, p in self.named_parameters():
            p.requires_grad_(trained[name])
        return optimizer


EPOCHS: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 3}


def _scheduled(_: int) -> list[list[Any]]:
    results = [[fitted(Whole(), "ddp_find_unused_parameters_true", [Schedule()], **EPOCHS)["bits"]]]
    reference = fitted(Whole(), "ddp_find_unused_parameters_true", [Schedule(late=True)], **EPOCHS)["bits"]
    for strategy in (NATIVE, *STRATEGIES):
        unused = {**strategy, "find_unused_parameters": True}
        runs = [
            fitted(Whole(), unused, [Schedule(late=True)], **EPOCHS),
            fitted(Whole(), strategy, [Schedule()], **EPOCHS),
            fitted(Whole(), strategy, [Schedule(late=True)], **EPOCHS),
            fitted(Whole(), unused, [Schedule()], **EPOCHS),
        ]
        assert [one["hook_steps"] for one in runs] == [9] * 4
        wrapped = [[line for line in one["said"] if "wrapped the model anew" in line] for one in runs]
        results.append([reference, [one["bits"] for one in runs], wrapped])
    return results


@pytest.mark.slow
def test_a_schedule_of_frozen_parameters(tmp_path: Path) -> None:
    """Plain DDP leaves what was frozen when it was built to each rank; ours wraps anew, and is as if all had been known
    from the start."""
    (plain, *first), (drifted, *second) = run(_scheduled, 2, tmp_path, initialise=False)
    assert plain != drifted
    for (reference, bits, wrapped), (_, other, _), strategy in zip(first, second, (NATIVE, *STRATEGIES), strict=True):
        assert bits == other, strategy
        assert set(bits) == ({reference} if strategy == NATIVE else {bits[0]}), strategy
        unused, before, late, both = wrapped
        assert not unused
        assert [line.split(":")[1].strip() for line in before] == [
            "wrapped the model anew at step 3",
            "wrapped the model anew at step 6",
        ]
        assert "4 unfrozen parameters" in before[0]
        assert "2 frozen parameters" in before[1]
        assert len(late) == 3
        assert len(both) == 1  # DDP looks for unused parameters by itself


def _backbone(_: int) -> list[Any]:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)
    module = Classifier()
    before = module.backbone[0].weight.detach().clone()
    run = fitted(module, {"bits": 8}, [callback], **EPOCHS)
    moved = not before.equal(module.backbone[0].weight)
    sent = float(run["trainer"].callback_metrics["gqsgd/bytes_sent"])
    return [run["bits"], run["said"], moved, run["hook_steps"], sent]


def test_backbone_finetuning(tmp_path: Path) -> None:
    first, second = run(_backbone, 2, tmp_path, initialise=False)
    bits, said, moved, steps, sent = first
    assert bits == second[0]
    assert moved
    assert steps == 9
    assert sent > 0
    assert "gqsgd: 2,048 gradient values in 1 tensor at 8 bits" in said[0]
    assert said[1].startswith("gqsgd: wrapped the model anew at step 3: 4 unfrozen parameters; gqsgd: 8,192 gradient")
    assert said[2].startswith("gqsgd: in 9 steps, rank 0 sent ")
    assert len(said) == 3


class _Unfreezes(Classifier):
    def training_step(self, batch: Any, index: int) -> Any:
        if index == 2:
            self.backbone.requires_grad_(True)
        return super().training_step(batch, index)


@on_ranks(2, initialise=False)
def test_unfreezing_inside_a_step_is_an_error(rank: int) -> None:
    module = _Unfreezes()
    module.backbone.requires_grad_(False)
    text = error_text(ConfigError, fitted, module, {"bits": 8}, batches=data(4))
    assert "'backbone.0.weight'" in text
    assert "does this at the start of a batch" in text


class _Freezes(Classifier):
    """Freezes its backbone at a batch: inside of the step, or where the batch starts."""

    def __init__(self, batch: int, inside: bool) -> None:
        super().__init__()
        self.batch, self.inside = batch, inside

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index == self.batch and not self.inside:
            self.backbone.requires_grad_(False)

    def training_step(self, batch: Any, index: int) -> Any:
        if index == self.batch and self.inside:
            self.backbone.requires_grad_(False)
        return super().training_step(batch, index)


@on_ranks(2, initialise=False)
def test_freezing_inside_a_step_is_an_error(rank: int) -> None:
    texts = []
    for strategy in ({"bits": 8}, {"auto": True}):
        texts.append(error_text(ConfigError, fitted, _Freezes(2, inside=True), strategy, batches=data(8)))
    for text in texts:
        assert "parameter 'backbone.0.weight'" in text
        assert "was frozen after the forward pass had begun" in text


@on_ranks(2, initialise=False)
def test_gradients_that_frozen_parameters_have_accumulated_are_averaged(rank: int) -> list[str]:
    ways = ({"bits": 8}, {"bits": 32}, {"preset": "diana"})
    module = [_Freezes(5, inside=False) for _ in ways]
    return [
        fitted(m, w, batches=data(16), accumulate_grad_batches=4)["bits"] for m, w in zip(module, ways, strict=True)
    ]


@on_ranks(2, initialise=False)
def test_a_fit_after_one_that_has_wrapped_anew_takes_the_first_ranks_parameters(rank: int) -> str:
    trainer = fitted(_Freezes(1, inside=False), {"bits": 8}, batches=data(2))["trainer"]
    trainer.fit_loop.epoch_progress.reset()
    module = Classifier(seed=rank)
    trainer.fit(module, data(2))
    return fingerprint(module)
