"""The Trainer of transformers: the hook, logs, checkpoints; in processes with torchrun's environment."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

from lightning_gqsgd import GQSGDKwargs, enable
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.frameworks.transformers_local import MeteredCallback
from tests.distributed.models import fingerprint
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.integrations.trainers import Classifier, trainer_of


def seen(trainer: Trainer, handler: GQSGDKwargs | None) -> dict[str, Any]:
    """What a test compares."""
    model = trainer.model_wrapped
    return {
        "hook": model._get_ddp_logging_data().get("comm_hook", "none"),
        "unused": model.find_unused_parameters,
        "bits": fingerprint(trainer.model),
        "steps": [state.step for state in handler.states] if handler else [],
        "rows": trainer.state.log_history,
        "step": trainer.state.global_step,
    }


def fit(
    folder: Path, fields: dict[str, Any] | None = None, resume: Any = None, **arguments: Any
) -> tuple[Trainer, dict[str, Any]]:
    trainer = trainer_of(folder, **arguments)
    handler = None if fields is None else enable(trainer, **fields)
    said = io.StringIO()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with contextlib.redirect_stderr(said):
                trainer.train(resume_from_checkpoint=resume)
        finally:
            sys.stderr.write(said.getvalue())
    told = [str(one.message) for one in caught if "gqsgd" in str(one.message)]
    return trainer, {**seen(trainer, handler), "told": told, "said": said.getvalue()}


def fits(_: int, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    return [fit(**one)[1] for one in runs]


def start(tmp_path: Path, *runs: dict[str, Any], ranks: int = 2) -> list[list[dict[str, Any]]]:
    return run(fits, ranks, tmp_path, *({"folder": tmp_path / "run", **one} for one in runs), initialise=False)


def test_the_hook_is_on_and_native_is_equal_to_the_plain_trainer(tmp_path: Path) -> None:
    common = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    runs = [
        {**common},
        {**common, "fields": {"reducer": "native"}},
        {**common, "fields": {"bits": 4}},
        {"fields": {"bits": 4}, "bf16": True, "eval_strategy": "steps", "eval_steps": 4},
        {"fields": {"bits": 4}, "ddp_find_unused_parameters": False, "max_grad_norm": 0.0},
    ]
    first, second = start(tmp_path, *runs)
    for mine, other in zip(first, second, strict=True):
        assert mine["bits"] == other["bits"]
        assert mine["step"] == 8
    plain, native, *compressed = first
    assert (plain["hook"], native["hook"]) == ("none", "gqsgd_hook")
    assert native["bits"] == plain["bits"]
    for one in compressed:
        assert (one["hook"], one["steps"], one["told"]) == ("gqsgd_hook", [8], [])
        assert one["bits"] != plain["bits"]
    assert [one["unused"] for one in first] == [True, True, True, True, False]
    losses = [[row["loss"] for row in one["rows"] if "loss" in row] for one in (plain, compressed[0])]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert len([row for row in compressed[1]["rows"] if "eval_loss" in row]) == 2


def test_counters_are_logged_beside_the_loss(tmp_path: Path) -> None:
    (one,), (other,) = start(
        tmp_path, {"fields": {"bits": 4, "reducer": "two_shot", "sample_every": 4}, "logging_steps": 3}
    )
    rows = [row for row in one["rows"] if "gqsgd/bytes_sent" in row]
    assert [row["step"] for row in rows] == [3, 6, 8]
    assert ["loss" in row for row in rows] == [True, True, False]  # the last is the summary
    sent = [row["gqsgd/bytes_sent"] for row in rows]
    assert sent == pytest.approx([sent[0], 2 * sent[0], 8 / 3 * sent[0]])
    names = {"encode_s", "wait_s", "decode_s", "exposed_s", "rel_l2", "bits_per_coordinate", "nonfinite_blocks"}
    for row in rows:
        assert {f"gqsgd/{name}" for name in names} <= set(row)
    assert 4 < rows[-1]["gqsgd/bits_per_coordinate"] < 8
    assert 0 < rows[-1]["gqsgd/rel_l2"] < 0.5
    assert [each["said"].count("gqsgd: in 8 steps, rank 0 sent ") for each in (one, other)] == [1, 0]


def trains_twice(_: int, folder: Path) -> list[dict[str, Any]]:
    """Without and with an evaluation in front of training, then once more from a checkpoint of the second training."""
    os.environ["OMP_NUM_THREADS"] = "1"
    trainer = trainer_of(folder, save_strategy="steps", save_steps=6)
    handler = enable(trainer, bits=4)
    found = []
    for begins in ({}, {}, {"resume_from_checkpoint": str(folder / "checkpoint-6")}):
        trainer.train(**begins)
        dist.barrier()  # rank 0 writes
        (saved,) = torch.load(folder / "checkpoint-8" / "gqsgd.pt", weights_only=True)["states"]
        found.append({**seen(trainer, handler), "saved": saved["step"]})
    evaluated = trainer_of(folder, eval_on_start=True)
    handler = enable(evaluated, bits=4)
    evaluated.train()
    evaluated.evaluate()
    assert [state.step for state in handler.states] == [8]
    evaluated.train()
    return [*found, seen(evaluated, handler)]


@pytest.mark.slow
def test_a_second_training_goes_on_with_the_same_hook(tmp_path: Path) -> None:
    first, second = run(trains_twice, 2, tmp_path, tmp_path / "run", initialise=False)
    assert [one["bits"] for one in first] == [one["bits"] for one in second]
    assert [one["hook"] for one in first] == 4 * ["gqsgd_hook"]
    assert [one["steps"] for one in first] == [[8], [16], [16], [16]]
    assert [one["saved"] for one in first[:3]] == [8, 16, 16]
    assert first[1]["bits"] == first[2]["bits"]  # the checkpoint has the hook's step, 14


@pytest.mark.slow
@pytest.mark.parametrize("unused", [True, False])
def test_an_interrupted_run_resumes_to_the_same_bits(unused: bool, tmp_path: Path) -> None:
    """Without and with a memory; from the last checkpoint of the same folder, and from one by its name."""
    runs: list[dict[str, Any]] = [
        {"fields": {"bits": 4, "reducer": "sum", "seed": 9}, "folder": tmp_path / "memoryless"},
        {"fields": {"preset": "signsgd_ef", "warmup_steps": 1, "seed": 9}, "folder": tmp_path / "memory"},
    ]
    layout = {"ddp_find_unused_parameters": unused}
    begun = start(tmp_path, *({**one, **layout, "save_strategy": "steps", "save_steps": 6} for one in runs))
    for one in runs:
        folder = one["folder"] / "checkpoint-6"
        (saved,) = torch.load(folder / "gqsgd.pt", weights_only=True)["states"]
        assert (saved["schema"], saved["seed"], saved["step"]) == (1, 9, 6)
        assert ("memory" in saved) == ("preset" in one["fields"])
        json.loads((folder / "trainer_state.json").read_text(), parse_constant=pytest.fail)  # no NaN in the log
        shutil.rmtree(one["folder"] / "checkpoint-8")
    last = [{**one, **layout, "resume": True} for one in runs]
    named = [
        {**one, **layout, "resume": one["folder"] / "checkpoint-6", "folder": tmp_path / "elsewhere"} for one in runs
    ]
    resumed = start(tmp_path, *last, *named)
    for before, after in zip(begun, resumed, strict=True):
        assert [one["bits"] for one in after] == 2 * [one["bits"] for one in before]
        assert [one["steps"] for one in after] == 4 * [[8]]
        assert [one["told"] for one in after] == 4 * [[]]


@pytest.mark.slow
def test_checkpoints_go_to_other_numbers_of_ranks_and_to_and_from_the_plain_trainer(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 8}
    remembering = {"preset": "signsgd_ef"}
    start(
        tmp_path,
        {"folder": tmp_path / "plain", **saves},
        {"folder": tmp_path / "memory", "fields": remembering, **saves},
        {"folder": tmp_path / "model", "fields": remembering, "save_only_model": True, **saves},
    )
    plain, memory, model = (tmp_path / name / "checkpoint-8" for name in ("plain", "memory", "model"))
    assert [(folder / "gqsgd.pt").exists() for folder in (plain, memory, model)] == [False, True, False]
    runs = [
        {"resume": plain, "fields": {"bits": 4}, "max_steps": 12},
        {"resume": memory, "max_steps": 12},
        {"resume": memory, "fields": remembering, "max_steps": 12},
    ]
    ranks = start(tmp_path, *runs, ranks=3)
    for one in ranks:
        assert [run["bits"] for run in one] == [run["bits"] for run in ranks[0]]
    anew, without, goes_on = ranks[0]
    assert (anew["step"], anew["steps"]) == (12, [4])
    assert anew["told"] == ["gqsgd: the checkpoint has no state of gqsgd's hook, which starts anew"]
    assert (without["step"], without["hook"]) == (12, "none")
    assert (goes_on["step"], goes_on["steps"]) == (12, [12])


class _Fails(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError("a step that fails")


class _CallsItsOwnModel(Trainer):
    first_step = 0  # from which it does so

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        called = model if self.state.global_step < self.first_step else self.model
        return called(**inputs)["loss"]


class _WithReference(Trainer):
    """Prepares a model that it only evaluates when it is made, as TRL's DPOTrainer does."""

    def __init__(self, like: Trainer, evaluates: bool = True) -> None:
        super().__init__(like.model, like.args, train_dataset=like.train_dataset)
        self.reference = self.accelerator.prepare_model(Classifier(), evaluation_mode=evaluates)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        with torch.no_grad():
            reference = self.reference(**inputs)["logits"]
        outputs = model(**inputs)
        loss = outputs["loss"] + (outputs["logits"] - reference).square().mean()
        return (loss, outputs) if return_outputs else loss


def _beside_a_reference(rank: int, folder: Path) -> list[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    for fields in (None, {"reducer": "native"}, {"bits": 4}, {"local_steps": 2}):
        trainer = _WithReference(trainer_of(folder))
        enabled = None if fields is None else enable(trainer, **fields)
        trainer.train()
        steps = [state.step for state in enabled.states] if isinstance(enabled, GQSGDKwargs) else []
        results.append([fingerprint(trainer.model), fingerprint(trainer.reference), steps])
    for fields in ({"bits": 4}, {"local_steps": 2}):
        evaluated = trainer_of(folder)
        evaluated.evaluate()
        second = _WithReference(trainer_of(folder), evaluates=False)
        for trainer in (evaluated, second):
            with pytest.raises(ConfigError, match="has prepared (1|its) model already"):
                enable(trainer, **fields)
    return results


@pytest.mark.slow
def test_a_trainer_may_have_prepared_models_that_it_only_evaluates(tmp_path: Path) -> None:
    result = run_alike(_beside_a_reference, 2, tmp_path, tmp_path / "run", initialise=False)
    plain, native, quantised, local = result
    assert native[0] == plain[0]
    assert len({plain[0], quantised[0], local[0]}) == 3
    assert {reference for _, reference, _ in result} == {plain[1]}
    assert [steps for *_, steps in result] == [[], [8], [8], []]


class _Freezes(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].net[0].requires_grad_(state.global_step < 2)


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_gradients_that_are_not_averaged_are_an_error_before_weights_change(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    os.environ["OMP_NUM_THREADS"] = "1"
    usual = trainer_of(folder)
    around = _CallsItsOwnModel(usual.model, usual.args, train_dataset=usual.train_dataset)
    enable(around, bits=4)
    before = fingerprint(around.model)
    with pytest.raises(ConfigError, match="gradients of step 0 have not come .* not self.model"):
        around.train()
    assert fingerprint(around.model) == before

    usual = trainer_of(folder)
    later = _CallsItsOwnModel(usual.model, usual.args, train_dataset=usual.train_dataset)
    later.first_step = 2
    enable(later, bits=4)
    with pytest.raises(ConfigError, match="gradients of step 2 have not come"):
        later.train()

    freezes = trainer_of(folder, ddp_find_unused_parameters=False)
    enable(freezes, bits=4)
    freezes.add_callback(_Freezes())
    with pytest.raises(ConfigError, match="'net.0.bias', which was frozen .* find_unused_parameters=True"):
        freezes.train()
    dist.barrier()  # rank 0 has the store, which rank 1 may still need


def _keeps_an_earlier_model(rank: int, folder: Path) -> list[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    saves = {"save_strategy": "steps", "save_steps": 6, "model_init": Classifier}
    trainer = trainer_of(folder, **saves)
    handler = enable(trainer, "signsgd_ef")
    trainer.train()
    before = [trainer.model_wrapped] if rank == 0 else []
    trainer.train()
    resumed = trainer_of(folder, **saves)
    enable(resumed, "signsgd_ef")
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    return [len(handler.states), len(before), fingerprint(trainer.model), fingerprint(resumed.model)]


@pytest.mark.slow
def test_only_the_model_in_training_is_saved(tmp_path: Path) -> None:
    """Each training of a Trainer with ``model_init`` has a model of its own, and one rank may keep an earlier one."""
    first, second = run(_keeps_an_earlier_model, 2, tmp_path, tmp_path / "run", initialise=False)
    assert first[0] == second[0] == 1
    assert (first[1], second[1]) == (1, 0)
    assert first[2] == first[3] == second[2] == second[3]


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_mistakes(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    os.environ["OMP_NUM_THREADS"] = "1"
    trainer = trainer_of(folder, save_strategy="steps", save_steps=4)
    with pytest.raises(ConfigError, match="no argument 'bit'; did you mean 'bits'"):
        enable(trainer, bit=4)
    enable(trainer, bits=4)
    assert isinstance(trainer.callback_handler.callbacks[0], MeteredCallback)  # others print what it logs
    with pytest.raises(ConfigError, match=r"enabled already, as GQSGDKwargs\(bits=4, find_unused_parameters=True\)"):
        enable(trainer, bits=4)
    trainer.train()

    other = shutil.copytree(folder / "checkpoint-4", folder.with_name(f"copy-{rank}"))
    if rank == 1:
        (other / "gqsgd.pt").unlink()
    with pytest.raises(ConfigError, match=r"of 2 ranks only \[0\] see .*gqsgd.pt, and all have to continue from it"):
        trainer.train(resume_from_checkpoint=other)
    with pytest.raises(ConfigError, match=r"of 2 ranks only \[1\] resume from a checkpoint"):
        trainer.train(resume_from_checkpoint=folder / "checkpoint-4" if rank else None)
    if rank == 1:
        (other / "gqsgd.pt").write_bytes((folder / "checkpoint-4" / "gqsgd.pt").read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"of 2 ranks \[1\] cannot read .*gqsgd.pt.* Resume from another checkpoint"):
        trainer.train(resume_from_checkpoint=other)
    with pytest.raises(ConfigError, match="enabled already"):
        enable(trainer, bits=5)

    trainer = trainer_of(folder)
    trainer.train()
    with pytest.raises(ConfigError, match="has prepared 1 model already, without gqsgd"):
        enable(trainer)
    with pytest.raises(ConfigError, match="has prepared its model already; enable local steps before"):
        enable(trainer, local_steps=3)

    trainer = trainer_of(folder)
    with pytest.raises(ConfigError, match="auto=True"):
        enable(trainer, local_steps=3, auto=True)
    state = trainer.accelerator.state
    kind = state.distributed_type
    state.distributed_type = "FSDP"
    with pytest.raises(ConfigError, match="trains with FSDP, and local steps need whole models"):
        enable(trainer, local_steps=3)
    state.distributed_type = kind

    trainer = trainer_of(folder)
    enable(trainer)
    trainer.evaluate()  # after it transformers trains without DistributedDataParallel, each process on its own
    with pytest.raises(ConfigError, match="not wrapped its model .* call them after `train`, or set"):
        trainer.train()

    trainer = trainer_of(folder)
    enable(trainer)
    trainer.create_accelerator_and_postprocess()  # what hyperparameter_search does
    with pytest.raises(ConfigError, match="has made a new Accelerator since gqsgd was enabled"):
        trainer.train()

    trainer = trainer_of(folder)
    assert enable(trainer, local_steps=3) is trainer.callback_handler.callbacks[0]
    trainer.create_accelerator_and_postprocess()
    with pytest.raises(ConfigError, match="averages gradients in every step, and local steps do without it"):
        trainer.train()

    trainer = trainer_of(folder)
    callback = enable(trainer, local_steps=3)
    fails = _Fails()
    trainer.add_callback(fails)
    with pytest.raises(ValueError, match="a step that fails"):
        trainer.train()
    interrupted = callback.averages
    trainer.remove_callback(fails)
    trainer.train()
    assert interrupted is not callback.averages
    assert interrupted.is_closed

    trainer = trainer_of(folder)
    handler = enable(trainer)
    trainer.train()
    before = trainer.model_wrapped  # has a hook as long as it lives
    trainer.model = trainer.model_wrapped = Classifier()
    trainer.accelerator.free_memory()
    trainer.evaluate()
    assert not handler.states  # free_memory has forgotten it
    with pytest.raises(ConfigError, match="not wrapped its model .* call them after `train`, or set"):
        trainer.train()
    del before

    trainer = trainer_of(folder)
    enable(trainer)
    trainer.model_wrapped = DistributedDataParallel(trainer.model)
    with pytest.raises(ConfigError, match="a DistributedDataParallel model that it has not wrapped itself"):
        trainer.train()


class _AsksForCheckpoint(TrainerCallback):
    """Does what a SIGTERM does after three seconds, at the end of step 5 of all ranks."""

    def __init__(self, trainer: Trainer) -> None:
        callbacks = trainer.callback_handler.callbacks
        (self._manager,) = (one.jit_manager for one in callbacks if isinstance(one, JITCheckpointCallback))
        callbacks.insert(0, self)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._manager.is_checkpoint_requested = state.global_step == 5


def _terminated(_: int, folder: Path) -> list[list[Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    found = []
    for fields in ({"preset": "signsgd_ef"}, {"local_steps": 3}):
        own = folder / next(iter(fields))
        whole = trainer_of(own)
        enable(whole, **fields)
        whole.train()
        terminated = trainer_of(own, enable_jit_checkpoint=True)
        enable(terminated, **fields)
        _AsksForCheckpoint(terminated)
        pushed: list[list[str]] = []
        terminated.args.push_to_hub = True
        terminated._push_from_checkpoint = lambda output, pushed=pushed: pushed.append(os.listdir(output))
        terminated.train()
        dist.barrier()  # rank 0 writes
        resumed = trainer_of(own)
        enable(resumed, **fields)
        resumed.train(resume_from_checkpoint=str(own / "checkpoint-5"))
        (names,) = pushed if terminated.args.should_save else [[]]
        states = [name for name in names if name.startswith("gqsgd")]
        found.append([terminated.state.global_step, states, fingerprint(whole.model), fingerprint(resumed.model)])
    return found


@pytest.mark.slow
def test_a_checkpoint_that_a_signal_asks_for_has_the_state_before_it_is_pushed(tmp_path: Path) -> None:
    first, second = run(_terminated, 2, tmp_path, tmp_path, initialise=False)
    assert [one[:2] for one in first] == [[5, ["gqsgd.pt"]], [5, ["gqsgd_local.pt"]]]
    for mine, other in zip(first, second, strict=True):
        assert mine[2] == mine[3] == other[2] == other[3]


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_checkpoint_that_each_node_has_saved_resumes_to_the_same_bits(rank: int, tmp_path: Path) -> list[str]:
    """Two nodes of one process each, which share no folder."""
    os.environ.update(OMP_NUM_THREADS="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    found = []
    for fields in ({"preset": "signsgd_ef"}, {"local_steps": 3}):
        own = tmp_path / f"{next(iter(fields))}-{rank}"
        for begins in ({}, {"resume_from_checkpoint": str(own / "checkpoint-5")}):
            trainer = trainer_of(own, save_strategy="steps", save_steps=5, save_on_each_node=True)
            enable(trainer, **fields)
            trainer.train(**begins)
            found.append(fingerprint(trainer.model))
    whole, resumed, local, resumed_local = found
    assert whole == resumed
    assert local == resumed_local
    return found


def _best(_: int, folder: Path) -> list[str]:
    """The model at the end of a training whose last checkpoint is not the best one, and that of the best checkpoint."""
    every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = trainer_of(folder, **every, load_best_model_at_end=True, greater_is_better=True)
    enable(trainer, local_steps=3)
    trainer.train()
    saved = Classifier()
    best = Path(str(trainer.state.best_model_checkpoint))
    assert best.name != "checkpoint-8"
    saved.load_state_dict(load_file(best / "model.safetensors"))
    return [fingerprint(trainer.model), fingerprint(saved)]


@pytest.mark.slow
def test_local_steps_leave_the_best_model_as_it_was_saved(tmp_path: Path) -> None:
    trained, saved = run_alike(_best, 2, tmp_path, tmp_path, initialise=False)
    assert trained == saved


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_checkpoint_that_is_written_over_keeps_no_state_of_another_training(
    rank: int, tmp_path: Path
) -> list[list[str]]:
    """Trainings of several kinds that save the same checkpoint, one after the other: the states in it after each."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found = []
    for fields, only_model in (({"local_steps": 2}, False), ({"bits": 4}, False), ({"local_steps": 2}, True)):
        trainer = trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=2, save_only_model=only_model)
        enable(trainer, **fields)
        trainer.train()
        dist.barrier()  # rank 0 writes
        found.append(sorted(file.name for file in (tmp_path / "checkpoint-2").glob("gqsgd*")))
        dist.barrier()
    assert found == [["gqsgd_local.pt"], ["gqsgd.pt"], []]
    return found


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_state_is_not_used_where_a_trainer_without_gqsgd_has_written_over_its_checkpoint(
    rank: int, tmp_path: Path
) -> list[list[Any]]:
    """A Trainer without gqsgd writes over a checkpoint with gqsgd's state. Then one with it resumes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found = []
    for fields in ({"local_steps": 2}, {"preset": "signsgd_ef"}):
        for resume in (None, "checkpoint-2"):  # what the other Trainer begins with, which has gqsgd's mark, too
            own = tmp_path / f"{next(iter(fields))}-{resume}"
            saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
            trainer = trainer_of(own, **saves)
            enable(trainer, **fields)
            trainer.train()
            dist.barrier()  # rank 0 writes
            states = list((own / "checkpoint-4").glob("gqsgd*"))
            trainer = trainer_of(own, **saves, learning_rate=0.1)
            trainer.train(resume_from_checkpoint=resume and str(own / resume))
            dist.barrier()
            left = [file.is_file() for file in states]
            resumed = trainer_of(own, **saves)
            enable(resumed, **fields)
            said = io.StringIO()
            handler = logging.StreamHandler(said)
            logging.getLogger("lightning_gqsgd").addHandler(handler)
            resumed.train(resume_from_checkpoint=True)
            logging.getLogger("lightning_gqsgd").removeHandler(handler)
            told = "because it belongs to an earlier checkpoint" in said.getvalue()
            found.append([left, told == (rank == 0), fingerprint(trainer.model) == fingerprint(resumed.model)])
            dist.barrier()
    assert found == 4 * [[[True], True, True]]
    return found


class _Killed(Exception):
    """What a kill is in a test."""


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_checkpoint_that_is_not_whole_is_refused(rank: int, tmp_path: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    for fields in ({"local_steps": 2}, {"bits": 4}):
        own = tmp_path / next(iter(fields))
        for _attempt in range(2):  # the second one writes over a checkpoint that is whole
            trainer = trainer_of(own, max_steps=4, save_strategy="steps", save_steps=2)
            enable(trainer, **fields)
            trainer.train()
            dist.barrier()  # rank 0 writes
        trainer = trainer_of(own, max_steps=4, save_strategy="steps", save_steps=4)
        enable(trainer, **fields)

        def killed(*_: Any) -> None:
            raise _Killed

        trainer._save_optimizer_and_scheduler = killed
        with pytest.raises(_Killed):
            trainer.train()
        dist.barrier()
        resumed = trainer_of(own, max_steps=4)
        enable(resumed, **fields)
        with pytest.raises(FileNotFoundError, match="trainer_state.json"):
            resumed.train(resume_from_checkpoint=True)
        resumed.train(resume_from_checkpoint=str(own / "checkpoint-2"))
        dist.barrier()


def _saved_without_mark(_: int, folder: Path) -> list[str]:
    """A checkpoint as earlier versions wrote it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    saves = {"save_strategy": "steps", "save_steps": 5}
    whole = trainer_of(folder, **saves)
    enable(whole, local_steps=3)
    whole.train()
    dist.barrier()  # rank 0 writes
    own = folder / "checkpoint-5"
    if whole.args.should_save:
        state = torch.load(own / "gqsgd_local.pt", weights_only=True)
        del state["gqsgd_mark"]
        torch.save(state, own / "gqsgd_local.pt")
    dist.barrier()
    resumed = trainer_of(folder)
    enable(resumed, local_steps=3)
    resumed.train(resume_from_checkpoint=str(own))
    return [fingerprint(whole.model), fingerprint(resumed.model)]


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_has_no_mark(tmp_path: Path) -> None:
    whole, resumed = run_alike(_saved_without_mark, 2, tmp_path, tmp_path, initialise=False)
    assert whole == resumed


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_model_of_local_steps_is_wrapped_by_the_trainers_that_follow(rank: int, tmp_path: Path) -> list[Any]:
    """Trainers that train one model, one after the other: with local steps, then without this package, and with it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    model = Classifier()
    found: list[Any] = []
    for fields in ({"local_steps": 3}, None, {"bits": 4}, {"local_steps": 3}):
        usual = trainer_of(tmp_path, max_steps=4)
        trainer = Trainer(model, usual.args, train_dataset=usual.train_dataset)
        if fields is not None:
            enable(trainer, **fields)
        trainer.train()
        found += [isinstance(trainer.model_wrapped, DistributedDataParallel), fingerprint(model)]
    assert found[::2] == [False, True, True, False]
    return found


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_local_steps_train_without_ddp_and_resume(rank: int, tmp_path: Path) -> list[list[Any]]:
    results = []
    for number, fields in enumerate(({"local_steps": 3}, {"preset": "gqsgd_fedpaq", "fragments": 2, "delay": 1})):
        saving = {"save_strategy": "steps", "save_steps": 5, "gradient_accumulation_steps": 2}
        whole = trainer_of(tmp_path / str(number), **saving)
        callback = enable(whole, **fields)
        whole.train()
        resumed = trainer_of(tmp_path / str(number), **saving)
        enable(resumed, **fields)
        resumed.train(resume_from_checkpoint=str(tmp_path / str(number) / "checkpoint-5"))
        sent = [row["gqsgd/bytes_sent"] for row in whole.state.log_history if "gqsgd/bytes_sent" in row]
        results.append([fingerprint(whole.model), fingerprint(resumed.model), callback.averages.step, len(sent) > 0])
    for whole, resumed, steps, logged in results:
        assert whole == resumed
        assert steps == 8
        assert logged
    return results
