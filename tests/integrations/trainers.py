"""A Trainer of transformers on rows that it learns in a few steps, with DistributedDataParallel or FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32), nn.Linear(32, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer_of(folder: Path, model_init: Any = None, **arguments: Any) -> Trainer:
    rows = torch.randn(128, 32, generator=torch.Generator().manual_seed(1))
    data = [{"x": row, "labels": int(row.sum() > 0)} for row in rows]
    usual = {
        "max_steps": 8,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    settings = TrainingArguments(str(folder), **{**usual, **arguments})
    model = None if model_init else Classifier()
    return Trainer(model, settings, train_dataset=data, eval_dataset=data[:32], model_init=model_init)
