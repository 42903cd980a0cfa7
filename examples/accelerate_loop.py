"""Handwritten digits with Accelerate, gradients at 4 bits. Run with

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_gqsgd import GQSGDKwargs

handler = GQSGDKwargs(bits=4)
accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
accelerator.register_for_checkpointing(handler)  # save_state and load_state keep the hook's state
set_seed(0)

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
training, test = random_split(TensorDataset(images, labels), [1500, 297])
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(training, batch_size=32, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for epoch in range(10):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")

x, y = zip(*test, strict=True)
accuracy = (accelerator.unwrap_model(model)(torch.stack(x)).argmax(1) == torch.stack(y)).float().mean()
sent = sum(state.telemetry.totals()["bytes_sent"] for state in handler.states)  # none where one process trains alone
accelerator.print(f"accuracy {accuracy:.3f} after {sent / 1e6:.1f} MB sent by each process")
accelerator.end_training()
