"""Bare DistributedDataParallel on scikit-learn's digits.

torchrun --nproc-per-node 2 examples/ddp_torchrun.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import register_gqsgd

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(model)
    state = register_gqsgd(model, bits=4)  # this is all
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        print(state.report())

    for _ in range(200):
        chosen = torch.randint(0, 1500, (64 * ranks,))[rank::ranks]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if rank == 0:
        accuracy = (model.module(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        totals = state.telemetry.totals()
        print(f"accuracy {accuracy:.3f}, {totals['bytes_sent'] / 1e6:.1f} MB sent, error {totals['rel_l2']:.3f}")
    state.close()
    dist.destroy_process_group()
