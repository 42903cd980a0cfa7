"""What Lightning's training loops and callbacks do, under the strategy."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import Callback, EarlyStopping, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_gqsgd
from tests.distributed.models import fingerprint
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.integrations.loops import NATIVE, STRATEGIES, Classifier, Gan, data, fitted, trainer_of

#: Plain DDP first, then ours without compression, which has to give its bits.
EVERY: list[Any] = ["ddp", NATIVE, {"reducer": "two_shot", "bits": 4}, {"preset": "signsgd_ef"}]


def _made(strategy: Any, **ddp: Any) -> Any:
    """The strategy with DDP's arguments."""
    if isinstance(strategy, dict):
        return {**strategy, **ddp}
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(**ddp)


def _compared(module: Any, ddp: dict[str, Any] | None = None, **options: Any) -> list[list[Any]]:
    """Bits, hook steps and optimizer steps under every strategy."""
    runs = [fitted(module(), _made(strategy, **(ddp or {})), **options) for strategy in EVERY]
    return [[one["bits"], one["hook_steps"], one["steps"]] for one in runs]


def _check(first: list[list[Any]], second: list[list[Any]], hook_steps: int, steps: int) -> None:
    assert first == second
    ddp, native, *quantised = first
    assert native[0] == ddp[0]
    assert len({bits for bits, *_ in first}) == 1 + len(quantised)
    assert all(one[1:] == [hook_steps, steps] for one in first[1:])


# --- automatic optimization ------------------------------------------------------------------------------------------

AUTOMATIC: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate_grad_batches": 4},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "both": {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
}


def _automatic(_: int) -> dict[str, list[list[Any]]]:
    warned = logged(level=logging.WARNING)
    results = {name: _compared(Classifier, **options) for name, options in AUTOMATIC.items()}
    assert not warned
    return results


@pytest.mark.slow
def test_accumulation_and_clipping(tmp_path: Path) -> None:
    """What is clipped is the averaged gradient, so that ranks clip alike."""
    first, second = run(_automatic, 2, tmp_path, initialise=False)
    for name, options in AUTOMATIC.items():
        steps = 8 // options.get("accumulate_grad_batches", 1)
        _check(first[name], second[name], steps, steps)
    assert len({one[0][0] for one in first.values()}) == len(AUTOMATIC)


class _Tied(Classifier):
    """Two layers share a matrix, and one is used in every other step only."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.sometimes = sometimes
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.backbone[2].weight
        self.rare = nn.Linear(64, 64) if sometimes else None
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.tied(self.backbone(x)))
        if self.rare is not None:
            self.step += 1
            hidden = self.rare(hidden) if self.step % 3 else hidden
        return self.head(hidden)


DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "small": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True, "find_unused_parameters": True},
}


def _options(_: int) -> dict[str, list[list[Any]]]:
    results = {name: _compared(_Tied, ddp) for name, ddp in DDP_OPTIONS.items()}
    unused = {"find_unused_parameters": True}
    return {**results, "sometimes": _compared(lambda: _Tied(sometimes=True), unused)}


@pytest.mark.slow
def test_ddp_options_tied_weights_and_unused_parameters(tmp_path: Path) -> None:
    first, second = run(_options, 2, tmp_path, initialise=False)
    for name in first:
        _check(first[name], second[name], 8, 8)
    plain = first["plain"]
    for name in DDP_OPTIONS:
        assert [one[0] for one in first[name]] == [one[0] for one in plain], name


# --- manual optimization ---------------------------------------------------------------------------------------------


#: Arguments of `Gan`, and the steps of each optimizer: toggled or not, and with accumulation by `block_backward_sync`.
GANS: dict[str, tuple[dict[str, Any], int]] = {
    "toggled": ({}, 16),
    "not toggled": ({"toggle": False}, 16),
    "accumulated and clipped": ({"accumulate": 4, "clip": 0.1}, 4),
}


def _gans(_: int, arguments: dict[str, Any]) -> list[list[Any]]:
    unused = {"find_unused_parameters": True} if arguments.get("toggle", True) else None
    return _compared(lambda: Gan(**arguments), unused)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("toggled", marks=pytest.mark.slow),
        pytest.param("not toggled", marks=pytest.mark.slow),
        "accumulated and clipped",
    ],
)
def test_two_optimizers_by_hand(name: str, tmp_path: Path) -> None:
    arguments, steps = GANS[name]
    first, second = run(_gans, 2, tmp_path, arguments, initialise=False)
    _check(first, second, steps, steps)


def _curves(_: int, seeds: list[int]) -> list[list[list[float]]]:
    unused = {"find_unused_parameters": True}
    results = []
    for strategy in ("ddp", {"bits": 8}):
        runs = [
            fitted(Gan(4, 0.5, seed=seed), _made(strategy, **unused), batches=data(32, seed))["losses"]
            for seed in seeds
        ]
        results.append(runs)
    return results


@pytest.mark.slow
def test_the_loss_curve_of_eight_bits_is_that_of_ddp_within_the_spread_of_seeds(tmp_path: Path) -> None:
    first, second = run(_curves, 2, tmp_path, [1, 2, 3, 4], initialise=False)
    # Mean over ranks, and over four batches as they are accumulated: [strategy, seed, step].
    curves = (torch.tensor(first) + torch.tensor(second)).div(2).unflatten(-1, (-1, 4)).mean(-1)
    plain, quantised = curves
    spread = plain.std(0)
    assert plain[:, -1].mean() != plain[:, 0].mean()
    assert bool((quantised.mean(0) - plain.mean(0)).abs().lt(spread).all())
    assert not quantised.equal(plain)


class _ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def _static_twice(_: int) -> list[list[Any]]:
    results = []
    for strategy in EVERY:
        strategy = lightning_gqsgd.GQSGDStrategy(**strategy) if isinstance(strategy, dict) else _made(strategy)
        strategy._ddp_kwargs["static_graph"] = True
        trainer = trainer_of(strategy, limit_train_batches=3)
        bits = []
        for _fit in range(2):
            module = _ByHand()
            trainer.fit(module, data())
            trainer.fit_loop.epoch_progress.reset()
            bits.append(fingerprint(module))
        results.append(bits)
    return results


@pytest.mark.slow
def test_static_graph_by_hand_in_a_second_fit(tmp_path: Path) -> None:
    """Lightning's own strategy remembers the first fit, and lets ranks drift apart in the second one's first step."""
    first, second = run(_static_twice, 2, tmp_path, initialise=False)
    ddp, native, *quantised = first
    if ddp[0] != second[0][0]:
        pytest.skip("plain DDP of these versions lets ranks drift apart in the first fit already")
    assert ddp[0] == native[0] == native[1]
    assert ddp[1] != second[0][1]
    assert first[1:] == second[1:]
    assert all(bits[0] == bits[1] for bits in quantised)


# --- callbacks -------------------------------------------------------------------------------------------------------


EMA: Any = getattr(callbacks, "EMAWeightAveraging", None)  # since Lightning 2.6


class _Average(EMA or Callback):  # type: ignore[misc]
    """Notes the average before it takes the place of the weights."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.bits = fingerprint(self._average_model.module)
        super().on_train_end(trainer, pl_module)


def _callbacks(_: int) -> dict[str, list[list[Any]]]:
    results: dict[str, list[list[Any]]] = {"swa": [], "stop": [], **({"ema": []} if EMA else {})}
    for strategy in EVERY:
        if EMA:
            average = _Average(decay=0.9)
            one = fitted(Classifier(), strategy, [average])
            results["ema"].append([one["bits"], average.bits, one["hook_steps"]])

        swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
        one = fitted(Classifier(), strategy, [swa], max_epochs=3, limit_train_batches=3)
        results["swa"].append([one["bits"], one["hook_steps"]])

        stop = EarlyStopping("val_loss", min_delta=10.0, patience=1)
        trainer = trainer_of(strategy, [stop], max_epochs=9, limit_train_batches=2)
        module = Classifier()
        trainer.fit(module, data(), data(2, seed=5))
        results["stop"].append(
            [fingerprint(module), trainer.current_epoch, float(trainer.callback_metrics["val_loss"])]
        )
    return results


@pytest.mark.slow
def test_averages_of_weights_and_early_stopping(tmp_path: Path) -> None:
    result = run_alike(_callbacks, 2, tmp_path, initialise=False)
    for name, (ddp, native, *quantised) in result.items():
        assert native[0] == ddp[0], name
        assert len({one[0] for one in (ddp, *quantised)}) == 1 + len(quantised), name
    assert all(bits == average for bits, average, _ in result.get("ema", []))
    assert [one[-1] for one in result["swa"][1:]] == [9] * 3
    assert [one[1] for one in result["stop"]] == [2] * 4


def _other_functions(_: int) -> list[Any]:
    trainer = trainer_of({"bits": 4})
    module, batches = Classifier(), data(3, seed=7)
    (before,) = trainer.validate(module, batches, verbose=False)
    assert trainer.strategy.gqsgd_state is None
    states = []
    for _fit in range(2):
        trainer.fit(module, data(4))
        trainer.fit_loop.epoch_progress.reset()
        states.append(trainer.strategy.gqsgd_state)
    (after,) = trainer.test(module, batches, verbose=False)
    predicted = trainer.predict(module, batches)
    assert trainer.strategy.gqsgd_state is states[1]
    steps = [(one.step, one.telemetry.steps) for one in states]
    return [before["val_loss"], after["val_loss"], len(predicted), states[0] is states[1], steps, fingerprint(module)]


def test_validate_test_and_predict_beside_two_fits(tmp_path: Path) -> None:
    """Each fit has a hook of its own, whose dither starts anew; the others have none."""
    before, after, predicted, same, steps, _ = run_alike(_other_functions, 2, tmp_path, initialise=False)
    assert after < before
    assert predicted == 3
    assert not same
    assert steps == [(4, 4), (4, 4)]


# --- compilation, devices, data --------------------------------------------------------------------------------------


class _CompiledInside(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.compile(self.backbone, backend="eager")  # type: ignore[assignment]


def _compiled(_: int) -> list[list[list[Any]]]:
    results = []
    for make in (lambda: torch.compile(Classifier(), backend="aot_eager"), _CompiledInside):
        runs = []
        for strategy in EVERY:
            torch._dynamo.reset()
            one = fitted(make(), strategy, batches=data(4))
            runs.append([one["bits"], one["hook_steps"], one["steps"]])
        results.append(runs)
    return results


@pytest.mark.slow
def test_compiled_modules(tmp_path: Path) -> None:
    first, second = run(_compiled, 2, tmp_path, initialise=False)
    for one, other in zip(first, second, strict=True):
        _check(one, other, 4, 4)


def _alone(_: int) -> list[Any]:
    runs = [fitted(Classifier(), strategy, devices=1, accumulate_grad_batches=2) for strategy in ("ddp", *STRATEGIES)]
    return [[one["bits"], one["said"], one["hook_steps"]] for one in runs]


def test_one_device_is_plain_training(tmp_path: Path) -> None:
    (((ddp, *_), *ours),) = run(_alone, 1, tmp_path, initialise=False)
    for bits, said, steps in ours:
        assert bits == ddp
        assert said == ["gqsgd: one process, nothing to reduce"]
        assert steps == 8


class _Normalised(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm1d(64))


def _synchronised(_: int) -> str:
    module = _Normalised()
    fitted(module, {"bits": 8}, sync_batchnorm=True, accelerator="cuda", devices=torch.cuda.device_count())
    return fingerprint(module)


@on_ranks(2, initialise=False)
def test_sync_batchnorm_on_the_cpu_is_torchs_error(rank: int) -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules") as error:
        fitted(_Normalised(), {"bits": 8}, sync_batchnorm=True)
    assert str(error.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sync_batchnorm_on_gpus(tmp_path: Path) -> None:
    assert len(set(run(_synchronised, torch.cuda.device_count(), tmp_path, initialise=False))) == 1


def _batches(count: int) -> DataLoader:
    x = torch.randn(16 * count, 32, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=16)


def _uneven(rank: int) -> list[Any]:
    # 33 examples: the sampler repeats one, so that both ranks have 17.
    x = torch.randn(33, 32, generator=torch.Generator().manual_seed(3))
    padded = fitted(
        Classifier(), {"bits": 8}, batches=DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)
    )
    strategy = {"bits": 8, "timeout": timedelta(seconds=4)}
    error = ""
    try:
        fitted(Classifier(), strategy, batches=_batches(5 - 2 * rank), use_distributed_sampler=False)
    except RuntimeError as raised:
        error = str(raised)
    return [padded["bits"], padded["hook_steps"], error]


def test_uneven_inputs(tmp_path: Path) -> None:
    """Lightning's sampler makes them even; a loader of one's own that does not is an error within the timeout."""
    first, second = run(_uneven, 2, tmp_path, initialise=False)
    assert first[:2] == second[:2]
    assert first[1] == 3
    assert "bucket 0 of step 3" in first[2]
    assert "failed on rank 0 of 2" in first[2]
