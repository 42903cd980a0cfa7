"""Sentences of docs/systems.md that no other test holds: formulas of DGD-DEF, FedVote, DPSVRG and lossless means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.cli.facts import facts_at
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.research.experiments import voting
from lightning_gqsgd.research.experiments.optimizing import SIGN
from lightning_gqsgd.research.optim import soft_threshold
from lightning_gqsgd.research.simulation import VirtualRanks, average
from lightning_gqsgd.research.simulation.gossip import DPSVRG, DSPG
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LeastSquares
from lightning_gqsgd.research.simulation.shifted import DGDDEF
from lightning_gqsgd.research.simulation.subspaces import SubspaceRanks
from lightning_gqsgd.research.simulation.votes import FedVote
from lightning_gqsgd.research.systems import SYSTEMS


@pytest.mark.parametrize("bits", [2, 4])
def test_the_mean_of_shifted_points_moves_by_the_mean_gradient_whatever_the_code(bits: int) -> None:
    """z_i = x - η e_i of three workers, whose gradients are taken there."""
    problem = LeastSquares(dimension=64, rows=300, parts=3, spread=1.0, noise=0.0, dtype=torch.float64)
    lr = 0.2
    fields: dict[str, Any] = {**SYSTEMS["dgd_def"].fields, "bits": bits}
    ranks = VirtualRanks(3, problem.segments, torch.float64, **fields)
    x = problem.start()
    z = x.expand(3, -1)
    for step in range(5):
        gradients = problem.gradients(z, step, 3)
        expected = z.mean(0) - lr * gradients.mean(0)
        x = x - lr * ranks.mean(list(gradients), step)
        z = x - lr * ranks.errors()
        assert z.mean(0) == pytest.approx(expected, abs=1e-9)
    assert torch.from_numpy(DGDDEF(3, lr).run(problem, 5, **fields).parameters) == pytest.approx(x)


def test_in_subspaces_as_well_the_shifted_point_of_one_worker_is_gradient_descent_itself() -> None:
    problem = LeastSquares(dimension=64, rows=300, noise=0.0, dtype=torch.float64)
    lr = 0.2
    z = problem.start()
    for step in range(5):
        z = z - lr * problem.gradients(z, step, 1)[0]
    ranks = SubspaceRanks(1, 64, 0.5, torch.float64, True, **SIGN)
    x = problem.start()
    for step in range(5):
        x = x - lr * ranks.mean(list(problem.gradients(x - lr * ranks.errors(), step, 1)), step)
    assert (x - lr * ranks.errors()[0]) == pytest.approx(z)
    run = DGDDEF(1, lr, share=0.5).run(problem, 5, **{**SYSTEMS["dgd_def"].fields, **SIGN})
    assert torch.from_numpy(run.parameters) == pytest.approx(x)


class OneStep(DigitsMLP):
    """A problem of one voted weight matrix, whose gradients are zero: votes alone change it."""

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        return torch.zeros(workers, len(self.start()))


def test_votes_are_unbiased_and_the_margin_keeps_latent_numbers_finite() -> None:
    problem = OneStep(hidden=64)
    numel = problem.segments[0].numel
    start = problem.start()[:numel]
    votes = torch.stack(
        [
            torch.from_numpy(FedVote(4, seed=seed, local_steps=1).run(problem, 1).parameters)[:numel]
            for seed in range(40)
        ]
    )
    z = (votes.mean(0) - start) * math.sqrt(40 * 4) / (1 - start.square()).sqrt()
    assert abs(float(z.mean())) * math.sqrt(numel) < 4
    assert 0.95 < float(z.std()) < 1.05
    assert set(votes.unique().tolist()) == {-1.0, -0.5, 0.0, 0.5, 1.0}
    assert math.isfinite(FedVote(1, local_steps=1).run(problem, 3).last())


def test_another_seed_gives_other_votes() -> None:
    problem = OneStep(hidden=64)
    first, second = (FedVote(2, seed=seed, local_steps=1).run(problem, 1).parameters for seed in (0, 1))
    assert (first != second).any()


def test_reputations_are_those_of_the_formula() -> None:
    """Of three workers, one of which sends the opposite of each vote: r <- r/2 + c/2 from 1/2, and the one below the
    mean has no weight."""
    problem = OneStep(hidden=64)
    numel = problem.segments[0].numel
    voter = FedVote(3, reputations=True, attackers=1, local_steps=1)
    found = torch.from_numpy(voter.run(problem, 1).parameters)[:numel]
    votes = voter._votes(problem.start()[:numel].expand(3, -1), 0)
    agreement = (votes == votes.sum(0).sign()).double().mean(1)
    reputations = 0.25 + agreement / 2
    weights = torch.where(reputations < reputations.mean(), 0.0, reputations)
    weights /= weights.sum()
    assert 0 < int((weights == 0).sum()) < 3
    assert found == pytest.approx((weights.float() @ votes).clamp(-1, 1), abs=1e-5)


def test_rounds_of_gossip_grow_within_a_stage_up_to_a_limit() -> None:
    problem, _, smoothness = voting.lasso()
    run = DPSVRG(0.1 / smoothness, first=10, growth=1.1, most_rounds=4).run(problem, Graph.ring(8), 4)
    assert run.rounds[:3] == [0, 1 + 2 + 3 + 4 * 7, 2 * (1 + 2 + 3 + 4 * 7) + 4]


def test_a_step_of_dspg_is_a_proximal_step_that_falls_with_the_root_of_time() -> None:
    problem, _, smoothness = voting.lasso()
    lr = 0.3 / smoothness
    alone = DSPG(lr, 2.0).run(problem, Graph.ring(8), 2 * problem.batch_share)
    graph = Graph.ring(8)
    x = problem.whole.start().repeat(8, 1)
    for step in range(2):
        length = lr / math.sqrt(1 + step / 2)
        x = soft_threshold(graph.mix(x - length * problem.batches.gradients(x, step, 8)), length * problem.l1)
    assert alone.models == pytest.approx(x)


@pytest.mark.parametrize("ranks", [4, 16])
def test_lossless_means_are_closer_than_sums_that_are_rounded_after_each_addition(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(4096, generator=generator).bfloat16() for _ in range(ranks)]
    exact = torch.stack([gradient.double() for gradient in gradients]).mean(0)
    total = gradients[0]
    for gradient in gradients[1:]:
        total = total + gradient
    added = float(((total / ranks).double() - exact).norm())
    found = float((average(gradients, reducer="lossless")[0].double() - exact).norm())
    assert found < 0.8 * added


@pytest.mark.parametrize("preset", [name for name in FIXED if FIXED[name].config.remembers])
def test_a_preset_remembers_as_many_numbers_as_the_table_says(preset: str) -> None:
    ranks, numel = 4, 1 << 15
    virtual = VirtualRanks(ranks, [Segment(0, numel, raw=False)], preset=preset)
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    virtual.mean(gradients, 0)
    kept = sum(tensor.numel() for store in virtual.stores for tensor in store._tensors.values())
    assert kept / ranks / numel == pytest.approx(sum(facts_at(preset, ranks).state.values()))
