"""FSDP2 in Accelerate and in the Trainer of transformers.

Accelerate has FSDP2 on accelerators only, so these tests make it believe that the CPU is one.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer

from lightning_gqsgd import enable, register_gqsgd_fsdp
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.frameworks.transformers_fsdp import FSDPCallback
from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import on_ranks, run
from tests.integrations.fsdp_models import needs_fsdp_hooks
from tests.integrations.trainers import trainer_of

pytestmark = needs_fsdp_hooks


@contextlib.contextmanager
def cpu_as_accelerator() -> Any:
    """Let Accelerate shard models on the CPU."""
    begin = AcceleratorState.__init__

    def __init__(self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None:
            self.fsdp_plugin = kwargs["fsdp_plugin"]

    AcceleratorState._reset_state()
    GradientState._reset_state()
    AcceleratorState.__init__ = __init__
    AcceleratorState.distributed_type = property(lambda self: DistributedType.FSDP, lambda self, value: None)
    try:
        yield
    finally:
        AcceleratorState.__init__ = begin
        del AcceleratorState.distributed_type
        AcceleratorState._reset_state()
        GradientState._reset_state()


def sharding_trainer_of(folder: Path, **arguments: Any) -> Trainer:
    sharding = {
        "fsdp_version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["Linear"],
        "cpu_ram_efficient_loading": False,
    }
    return trainer_of(folder, **{"logging_steps": 4, "fsdp": True, "fsdp_config": sharding, **arguments})


def whole_weights(model: Any) -> list[list[float]]:
    """The weights of a model that is sharded. A collective."""
    parameters = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    return [parameter.detach().flatten().tolist() for parameter in parameters]


def train(folder: Path, fields: dict[str, Any] | None, resume: Any = None, **arguments: Any) -> dict[str, Any]:
    trainer = sharding_trainer_of(folder, **arguments)
    callback = None if fields is None else enable(trainer, **fields)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        trainer.train(resume_from_checkpoint=resume)
    assert callback is None or isinstance(callback, FSDPCallback)
    state = None if callback is None else callback.state
    return {
        "weights": whole_weights(trainer.model),
        "steps": None if state is None else state.step,
        "loss": trainer.evaluate()["eval_loss"],
        "logged": sorted(name for row in trainer.state.log_history for name in row if name.startswith("gqsgd/")),
        "said": [line for line in said.getvalue().splitlines() if line.startswith("gqsgd:")],
        "bytes": None if state is None else state.summary(),
    }


def trains(rank: int, folder: Path) -> list[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    with cpu_as_accelerator():
        return [
            train(folder, None),
            train(folder, {"min_numel": 1 << 20}),
            train(folder, {"bits": 4, "all_gather_bits": 8, "min_numel": 100}, gradient_accumulation_steps=2),
        ]


@pytest.mark.slow
def test_a_trainer_compresses_what_fsdp_sends(tmp_path: Path) -> None:
    first, second = run(trains, 2, tmp_path, tmp_path / "run", initialise=False)
    for mine, other in zip(first, second, strict=True):
        assert mine["weights"] == other["weights"]
    plain, uncompressed, quantised = first
    assert plain["said"] == []
    assert "NOTHING IS COMPRESSED" in uncompressed["said"][0]
    assert uncompressed["weights"] == plain["weights"]
    assert quantised["loss"] < 0.7  # at random it is 0.69
    assert abs(quantised["loss"] - plain["loss"]) < 0.1
    assert quantised["steps"] == 8
    assert quantised["logged"].count("gqsgd/bytes_sent") == 2
    report, summary = quantised["said"]
    assert "reduce-scattered over 2 shards, at 4 bits" in report
    assert "weights in 2 sharded tensors, gathered at 8 bits" in report
    assert summary.startswith("gqsgd: in 8 steps, rank 0 sent")
    assert "of gradients and weights instead of" in summary
    assert second[2]["said"] == []
    assert 3 < quantised["bytes"]["compression_ratio"] < 6


def replicates(rank: int, folder: Path) -> list[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    layout = {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)}
    with cpu_as_accelerator():
        return [train(folder, None, **layout), train(folder, {"bits": 4, "min_numel": 100}, **layout)]


@pytest.mark.slow
def test_a_trainer_compresses_the_mean_over_replicas(tmp_path: Path) -> None:
    ranks = run(replicates, 4, tmp_path, tmp_path / "run", initialise=False)
    plain, quantised = ranks[0]
    for other in ranks[1:]:
        assert [one["weights"] for one in other] == [plain["weights"], quantised["weights"]]
    report, summary = quantised["said"]
    assert "averaged over 2 replicas by gather, at 4 bits" in report
    assert "reduce-scattered" not in report
    assert "of gradients instead of" in summary
    assert abs(quantised["loss"] - plain["loss"]) < 0.1


def resumes(rank: int, folder: Path) -> list[dict[str, Any]]:
    os.environ["OMP_NUM_THREADS"] = "1"
    fields = {"bits": 4, "all_gather_bits": 8, "min_numel": 100, "seed": 9}
    saves = {"save_strategy": "steps", "save_steps": 4}
    with cpu_as_accelerator():
        whole = train(folder, fields, **saves)
        first = folder / "checkpoint-4"
        resumed = train(folder, fields, resume=str(first), **saves)
        saved = torch.load(first / "gqsgd_fsdp.pt", weights_only=True)
        json.loads((first / "trainer_state.json").read_text(), parse_constant=pytest.fail)  # no NaN in the log
        torch.distributed.barrier()
        if rank == 0:
            (first / "gqsgd_fsdp.pt").unlink()
        torch.distributed.barrier()
        without = train(folder, fields, resume=str(first), **saves)
    return [whole, resumed, without, {"saved": (saved["seed"], saved["step"])}]


@pytest.mark.slow
def test_an_interrupted_trainer_resumes_to_the_same_bits_under_fsdp(tmp_path: Path) -> None:
    first, second = run(resumes, 2, tmp_path, tmp_path / "run", initialise=False)
    whole, resumed, without, saved = first
    assert [one["weights"] for one in first[:3]] == [one["weights"] for one in second[:3]]
    assert saved == {"saved": (9, 4)}
    assert (whole["steps"], resumed["steps"], without["steps"]) == (8, 8, 4)
    assert resumed["weights"] == whole["weights"]
    assert without["weights"] != whole["weights"]  # the dither starts anew, with a warning


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_a_second_training_goes_on_with_the_same_hooks_and_mistakes_are_refused(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    os.environ["OMP_NUM_THREADS"] = "1"
    with cpu_as_accelerator():
        trainer = sharding_trainer_of(folder)
        callback = enable(trainer, bits=4)
        assert isinstance(callback, FSDPCallback)
        steps = []
        for _ in range(2):
            trainer.train()
            assert callback.state is not None
            steps.append(callback.state.step)
        with pytest.raises(ConfigError, match="gqsgd is enabled already"):
            enable(trainer, bits=5)
        for fields, match in (
            ({"bits": 9}, "bits=9"),
            ({"preset": "signsgd_ef"}, "memories do not work with sharded gradients"),
            ({"auto": True}, "auto=True is for DistributedDataParallel"),
            ({"reduce_scatter": False}, "nothing would be compressed"),
            ({"all_gather_bits": 1}, "all_gather_bits=1"),
            ({"local_steps": 4}, "trains with FSDP, and local steps need whole models"),
            ({"bucket_cap_mb": 5}, "bucket_cap_mb"),
        ):
            with pytest.raises(ConfigError, match=match):
                enable(sharding_trainer_of(folder), **fields)
    assert steps == [8, 16]


@on_ranks(2, initialise=False)
def test_an_accelerate_loop_under_fsdp_resumes_to_the_same_bits(rank: int, tmp_path: Path) -> list[Any]:
    """Train with Accelerate, and go on from its checkpoint."""
    folder = tmp_path / "saved"
    os.environ["OMP_NUM_THREADS"] = "1"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="no_wrap")
    found: list[Any] = []
    with cpu_as_accelerator():
        accelerator = Accelerator(cpu=True)
        accelerator.state.fsdp_plugin = plugin
        with pytest.raises(ConfigError, match=r"register_gqsgd_fsdp\(model, reduce_scatter=True, all_gather_bits=8\)"):
            enable(accelerator, bits=4)
        module = mlp(64)
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
        state = register_gqsgd_fsdp(model, reduce_scatter=True, all_gather_bits=8, bits=4, min_numel=100)
        accelerator.register_for_checkpointing(state)
        for step in range(2):
            if step == 1:
                accelerator.save_state(str(folder))
            accelerator.backward(loss_of(model, rank, step))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append([state.step, whole_weights(model)])
        accelerator.wait_for_everyone()
        accelerator.load_state(str(folder))
        accelerator.backward(loss_of(model, rank, 1))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([state.step, whole_weights(model)])
        accelerator.wait_for_everyone()
        if rank == 0:
            shutil.rmtree(folder)
        state.close()
    before, after = found
    assert before == after
    assert before[0] == 2
    return found
