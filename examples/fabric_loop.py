"""A custom loop with Lightning Fabric, on scikit-learn's digits.

python examples/fabric_loop.py
"""

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    fabric = Fabric(strategy="gqsgd_4bit", accelerator="cpu", devices=2)
    fabric.launch()
    fabric.seed_everything(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    train = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train = fabric.setup_dataloaders(train)

    for epoch in range(5):
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        fabric.print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}")
