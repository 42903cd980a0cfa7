"""Lightning's Trainer on scikit-learn's digits.

python examples/lightning_trainer.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        accuracy = (self.network(images).argmax(1) == labels).float().mean()
        self.log("accuracy", accuracy, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    seed_everything(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    digits = TensorDataset(images.float() / 16, labels)
    train, test = torch.utils.data.random_split(digits, [1500, 297])
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 5, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(strategy="gqsgd_4bit", **options)
    trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=64))
    if trainer.is_global_zero:
        print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
