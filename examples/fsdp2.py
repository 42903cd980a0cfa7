"""Hybrid sharding with FSDP2: each node has a replica, and the mean over replicas is quantised. On the CPU, offline:
torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_gqsgd import register_gqsgd_fsdp

dist.init_process_group("gloo")
torch.manual_seed(0)  # replicas start alike
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
state = register_gqsgd_fsdp(model, replicate=mesh["replicate"], bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
mine = slice(dist.get_rank(), 1500, dist.get_world_size())
for _ in range(10):
    for inputs, targets in zip(x[mine].split(32), y[mine].split(32), strict=True):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
if dist.get_rank() == 0:
    print(f"{state.report()}\naccuracy {accuracy:.3f}\n{state.summary_line()}")
state.close()
dist.destroy_process_group()
