"""Lightning's Trainer on any number of nodes, under torchrun or srun. On one machine:

torchrun --nproc-per-node 2 examples/lightning_nodes.py
"""

import os

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_trainer import Classifier
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split

PER_NODE = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["SLURM_NTASKS_PER_NODE"])
RANKS = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])

if __name__ == "__main__":
    seed_everything(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(images.float() / 16, labels), [1500, 297])
    trainer = Trainer(
        strategy="gqsgd_4bit",  # this is all
        num_nodes=RANKS // PER_NODE,
        devices=PER_NODE,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64))
    if trainer.is_global_zero:
        print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
