"""Systems written down once more, in NumPy and from their papers alone, beside what the package computes."""

from __future__ import annotations

import numpy as np
import torch

from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks

#: One block, so that there is one scale.
NUMEL = 512


def scaled_signs(x: np.ndarray) -> np.ndarray:
    """C(x) = |x|_1/d sign(x)."""
    return np.abs(x).mean() * np.sign(x)


def test_cd_adam_sends_and_steps_as_its_algorithm_says() -> None:
    """Algorithm 1 of arXiv 2111.00705, 4 workers: signs of differences travel both ways, and all make an AMSGrad step
    along the gradient that they have in common. The package's scales have 21 bits at fp64, rounded up."""
    workers, lr, first, second, eps = 4, 0.01, 0.9, 0.99, 1e-8
    random = np.random.default_rng(0)
    optima = random.standard_normal((workers, NUMEL))
    curvature = random.uniform(0.1, 1, NUMEL)

    x = torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64))
    ranks = VirtualRanks(workers, [Segment(0, NUMEL, False)], torch.float64, "cd_adam", block_size=NUMEL)
    optimizer = torch.optim.Adam([x], lr=lr, betas=(first, second), eps=eps, amsgrad=True)

    point, moment, square, largest = (np.zeros(NUMEL) for _ in range(4))
    sent, mean, common = np.zeros((workers, NUMEL)), np.zeros(NUMEL), np.zeros(NUMEL)
    for step in range(1, 31):
        differences = [
            scaled_signs(curvature * (point - optimum) - own) for optimum, own in zip(optima, sent, strict=True)
        ]
        sent += differences
        mean += np.mean(differences, axis=0)
        common = common + scaled_signs(mean - common)
        moment = first * moment + (1 - first) * common
        square = second * square + (1 - second) * common**2
        largest = np.maximum(largest, square)
        point = point - lr / (1 - first**step) * moment / (np.sqrt(largest / (1 - second**step)) + eps)

        here = x.detach().numpy()
        gradients = [torch.from_numpy(curvature * (here - optimum)) for optimum in optima]
        x.grad = ranks.mean(gradients, step)
        optimizer.step()
        np.testing.assert_allclose(x.grad.numpy(), common, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(x.detach().numpy(), point, rtol=1e-4, atol=1e-4)
    assert np.linalg.norm(common - mean) < np.linalg.norm(mean)  # what all have in common follows the mean


def test_errors_of_top_k_are_those_of_steps_while_the_learning_rate_is_constant() -> None:
    """Algorithm 1 of arXiv 1809.07599 remembers errors of steps: x <- x - top_k(m + η g), and m keeps what is left out.
    When η falls to a tenth, the package's errors, which are those of gradients, fall with it; those of the paper do
    not."""
    kept, steps, constant = 26, 20, 15
    random = np.random.default_rng(0)
    rank = VirtualRanks(1, [Segment(0, NUMEL, False)], torch.float64, "topk_ef", density=0.05, block_size=NUMEL)

    def largest(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) >= np.sort(np.abs(x))[-kept], x, 0)

    def moves(memory: np.ndarray, scaled: bool) -> tuple[np.ndarray, np.ndarray]:
        """A move of the model, and the memory after it, at the learning rate of this step."""
        wanted = (lr / before if scaled else 1) * memory + lr * gradient
        return largest(wanted), wanted - largest(wanted)

    papers, own = np.zeros(NUMEL), np.zeros(NUMEL)
    before = 0.1
    for step in range(steps):
        lr = 0.1 if step < constant else 0.01
        gradient = random.standard_normal(NUMEL)
        found = lr * rank.mean([torch.from_numpy(gradient)], step).numpy()
        of_paper, papers = moves(papers, scaled=False)
        expected, own = moves(own, scaled=True)
        before = lr
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        assert np.allclose(found, of_paper) == (step < constant)


def test_natural_compression_rounds_up_as_often_as_its_mantissa_says() -> None:
    """Definition 1 of arXiv 1905.10988: |t| goes to 2^a or 2^(a+1), up with probability |t|/2^a - 1. With 64 numbers of
    20,000 draws each, no count is 4.5 standard deviations off."""
    numbers, draws = 64, 20_000
    exponents = np.arange(numbers) % 8 - 4
    mantissas = 1 + np.arange(1, numbers + 1) / (numbers + 1)
    signs = np.where(np.arange(numbers) % 3, 1.0, -1.0)
    x = torch.from_numpy(np.tile(signs * mantissas * 2.0**exponents, draws)).float()
    rank = VirtualRanks(1, [Segment(0, len(x), False)], torch.float32, "natural_compression", reducer="gather")
    found = rank.mean([x], 0).numpy().reshape(draws, numbers) * signs / 2.0**exponents
    assert set(np.unique(found).tolist()) == {1.0, 2.0}
    ups = (found == 2).sum(0)
    chances = mantissas - 1
    z = (ups - draws * chances) / np.sqrt(draws * chances * (1 - chances))
    assert np.abs(z).max() < 4.5
    assert 0.7 < z.std() < 1.3
