"""Precision plugins: scaled, half and mixed gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.distributed.models import fingerprint
from tests.distributed.ranks import run
from tests.integrations.loops import NATIVE, STRATEGIES, Classifier, fitted

BAD_STEP, BAD_RANK = 3, 1


class _Bad(Classifier):
    """One rank's loss is not finite at one step; notes the scale, and what the hook remembers, after each step."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.scales: list[float] = []
        self.bits: list[str] = []
        self.memory: list[dict[Any, torch.Tensor]] = []
        self.dtypes: set[torch.dtype] = set()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        bad = index == BAD_STEP and self.trainer.global_rank == BAD_RANK
        return loss * self.value if bad else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.dtypes |= {p.grad.dtype for p in self.parameters()}

    def on_train_batch_end(self, *args: Any) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler else 1.0)
        self.bits.append(fingerprint(self))
        state = self.trainer.strategy.gqsgd_state
        store = state and state._store
        self.memory.append({key: value.clone() for key, value in store._tensors.items()} if store else {})


#: What remembers an error on both ways, a reference, and both.
EVERY: list[Any] = [NATIVE, *STRATEGIES, {"preset": "diana"}, {"preset": "dore"}]


def _scaled(_: int, value: float) -> list[list[Any]]:
    results = []
    for strategy in EVERY:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        module = _Bad(value)
        fitted(module, strategy, plugins=[plugin])
        untouched = [
            all(before[key].equal(now[key]) for key in now)
            for before, now in zip(module.memory, module.memory[1:], strict=False)
        ]
        finite = all(bool(p.isfinite().all()) for p in module.parameters())
        results.append([module.scales, module.bits, untouched, finite])
    return results


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
def test_a_bad_loss_on_one_rank_makes_grad_scaler_skip_the_same_step_everywhere(value: float, tmp_path: Path) -> None:
    first, second = run(_scaled, 2, tmp_path, value, initialise=False)
    for strategy, mine, other in zip(EVERY, first, second, strict=True):
        scales, bits, untouched, finite = mine
        assert mine == other, strategy
        assert scales == [2.0**12, 2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**12, 2.0**13, 2.0**13]
        assert [now == before for before, now in zip(bits, bits[1:], strict=False)].index(True) == BAD_STEP - 1
        assert finite
        assert untouched[BAD_STEP - 1], strategy
        if "preset" in strategy:
            assert untouched.count(True) == 1


def _half(_: int, precision: str) -> list[list[Any]]:
    results = []
    for strategy in ["ddp", NATIVE, *STRATEGIES]:
        torch.manual_seed(0)
        module = _Bad(1.0) if strategy != "ddp" else Classifier()
        run = fitted(module, strategy, precision=precision)
        results.append([run["bits"], run["losses"], [str(one) for one in getattr(module, "dtypes", ())]])
    return results


@pytest.mark.parametrize(
    ("precision", "gradients"),
    [("bf16-mixed", "torch.float32"), ("bf16-true", "torch.bfloat16")],
)
@pytest.mark.slow
def test_bfloat16(precision: str, gradients: str, tmp_path: Path) -> None:
    first, second = run(_half, 2, tmp_path, precision, initialise=False)
    ddp, native, *quantised = first
    assert [bits for bits, *_ in first] == [bits for bits, *_ in second]
    assert native[:2] == ddp[:2]
    assert all(dtypes == [gradients] for *_, dtypes in (native, *quantised))
    for strategy, (bits, losses, _) in zip(STRATEGIES, quantised, strict=True):
        assert bits != ddp[0]
        assert losses[-1] < losses[0]
        if "preset" not in strategy:
            assert losses[-1] == pytest.approx(ddp[1][-1], rel=0.05)
