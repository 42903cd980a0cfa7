"""Lightning's ModelParallelStrategy (FSDP2), with weights and gradients at few bits. On the CPU, offline:
python examples/lightning_model_parallel.py
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard
from torch.nn import Linear, ReLU, Sequential, functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_gqsgd import register_gqsgd_fsdp


class Digits(pl.LightningModule):
    def configure_model(self) -> None:
        self.net = Sequential(Linear(64, 256), ReLU(), Linear(256, 256), ReLU(), Linear(256, 10))
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
        self.gqsgd = register_gqsgd_fsdp(self.net, reduce_scatter=True, all_gather_bits=8, bits=4)
        self.print(self.gqsgd.report())

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["gqsgd"] = self.gqsgd.state_dict()

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.gqsgd.load_state_dict(checkpoint["gqsgd"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = DataLoader(TensorDataset(x.float() / 16, y), batch_size=32, shuffle=True)
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 5, "logger": False, "enable_checkpointing": False}
    pl.Trainer(strategy=ModelParallelStrategy(2, 1), **options).fit(Digits(), data)
