"""PULSE between processes: one rank trains in fp32, the others have its weights in bf16 after every step."""

from __future__ import annotations

import torch

from lightning_gqsgd.research.patches import Receiver, Sender, broadcast
from tests.bits import bits_of
from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import on_ranks

STEPS = 6


@on_ranks(3)
def test_all_ranks_have_the_same_hash_after_every_step_and_patches_are_small(rank: int) -> tuple[list[str], list[int]]:
    """The hash of the weights after each step, and the bytes of each message."""
    model = mlp()
    if rank:
        torch.nn.init.zeros_(model[0].weight)
        model = model.bfloat16()
    end = Receiver(model.parameters()) if rank else Sender(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    hashes, sent = [], []
    for step in range(STEPS):
        if not rank:
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        sent.append(broadcast(end))
        hashes.append(bits_of(parameter.bfloat16() for parameter in model.parameters()))
    assert len(set(hashes)) == STEPS
    whole, *patches = sent
    assert max(patches) < whole / 10
    return hashes, sent
