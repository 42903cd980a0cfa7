"""Local steps in Lightning: by name and by arguments, resumed, with accumulation, clipping and two optimizers."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_gqsgd import GQSGDFabricStrategy, GQSGDStrategy, GQSGDTelemetry, LocalSteps
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks import local
from lightning_gqsgd.local_steps.options import LocalOptions
from tests.distributed.models import fingerprint, loss_of, mlp
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.errors import error_text
from tests.integrations.loops import QUIET, Classifier, Gan, data
from tests.unit.test_weights_in_state import ScheduleFreeLike

#: Without a memory and with one; with everything at once and under way.
WAYS: list[dict[str, Any]] = [
    {"local_steps": 4},
    {"local_steps": 4, "fragments": 2, "delay": 2, "preset": "dore"},
]


def trainer_of(strategy: Any, callbacks: Any = (), **options: Any) -> pl.Trainer:
    """A quiet Trainer on two CPU processes; a strategy is a name, or arguments of ours."""
    strategy = GQSGDStrategy(**strategy) if isinstance(strategy, dict) else strategy
    quiet = {**QUIET, "enable_checkpointing": bool(callbacks)}
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**quiet, **options})


@on_ranks(2, initialise=False)
def test_a_name_is_enough(rank: int) -> list[Any]:
    results = []
    for strategy in ("gqsgd_diloco", "gqsgd_fedpaq"):
        module = Classifier(seed=rank)  # other parameters on each rank, until all take the first rank's
        trainer = trainer_of(strategy)
        trainer.fit(module, data(12), data(2, seed=5))
        state = trainer.strategy.gqsgd_state
        sent = (
            float(trainer.callback_metrics["gqsgd/bytes_sent"]) if "gqsgd/bytes_sent" in trainer.callback_metrics else 0
        )
        results.append([fingerprint(module), state.step, state.averages, state.report(), sent])
    diloco, fedpaq = results
    assert diloco[1:3] == [12, 1]  # 32 steps are not over, so the only average is the last one
    assert fedpaq[1:3] == [12, 2]
    assert "every 32 steps; outer SGD(lr=0.7, momentum=0.9, nesterov=True)" in diloco[3]
    assert "every 10 steps; outer SGD(lr=1.0)" in fedpaq[3]
    assert fedpaq[4] > 0
    return results


@on_ranks(2, initialise=False)
def test_a_second_fit_averages_its_own_module_with_the_same_telemetry(rank: int) -> list[Any]:
    trainer = trainer_of({"local_steps": 3})
    results: list[Any] = []
    for fit in range(2):
        module = Classifier(seed=2 * fit + rank)
        trainer.fit(module, data(4))
        trainer.fit_loop.epoch_progress.reset()
        results += [fingerprint(module), trainer.strategy.gqsgd_state.step]
        assert trainer.strategy.gqsgd_state.is_closed
    result = [*results, sum(isinstance(callback, GQSGDTelemetry) for callback in trainer.callbacks)]
    assert result[1::2] == [4, 4]
    assert result[4] == 1
    return result


def _beside_a_loop(rank: int, way: dict[str, Any]) -> list[str]:
    """The Trainer, and the same steps by hand."""
    module = Classifier()
    batches = DataLoader(Subset(data(12).dataset, range(rank, 24 * 16, 2)), batch_size=16)
    trainer = trainer_of(way, accumulate_grad_batches=2, gradient_clip_val=0.5, use_distributed_sampler=False)
    trainer.fit(module, batches)
    lightning = fingerprint(module)
    module = Classifier()
    options = {name: value for name, value in way.items() if name != "local_steps"}
    optimizer = LocalSteps(module, module.configure_optimizers(), every=way["local_steps"], **options)
    for number, (x, y) in enumerate(batches):
        (nn.functional.cross_entropy(module(x), y) / 2).backward()
        if number % 2 == 0:
            continue
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    optimizer.close()
    return [lightning, fingerprint(module)]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_trainer_makes_the_steps_of_a_loop(way: dict[str, Any], tmp_path: Path) -> None:
    """With accumulated and clipped gradients."""
    (lightning, loop), other = run(_beside_a_loop, 2, tmp_path, way, initialise=False)
    assert lightning == loop
    assert other == [lightning, loop]


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_checkpoint_within_a_round_gives_the_bits_of_an_undisturbed_run(rank: int, tmp_path: Path) -> None:
    results = []
    for number, way in enumerate(WAYS):
        saving = ModelCheckpoint(tmp_path / str(number), filename="{step}", save_top_k=-1, every_n_epochs=1)
        module = Classifier()
        trainer_of(way, [saving], max_epochs=4).fit(module, data(3))
        whole = fingerprint(module)
        for step in (3, 6, 9):
            module = Classifier(seed=3)
            path = tmp_path / str(number) / f"step={step}.ckpt"
            safely = {"weights_only": True} if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else {}
            trainer_of(way, max_epochs=4).fit(module, data(3), ckpt_path=path, **safely)
            results.append(fingerprint(module) == whole)
    assert results == [True] * 6


def _with_more_ranks(rank: int, ranks: int, folder: Path) -> list[Any]:
    path = folder / "elastic.ckpt"
    module = Classifier(seed=rank)
    trainer = trainer_of(WAYS[1], devices=ranks, max_epochs=1 if ranks == 2 else 2)
    trainer.fit(module, data(6), ckpt_path=path if ranks == 3 else None)
    trainer.save_checkpoint(path)  # also after training, when everything is closed
    return [fingerprint(module), trainer.strategy.gqsgd_state.step]


@pytest.mark.slow
def test_resuming_with_another_number_of_ranks_starts_from_the_anchor(tmp_path: Path) -> None:
    before = run(_with_more_ranks, 2, tmp_path, 2, tmp_path, initialise=False)
    after = run(_with_more_ranks, 3, tmp_path, 3, tmp_path, initialise=False)
    assert len({bits for bits, _ in before}) == len({bits for bits, _ in after}) == 1
    assert before[0][1] == 6
    assert after[0][1] == 6 + 4


def _gan(rank: int, kind: type[Gan], way: dict[str, Any], batches: int) -> list[Any]:
    module = kind(seed=rank)
    trainer = trainer_of({"local_steps": 2, **way})
    trainer.fit(module, data(batches))
    state = trainer.strategy.gqsgd_state
    return [fingerprint(module), state.step, state.averages]


@pytest.mark.slow
def test_two_optimizers_by_hand_are_averaged_together(tmp_path: Path) -> None:
    result = run_alike(_gan, 2, tmp_path, Gan, {"fragments": 2, "min_numel": 0}, 7, initialise=False)
    assert result[1:] == [7, 6 + 2]  # in three rounds each fragment once, and both at the end


class _CriticFirst(Gan):
    """Steps the second of its optimizers in every batch, and the first one after it, in every sixth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        for optimizer, sign in ((critic, 1), (generator, -1)) if batch_idx % 6 == 5 else ((critic, 1),):
            optimizer.zero_grad()
            self.manual_backward(sign * self.discriminator(self.generator(batch[0][:, :16])).mean())
            optimizer.step()


@on_ranks(2, initialise=False)
def test_the_first_optimizer_may_make_its_first_step_after_many_of_the_others(rank: int) -> list[Any]:
    local._STEPS_WITHOUT_FIRST = 6
    result = _gan(rank, _CriticFirst, {}, 13)
    assert result[1:] == [2, 1 + 1]  # a round of the first optimizer's steps, and the end
    return result


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_run_changes_between_averages_in_every_step_and_local_steps(rank: int, tmp_path: Path) -> list[Any]:
    """From a checkpoint of gradients that are averaged in every step, and back."""
    path = tmp_path / "hook.ckpt"
    trainer = trainer_of({"bits": 4})
    trainer.fit(Classifier(), data(4))
    trainer.save_checkpoint(path)
    module = Classifier(seed=4)
    trainer = trainer_of(WAYS[0], max_epochs=2)
    trainer.fit(module, data(4), ckpt_path=path)
    trainer.save_checkpoint(path)
    back = Classifier(seed=5)
    trainer_of({"bits": 4}, max_epochs=3).fit(back, data(4), ckpt_path=path)
    result = [fingerprint(module), trainer.global_step, fingerprint(back)]
    assert result[1] == 8
    return result


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"fragments": 4}, "fragments=4 is for local steps; give local_steps=32 as well"),
        ({"local_steps": 8, "find_unused_parameters": True}, "without DistributedDataParallel, for which find_unused"),
        ({"local_steps": 0}, "local_steps=0 is out of range"),
        ({"local_steps": "often"}, "local_steps='often' is not a time: .* e.g. local_steps=32"),
        ({"preset": "gqsgd_diloco", "delay": 32}, "delay=32 must be less than every=32"),
        ({"preset": "gqsgd_diloco", "bits": 9}, "bits=9"),
        ({"local_steps": 8, "validate_at": "mean"}, "validate_at='mean' is not one of 'local', 'anchor'"),
        ({"validate_at": "anchor"}, "validate_at='anchor' is for local steps"),
        ({"local_steps": 8, "rule": "median"}, "rule='median' is not one of"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        GQSGDStrategy(**arguments)


def test_arguments_replace_those_of_a_name() -> None:
    strategy = GQSGDStrategy(preset="gqsgd_fedpaq", local_steps=np.int64(5), bits=3)
    assert strategy._local.options.every == 5
    assert strategy._local.options.outer == "sgd"
    assert strategy.gqsgd_config.bits == 3


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_sixteen_bit_precision(rank: int) -> list[Any]:
    module = Classifier(seed=rank)
    trainer_of(WAYS[1], precision="bf16-mixed").fit(module, data(5))
    whole = fingerprint(module)
    module = Classifier(seed=rank)
    trainer_of(WAYS[1], precision="bf16-true").fit(module, data(5))
    result = [whole, fingerprint(module), str(next(module.parameters()).dtype)]
    assert result[2] == str(torch.bfloat16)
    return result


@on_ranks(2, initialise=False)
def test_fabric_makes_the_steps_of_a_loop_and_resumes(rank: int, tmp_path: Path) -> list[Any]:
    """A run, the same run resumed within a round, and the same steps by hand."""
    results = []
    for resumes in (False, True):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=GQSGDFabricStrategy(local_steps=4, fragments=2, delay=1))
        fabric.launch()
        module = mlp()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if resumes:
            fabric.load(tmp_path / "fabric.ckpt", state)
        for step in range(state["step"], 11):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):  # there is nothing to block
                fabric.backward(loss_of(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
            if step == 5 and not resumes:
                fabric.save(tmp_path / "fabric.ckpt", {**state, "step": step + 1})
        fabric.strategy.finish()
        results.append(fingerprint(module))
        fabric.strategy.gqsgd_states[0].close()
    module = mlp()
    local = LocalSteps(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), 4, fragments=2, delay=1)
    for step in range(11):
        loss_of(module, rank, step).backward()
        local.step()
        local.zero_grad()
    local.finish()
    local.close()
    result = [*results, fingerprint(module)]
    assert len(set(result)) == 1
    return result


def _fabric_changes(rank: int, folder: Path) -> list[Any]:
    """From averages in every step to local steps, and back: the bits, the step, and what is said."""
    path = folder / "fabric.ckpt"
    results: list[Any] = []
    for options in ({"bits": 4}, {"local_steps": 4}, {"bits": 4}):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=GQSGDFabricStrategy(**options))
        fabric.launch()
        module = mlp()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer}
        said: list[str] = []
        fabric.strategy._rank_zero_info = said.append
        if results:
            fabric.load(path, state)
        before = fingerprint(module)
        for step in range(4):
            fabric.backward(loss_of(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(path, state)
        results.append([said, before, fingerprint(module), fabric.strategy.gqsgd_states[0].step])
        fabric.strategy.gqsgd_states[0].close()
    return results


def test_fabric_changes_between_averages_in_every_step_and_local_steps(tmp_path: Path) -> None:
    first, second = run(_fabric_changes, 2, tmp_path, tmp_path, initialise=False)
    assert [results[1:] for results in first] == [results[1:] for results in second]
    said, begins, ends, steps = zip(*first, strict=True)
    assert begins[1:] == ends[:-1]
    assert steps == (4, 4, 4)
    assert "without local steps; its weights are the anchor" in "".join(said[1])
    assert "with local steps; from its weights on, gradients are averaged in every step" in "".join(said[2])


@on_ranks(2, initialise=False)
def test_a_model_of_fabric_that_was_closed_is_forgotten(rank: int) -> list[Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=GQSGDFabricStrategy(local_steps=3))
    fabric.launch()
    results = []
    for fold in range(3):
        module = mlp()
        model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for step in range(4):
            fabric.backward(loss_of(model, rank, 10 * fold + step))
            optimizer.step()
            optimizer.zero_grad()
        if fold != 1:  # a trial that is given up: ranks keep models of their own
            fabric.strategy.finish()
            results.append(fingerprint(module))
        results.append(len(fabric.strategy.gqsgd_states))
        fabric.strategy.gqsgd_states[-1].close()
    assert [results[1], results[2], results[4]] == [1, 1, 1]
    return results


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_accelerate_makes_the_steps_of_a_loop(rank: int) -> list[Any]:
    """Accelerate without DistributedDataParallel, with accumulation; the same steps by hand."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = mlp()
    model = accelerator.prepare_model(module, evaluation_mode=True)
    optimizer = accelerator.prepare(LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=3))
    for step in range(16):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rank, step))
            optimizer.step()
            optimizer.zero_grad()
    optimizer.optimizer.finish()
    results = [fingerprint(module), optimizer.optimizer.averages.step]
    optimizer.optimizer.close()
    module = mlp()
    local = LocalSteps(module, torch.optim.SGD(module.parameters(), lr=0.1), every=3)
    for step in range(16):
        (loss_of(module, rank, step) / 2).backward()
        if step % 2:
            local.step()
            local.zero_grad()
    local.finish()
    local.close()
    result = [*results, fingerprint(module)]
    assert result[0] == result[2]
    assert result[1] == 8
    return result


class _Seen(pl.Callback):
    """Hashes of the parameters that validations saw, and of those before and after each of them."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.within: list[str] = []
        self.after: list[str] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.before.append(fingerprint(pl_module))

    def on_validation_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.within.append(fingerprint(pl_module))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.after.append(fingerprint(pl_module))


def _validated(rank: int, folder: Path) -> list[Any]:
    results = []
    for where in ("local", "anchor"):
        seen = _Seen()
        # They save in the same hook. Lightning tells them apart by what they monitor.
        saving = [ModelCheckpoint(folder / where / "all", save_top_k=-1, filename="{step}")]
        weights = {"monitor": "step", "mode": "max", "save_weights_only": True}
        saving.append(ModelCheckpoint(folder / where / "weights", save_top_k=-1, filename="{step}", **weights))
        options = {"val_check_interval": 3, "limit_val_batches": 1}
        module = Classifier()
        trainer = trainer_of({"local_steps": 4, "validate_at": where}, [seen, *saving], **options)
        trainer.fit(module, data(6), data(2))
        saved = [_of_file(folder / where / name / "step=3.ckpt") for name in ("all", "weights")]
        trainer.validate(module, data(2), verbose=False)
        # The third step is within a round, so the anchor is not what ranks hold.
        results.append([seen.within[0], seen.before[2], seen.after[3], fingerprint(module), *saved, seen.within[-1]])
    return results


def _of_file(file: Path) -> str:
    """Hash of the parameters in a checkpoint."""
    module = Classifier()
    module.load_state_dict(torch.load(file, weights_only=True)["state_dict"])
    return fingerprint(module)


def test_validation_sees_the_model_that_was_asked_for_and_training_goes_on_with_its_own(tmp_path: Path) -> None:
    """Also where a checkpoint is saved right after the validation."""
    (local, anchor), (other_local, other_anchor) = run(_validated, 2, tmp_path, tmp_path, initialise=False)
    assert local[0] == local[1] == local[2] != other_local[0]
    assert anchor[0] == other_anchor[0] != anchor[1]
    for rank in (anchor, other_anchor):
        assert rank[1] == rank[2]
        assert rank[4] == rank[5] == rank[0]
    assert local[4] == local[5] == local[0]
    assert local[3] == anchor[3]
    for one in (local, anchor, other_local, other_anchor):
        assert one[6] == one[3]  # a validation after the fit
    assert "gqsgd" not in torch.load(tmp_path / "anchor" / "weights" / "step=3.ckpt", weights_only=True)


@on_ranks(2, initialise=False)
def test_a_checkpoint_of_a_validation_has_each_ranks_own_model_to_resume_from(rank: int, tmp_path: Path) -> list[str]:
    """A run, and the same run from a checkpoint that was saved while a validation saw the anchor, within a round."""
    saving = ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=False)
    results = []
    for callbacks, begins in (([saving], {}), ([], {"ckpt_path": tmp_path / "epoch=0.ckpt"})):
        module = Classifier()
        trainer = trainer_of({"local_steps": 4, "validate_at": "anchor"}, callbacks, max_epochs=2, limit_val_batches=1)
        trainer.fit(module, data(3), data(2), **begins)
        results.append(fingerprint(module))
    whole, resumed = results
    assert resumed == whole
    return results


@on_ranks(2, initialise=False)
def test_validation_sees_the_preserved_model_where_there_is_one(rank: int) -> list[str]:
    seen = _Seen()
    module = Classifier()
    options = {"limit_val_batches": 1, "enable_checkpointing": False}
    trainer_of({"preset": "gqsgd_mcm", "validate_at": "anchor"}, [seen], **options).fit(module, data(4), data(2))
    trained, validated, finished = [seen.before[-1], seen.within[-1], fingerprint(module)]
    assert trained != validated == finished
    return trained, validated, finished


class _FailsInValidation(Classifier):
    """Raises in its first validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        raise ValueError("a validation that fails")


def _failed_in_validation(rank: int, folder: Path) -> list[str]:
    seen = _Seen()
    module = _FailsInValidation()
    trainer = trainer_of({"local_steps": 4, "validate_at": "anchor"}, [seen], val_check_interval=3)
    with pytest.raises(ValueError, match="a validation that fails"):
        trainer.fit(module, data(6), data(2))
    after = fingerprint(module)
    trainer.save_checkpoint(folder / "later.ckpt")  # has been closed
    fresh = trainer_of({"local_steps": 4})
    fresh.validate(Classifier(), data(2), verbose=False)
    fresh.save_checkpoint(folder / "without_a_fit.ckpt")
    return [seen.before[2], after, fingerprint(module)]


def test_a_validation_that_fails_leaves_each_ranks_own_model(tmp_path: Path) -> None:
    for before, after, later in run(_failed_in_validation, 2, tmp_path, tmp_path, initialise=False):
        assert before == after == later


class _PutsOwnWeightsIn(pl.Callback):
    """What callbacks that average weights do at the end: each rank has other ones."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(0.1 * trainer.global_rank)


@on_ranks(2, initialise=False)
def test_weights_that_a_callback_puts_in_at_the_end_are_averaged(rank: int) -> list[str]:
    results = []
    for batches in (8, 10):  # after the last average of a round, and in the middle of one
        module = Classifier()
        trainer_of({"local_steps": 4}, [_PutsOwnWeightsIn()], enable_checkpointing=False).fit(module, data(batches))
        results.append(fingerprint(module))
    return results


class _SetsWeights(pl.Callback):
    """Sets all weights to one number at the end of training, another number on each rank."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.fill_(1.0 + trainer.global_rank)


class _WithBatchNorm(Classifier):
    """Notes its weights before the first batch of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.insert(1, nn.BatchNorm1d(64))
        self.weights = torch.empty(0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.weights = nn.utils.parameters_to_vector(self.parameters()).detach().clone()


def _set_with_a_delay(_: int) -> list[Any]:
    results: list[Any] = []
    for delay in (0, 1, 3):
        module = Classifier()
        way = {"local_steps": 4, "delay": delay, "bits": 8}
        trainer_of(way, [_SetsWeights()], enable_checkpointing=False).fit(module, data(8))  # ends with an average
        weights = nn.utils.parameters_to_vector(module.parameters())
        results.append([float(weights.min()), float(weights.max())])
    return results


def test_weights_that_a_callback_puts_in_are_not_mixed_with_averages_under_way(tmp_path: Path) -> None:
    for least, most in run_alike(_set_with_a_delay, 2, tmp_path, initialise=False):
        assert 1.45 < least <= most < 1.55


def _averaged_with_batch_norm(rank: int) -> list[Any]:
    """The weights of each rank while BatchNorm's statistics are computed, those at the end, and the steps counted."""
    results: list[Any] = []
    # An average would be due after a tenth step, the one without a gradient; or one is under way.
    for every, batches, delay in ((5, 3, 0), (4, 4, 1)):
        module = _WithBatchNorm()
        swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)
        way = {"local_steps": every, "delay": delay, "bits": 8, "outer_after": 0}
        trainer = trainer_of(way, [swa], enable_checkpointing=False, max_epochs=3)
        trainer.fit(module, data(batches))
        weights = nn.utils.parameters_to_vector(module.parameters()).detach()
        results.append([module.weights.tolist(), weights.tolist(), trainer.strategy.gqsgd_state.step])
    return results


@pytest.mark.slow
def test_the_mean_of_weights_over_epochs_is_averaged_over_ranks_beside_batch_norm(tmp_path: Path) -> None:
    first, second = run(_averaged_with_batch_norm, 2, tmp_path, initialise=False)
    for one, other, steps in zip(first, second, (9, 12), strict=True):
        assert one[1:] == other[1:]
        assert one[2] == steps
        own, others, end = map(torch.tensor, (one[0], other[0], one[1]))
        mean = (own + others) / 2
        # Lightning's own step in that epoch, with the gradient of the epoch before, changes 2 % of them.
        assert float((end - mean).norm()) < 0.04 * float(mean.norm())


def _resumed_after_the_end(_: int, folder: Path) -> list[list[str]]:
    results = []
    for number, way in enumerate(WAYS):
        bits = []
        saving = {"save_last": True, "filename": "{epoch}"}
        for begins in ({}, {"ckpt_path": folder / str(number) / "last.ckpt"}):
            module = Classifier()
            trainer_of(way, [ModelCheckpoint(folder / str(number), **saving)]).fit(module, data(6), **begins)
            bits.append(fingerprint(module))
        results.append(bits)
    return results


def test_a_fit_that_has_no_step_left_ends_with_the_average_as_well(tmp_path: Path) -> None:
    """The checkpoint was saved before the last average, as callbacks save at the end of an epoch."""
    for whole, resumed in run_alike(_resumed_after_the_end, 2, tmp_path, tmp_path, initialise=False):
        assert resumed == whole


def _pruned(_: int) -> str:
    trainer = trainer_of({"local_steps": 4}, [ModelPruning("l1_unstructured", amount=0.3)], enable_checkpointing=False)
    return error_text(ConfigError, trainer.fit, Classifier(), data(2))


def test_pruning_between_averages_is_refused(tmp_path: Path) -> None:
    assert "local steps do not work with the callback ModelPruning" in run_alike(_pruned, 2, tmp_path, initialise=False)


class _OnlyTheSecond(Gan):
    """Steps only the second of its optimizers."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[1]
        optimizer.zero_grad()
        loss = sum(p.square().sum() for group in optimizer.param_groups for p in group["params"])
        self.manual_backward((1 + self.global_rank) * loss)
        optimizer.step()


def test_each_of_the_other_optimizers_may_make_its_steps_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_STEPS_WITHOUT_FIRST", 4)
    module = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(3)]
    averages: Any = SimpleNamespace(step=0, options=LocalOptions(every=2))
    trained = local.TrainedModule(averages, module, optimizers)
    for _ in range(4):
        trained.count(optimizers[1])
        trained.count(optimizers[2])
    with pytest.raises(ConfigError, match="the first of 3 optimizers has made no step, and the others 9"):
        trained.count(optimizers[2])


class _NewOptimizers(Classifier):
    """Makes new optimizers while it trains."""

    def on_train_epoch_start(self) -> None:
        self.trainer.strategy.setup_optimizers(self.trainer)


@on_ranks(2, initialise=False)
def test_steps_of_optimizers_that_do_not_count_are_averaged_or_an_error(rank: int) -> list[Any]:
    results: list[Any] = []
    local._STEPS_WITHOUT_FIRST = 4
    module = _OnlyTheSecond(seed=rank)
    trainer_of({"local_steps": 16}).fit(module, data(7))
    results.append(fingerprint(module))
    for wrong in (_OnlyTheSecond(seed=rank), _NewOptimizers()):
        results.append(error_text(ConfigError, trainer_of({"local_steps": 2}).fit, wrong, data(7)))
    assert "the first of 2 optimizers has made no step" in results[1]
    assert "was made after local steps began" in results[2]
    return results


class _LoadsLate(Classifier):
    """Loads weights after local steps began: the same on all ranks, or on the second rank only."""

    def __init__(self, only_second: bool) -> None:
        super().__init__()
        self.only_second = only_second

    def on_train_start(self) -> None:
        if self.global_rank == 1 or not self.only_second:
            self.load_state_dict(Classifier(seed=9).state_dict(), strict=False)


@on_ranks(2, initialise=False)
def test_weights_that_are_loaded_after_local_steps_began_are_an_error_on_all_ranks(rank: int) -> list[str]:
    results = []
    for only_second in (False, True):
        results.append(error_text(ConfigError, trainer_of({"local_steps": 4}).fit, _LoadsLate(only_second), data(2)))
    assert all("changed after local steps began" in text for text in results)
    return results


class _ScheduleFree(Classifier):
    """A module whose optimizer keeps weights of its own."""

    def configure_optimizers(self) -> Any:
        return ScheduleFreeLike(self.parameters())


def _schedule_free(rank: int) -> list[str]:
    results = []
    for inner_state in ("keep", "average"):
        module = _ScheduleFree()
        trainer = trainer_of({"preset": "gqsgd_diloco", "local_steps": 3, "inner_state": inner_state})
        try:
            trainer.fit(module, data(10))
        except ConfigError as error:
            results.append(str(error))
            continue
        optimizer = trainer.optimizers[0]
        kept = torch.cat([optimizer.state[p]["z"].flatten() for p in module.parameters()])
        results.append(f"{fingerprint(module)} {kept.double().sum().item()!r} {kept.norm().item()!r}")
    return results


def test_an_optimizer_that_keeps_weights_is_refused_or_averaged(tmp_path: Path) -> None:
    first, second = run(_schedule_free, 2, tmp_path, initialise=False)
    for refused, _ in (first, second):
        assert "keeps weights in its state: 'z'" in refused
        assert "inner_state='average'" in refused
    assert first[1] == second[1]
    assert "keeps weights" not in first[1]
