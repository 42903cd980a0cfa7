"""Ray Train starts two workers; each runs Lightning's Trainer on scikit-learn's digits.

python examples/ray_train.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import ScalingConfig
from ray.train.lightning import RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lightning_gqsgd import RayGQSGDStrategy


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train():
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images, model = images.float() / 16, Classifier()
    options = {"max_epochs": 5, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(strategy=RayGQSGDStrategy(bits=4), plugins=[RayLightningEnvironment()], devices="auto", **options)
    prepare_trainer(trainer).fit(model, DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print({"accuracy": (model.network(images).argmax(1) == labels).float().mean().item()})


if __name__ == "__main__":
    TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
