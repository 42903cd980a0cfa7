"""Handwritten digits, a rank that dies, and torchrun, which starts both ranks again from their checkpoint.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 1 examples/ddp_restarts.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from lightning_gqsgd import register_gqsgd

dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
state, optimizer, first = register_gqsgd(model, bits=4), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0
file = Path(tempfile.gettempdir(), f"ddp_restarts_{os.getppid()}.pt")  # torchrun's process, which outlives its ranks
if file.exists():
    *saved, first = torch.load(file, weights_only=True)
    for part, values in zip((model, optimizer, state), saved, strict=True):
        part.load_state_dict(values)  # on every rank
print(f"attempt {attempt}, rank {rank}, from step {first} on: {state.report()}")
for step in range(first, 200):
    chosen = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[rank:128:2]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[chosen].float() / 16), labels[chosen]).backward()
    optimizer.step()
    if step % 50 == 49:
        parts = [part.state_dict() for part in (model, optimizer, state)]  # the last one is a collective
        if rank == 0:
            torch.save([*parts, step + 1], file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)  # never half a checkpoint
    if (attempt, rank, step) == ("0", 1, 120):
        os.abort()  # torchrun then restarts all ranks
print(f"rank {rank}: accuracy {(model(images[1500:].float() / 16).argmax(1) == labels[1500:]).float().mean():.3f}")
