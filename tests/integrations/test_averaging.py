"""Post-local SGD: gradients are averaged at first, then models now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook

import lightning_gqsgd
from lightning_gqsgd.config import ConfigError
from tests.distributed.models import fingerprint
from tests.distributed.ranks import run
from tests.integrations.loops import Classifier, data, fitted, trainer_of

START, PERIOD = 4, 3

#: Models are averaged after the last batch of the first epoch: what a checkpoint then has is every rank's, but for the
#: optimizer's momentum.
EPOCHS: dict[str, Any] = {"max_epochs": 2, "limit_train_batches": START + 1}


def _local() -> PostLocalSGDState:
    return PostLocalSGDState(None, None, START, post_local_gradient_allreduce=False)


class _OnAnyDevice(DDPStrategy):
    """Lightning's own registers communication hooks on CUDA only."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(self._ddp_comm_state, post_localSGD_hook)


class _Bits(pl.Callback):
    def __init__(self) -> None:
        self.bits: list[str] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.bits.append(fingerprint(pl_module))


def _ours(**options: Any) -> Any:
    return lightning_gqsgd.GQSGDStrategy(ddp_comm_state=_local(), model_averaging_period=PERIOD, **options)


def _averaged(_: int, folder: Path) -> dict[str, list[Any]]:
    torchs = _OnAnyDevice(ddp_comm_state=_local(), model_averaging_period=PERIOD)
    strategies = {
        "torch": torchs,
        "native": _ours(reducer="native"),
        "4 bit": _ours(bits=4),
        "ef": _ours(preset="dore"),
    }
    found: dict[str, list[Any]] = {}
    for name, strategy in strategies.items():
        seen = _Bits()
        one = fitted(Classifier(momentum=0.0), strategy, [seen], **EPOCHS)
        found[name] = [seen.bits, one["hook_steps"]]

    seen = _Bits()
    trainer = trainer_of(_ours(bits=4), [seen], **EPOCHS)
    for _fit in range(2):  # the second starts from the same weights, with a new averager
        trainer.fit(Classifier(momentum=0.0), data())
        trainer.fit_loop.epoch_progress.reset()
    found["two fits"] = [seen.bits]

    seen = _Bits()
    path = folder / "local.ckpt"
    fitted(Classifier(momentum=0.0), _ours(bits=4), [seen], **{**EPOCHS, "max_epochs": 1})["trainer"].save_checkpoint(
        path
    )
    trainer = trainer_of(_ours(bits=4), [seen], **EPOCHS)
    trainer.fit(Classifier(momentum=0.0), data(), ckpt_path=path)
    found["resumed"] = [seen.bits, torch.load(path, weights_only=True)["gqsgd"] if trainer.is_global_zero else None]
    return found


@pytest.mark.slow
def test_post_local_sgd(tmp_path: Path) -> None:
    first, second = run(_averaged, 2, tmp_path, tmp_path, initialise=False)
    assert first["native"][0] == first["torch"][0]
    for name in ("native", "4 bit", "ef"):
        assert first[name][1] == START
        same = [mine == other for mine, other in zip(first[name][0], second[name][0], strict=True)]
        # Averaged by the hook for 4 steps; by the averager after the next and after every third one.
        assert same == [True] * START + [True, False, False, True, False, False], name
    assert first["4 bit"][0][0] != first["native"][0][0]
    assert first["two fits"][0] == 2 * first["4 bit"][0]
    bits, saved = first["resumed"]
    assert (saved["step"], saved["post_local_iter"], saved["averager_step"]) == (START, START, START + 1)
    assert bits == first["4 bit"][0]


class _Thawed(Classifier):
    """Unfrozen while ranks have models of their own, which are noted around that."""

    def __init__(self) -> None:
        super().__init__(momentum=0.0)
        self.bits: list[str] = []

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.bits.append(fingerprint(self))
        if index == START + 2:
            self.head.requires_grad_(True)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.bits.append(fingerprint(self))
        return super().training_step(batch, index)


def _thawed(_: int) -> list[Any]:
    module = _Thawed()
    module.head.requires_grad_(False)
    said = fitted(module, _ours(bits=4))["said"]
    return [module.bits[2 * (START + 2) :][:2], said]


def test_wrapping_anew_keeps_each_ranks_own_model(tmp_path: Path) -> None:
    first, second = run(_thawed, 2, tmp_path, initialise=False)
    for number, ((before, after), said) in enumerate((first, second)):
        assert before == after
        assert len(said) == (3, 1)[number]  # the report and the summary are the first rank's
        assert "wrapped the model anew at step 4: 2 unfrozen parameters" in said[1 - number]
    assert first[0] != second[0]


def test_averaging_that_lightning_would_ignore_is_refused() -> None:
    make = lightning_gqsgd.GQSGDStrategy
    with pytest.raises(
        ConfigError, match="model_averaging_period=4 alone does nothing.*ddp_comm_state=PostLocalSGDState"
    ):
        make(model_averaging_period=4)
    for period in (None, 0, True, 2.5):
        with pytest.raises(ConfigError, match=f"model_averaging_period={period} must be a number of steps"):
            make(ddp_comm_state=_local(), model_averaging_period=period)
    with pytest.raises(ConfigError, match="drop ddp_comm_hook, or use DDPStrategy"):
        make(ddp_comm_state=_local(), model_averaging_period=4, ddp_comm_hook=post_localSGD_hook)
    with pytest.raises(ConfigError, match="drop ddp_comm_state, or use DDPStrategy"):
        make(ddp_comm_state=object())
    with pytest.raises(ConfigError, match="drop ddp_comm_state, or use DDPStrategy"):
        lightning_gqsgd.GQSGDFabricStrategy(ddp_comm_state=_local())
    with pytest.raises(ConfigError, match="has no argument 'model_averaging_period'"):
        lightning_gqsgd.GQSGDFabricStrategy(model_averaging_period=4)
