"""Handwritten digits with the Trainer of transformers, gradients at 4 bits. Run with

torchrun --nproc-per-node 2 examples/huggingface_trainer.py
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

from lightning_gqsgd import enable

set_seed(0)
images, labels = load_digits(return_X_y=True)
pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
examples = [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]
config = ViTConfig(
    image_size=8, patch_size=2, num_channels=1, num_labels=10,
    hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
)  # fmt: skip
trainer = Trainer(
    ViTForImageClassification(config),
    TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, per_device_train_batch_size=32, num_train_epochs=10, learning_rate=5e-3,
        logging_steps=40, save_strategy="no", report_to="none", disable_tqdm=True,
    ),
    train_dataset=examples[:1500],
    eval_dataset=examples[1500:],
    compute_metrics=lambda guess: {"accuracy": (guess.predictions.argmax(1) == guess.label_ids).mean()},
)  # fmt: skip
enable(trainer, bits=4)
trainer.train()
result = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"accuracy {result['eval_accuracy']:.3f}")
