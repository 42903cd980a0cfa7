"""Virtual ranks as a user calls them."""

from __future__ import annotations

import pytest
import torch

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.simulate import average, relative_error


def test_every_virtual_rank_gets_the_same_mean_and_gradients_stay_as_they_are() -> None:
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    before = [one.clone() for one in gradients]
    results = average(gradients, preset="gqsgd_4bit", block_size=64)
    assert all(torch.equal(one, results[0]) for one in results)
    assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))
    assert 0.05 < relative_error(results[0], gradients) < 0.2
    assert not torch.equal(results[0], average(gradients, preset="gqsgd_4bit", block_size=64, step=1)[0])


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ([], "give one flat tensor per rank"),
        ([torch.ones(3, dtype=torch.int32)], "the gradient of rank 0 has dtype torch.int32"),
        ([torch.ones(2, 2)], "give flat tensors"),
        ([torch.ones(3), torch.ones(4)], r"rank 1 is \(4,\) torch.float32"),
        ([torch.ones(3), torch.ones(3, dtype=torch.float64)], "rank 1 is .* torch.float64"),
    ],
)
def test_gradients_that_cannot_work(gradients: list[torch.Tensor], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        average(gradients)
