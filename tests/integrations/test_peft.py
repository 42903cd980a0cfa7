"""Adapters of PEFT: only the trained weights are averaged, and a change of adapter is an error on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lightning_gqsgd import enable, register_gqsgd
from lightning_gqsgd.errors import ConfigError
from tests.bits import bits_of
from tests.distributed.models import fingerprint
from tests.distributed.ranks import on_ranks, run_alike

WORDS = 128


def adapted(**options: Any) -> PeftModel:
    """A small GPT-2 with an adapter of LoRA."""
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=WORDS, n_positions=32, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(sizes)
    return get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **options))


def rows(rank: int, count: int) -> torch.Tensor:
    """Texts that say everything twice."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(WORDS, (count, 8), generator=generator).repeat_interleave(2, dim=1)


def frozen(model: torch.nn.Module) -> str:
    return bits_of(parameter for parameter in model.parameters() if not parameter.requires_grad)


@on_ranks(2)
def test_only_trained_weights_are_averaged_and_another_adapter_needs_rewrap(rank: int) -> list[Any]:
    """Several kinds of adapters, and then a change of adapter; returns what must be equal on all ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: list[Any] = []
    kinds: list[dict[str, Any]] = [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}]
    for options in kinds:
        model = adapted(**options)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        before = frozen(model)
        wrapped = DistributedDataParallel(model)
        state = register_gqsgd(wrapped, bits=4)
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses = []
        for step in range(10):
            batch = rows(rank + 2 * (step % 2), 4)
            optimizer.zero_grad()
            loss = wrapped(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert frozen(model) == before
        assert losses[-1] < losses[0]
        numel = sum(parameter.numel() for parameter in trained)
        # Ranks send less than the trained weights in fp32, although small tensors stay uncompressed.
        assert state.telemetry.totals()["bytes_sent"] < 10 * 4 * numel
        state.close()
        found.append(fingerprint(model))

    model = adapted()
    model.add_adapter("other", LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    wrapped = DistributedDataParallel(model)
    state = register_gqsgd(wrapped, bits=4)
    model.set_adapter("other")
    batch = rows(rank, 4)
    with pytest.raises(ConfigError, match=r"lora_A\.other\.weight.*state\.rewrap\(DistributedDataParallel\)"):
        wrapped(input_ids=batch, labels=batch).loss.backward()
    wrapped = state.rewrap(DistributedDataParallel)
    wrapped(input_ids=batch, labels=batch).loss.backward()
    state.close()
    return [*found, bits_of(p.grad for p in model.parameters() if p.grad is not None)]


def _trainer(folder: Path, **arguments: Any) -> Trainer:
    data = [{"input_ids": row, "labels": row} for row in rows(7, 64)]
    usual: dict[str, Any] = {"max_steps": 6, "learning_rate": 1e-2, "use_cpu": True, "report_to": "none"}
    return Trainer(
        adapted(lora_dropout=0.1), TrainingArguments(str(folder), **{**usual, **arguments}), train_dataset=data
    )


def _resumes(rank: int, folder: Path) -> list[str]:
    os.environ["OMP_NUM_THREADS"] = "1"
    saves = {"save_strategy": "steps", "save_steps": 3}
    whole = _trainer(folder, **saves)
    enable(whole, bits=4)
    whole.train()
    resumed = _trainer(folder, **saves)
    enable(resumed, bits=4)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    return [fingerprint(whole.model), fingerprint(resumed.model)]


@pytest.mark.slow
def test_a_training_of_lora_resumes_to_the_same_bits_from_a_checkpoint_of_the_adapter(tmp_path: Path) -> None:
    whole, resumed = run_alike(_resumes, 2, tmp_path, tmp_path / "run", initialise=False)
    assert whole == resumed
    files = {file.name for file in (tmp_path / "run" / "checkpoint-3").iterdir()}
    assert {"adapter_model.safetensors", "gqsgd.pt"} <= files
    assert "model.safetensors" not in files
