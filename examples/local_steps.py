"""Local steps on scikit-learn's digits: each rank trains on its own, and changes are averaged every 16 steps at 4 bits.

torchrun --nproc-per-node 2 examples/local_steps.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from lightning_gqsgd import LocalSteps

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = LocalSteps(model, optimizer, every=16)  # this is all; the model is not wrapped
    if rank == 0:
        print(optimizer.report())

    for _ in range(200):
        chosen = torch.randint(0, 1500, (64 * ranks,))[rank::ranks]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.finish()  # averages the changes since the last average

    if rank == 0:
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"accuracy {accuracy:.3f}, {optimizer.telemetry.totals()['bytes_sent'] / 1e6:.2f} MB sent")
    optimizer.close()
    dist.destroy_process_group()
