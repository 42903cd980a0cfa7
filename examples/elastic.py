"""Members that come and go on scikit-learn's digits: each makes as many steps as it can, merged every 2 seconds.

Start `gqsgd lighthouse` on one machine, HOST, first. Then run this command as often as you like, on that machine and on
others, at any time:

TORCHFT_LIGHTHOUSE=HOST:29510 python examples/elastic.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from lightning_gqsgd import LocalSteps

if __name__ == "__main__":
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # With delay=1, training continues during each merge. A process that joins copies the others' model here.
    optimizer = LocalSteps(model, optimizer, every="2s", delay=1, elastic=True)

    known = 0
    while optimizer.samples < 5_000 * 64:  # of all members together
        chosen = torch.randint(0, 1500, (64,))  # each member draws its own, as no seed is set
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.add_samples(64)
        optimizer.step()
        if optimizer.averages.averages > known:
            known = optimizer.averages.averages
            print(f"merge {known}: {optimizer.averages.world_size} members, {optimizer.samples:,} samples")
    optimizer.finish()  # waits for the other members

    accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"{optimizer.report()}\naccuracy {accuracy:.3f}")
    optimizer.close()
