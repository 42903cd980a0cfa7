"""Virtual ranks as a user calls them."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks, average, relative_error, simulate
from lightning_gqsgd.research.simulation.problems import (
    DigitsMLP,
    LeastSquares,
    LogisticRegression,
    Problem,
    Quadratic,
    generator_of,
)
from lightning_gqsgd.research.simulation.record import Record


def test_every_virtual_rank_gets_the_same_mean_and_gradients_stay_as_they_are() -> None:
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    before = [one.clone() for one in gradients]
    results = average(gradients, preset="gqsgd_4bit", block_size=64)
    assert all(torch.equal(one, results[0]) for one in results)
    assert all(torch.equal(one, other) for one, other in zip(gradients, before, strict=True))
    assert 0.05 < relative_error(results[0], gradients) < 0.2
    assert not torch.equal(results[0], average(gradients, preset="gqsgd_4bit", block_size=64, step=1)[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda ranks: pickle.loads(pickle.dumps(ranks))])  # noqa: S301
def test_copies_of_virtual_ranks_give_the_same_mean(copied: Callable[[VirtualRanks], VirtualRanks]) -> None:
    gradients = [torch.linspace(-1, 1 + rank, 3000) for rank in range(2)]
    ranks = VirtualRanks(2, [Segment(0, 3000, raw=False)], bits=4)
    expected = ranks.mean(gradients, 0)
    assert torch.equal(copied(ranks).mean(gradients, 0), expected)


def test_segments_that_do_not_cover_the_gradients_are_refused() -> None:
    gradients = [torch.ones(100)] * 2
    with pytest.raises(ConfigError, match="rank 0 has 100 coordinates, the segments have 64; give segments"):
        average(gradients, segments=[Segment(0, 64, raw=False)])
    with pytest.raises(ConfigError, match="rank 0 has 100 coordinates, the segments have 128"):
        VirtualRanks(2, [Segment(0, 128, raw=False)]).mean(gradients, step=0)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "problem",
    [
        Quadratic(50, spread=1.0),
        LeastSquares(dimension=20, rows=103, parts=3, spread=1.0, regularisation=0.1),
        LogisticRegression(dimension=20, rows=103, parts=3, spread=1.0),
    ],
    ids=["quadratic", "least squares", "logistic"],
)
def test_gradients_of_problems_average_to_the_slope_of_the_loss(problem: Problem, dtype: torch.dtype) -> None:
    problem = dataclasses.replace(problem, dtype=dtype)
    x = problem.start() + 0.1
    x = x.requires_grad_()
    for workers in (1, 4, 10):  # 103 rows: some workers have one more
        gradients = problem.gradients(x.detach(), 0, workers)
        assert gradients.shape == (workers, x.numel())
        assert gradients.dtype == dtype
        if workers > 1:
            assert not torch.allclose(gradients[0], gradients[1], atol=1e-3)
        direction = torch.randn(x.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        precise = dataclasses.replace(problem, dtype=torch.float64)
        if dtype == torch.float64:
            low, high = (precise.loss((x + sign * 1e-5 * direction).detach()) for sign in (-1, 1))
            assert float(gradients.mean(0) @ direction) == pytest.approx((high - low) / 2e-5, rel=1e-5)
            assert problem.metrics(x.detach())["gradient_norm"] == pytest.approx(float(gradients.mean(0).norm()))


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: Quadratic(50, noise=1.0, spread=1.0, seed=seed),
        lambda seed: LeastSquares(dimension=8, rows=40, batch=2, seed=seed),
    ],
)
def test_a_seed_gives_one_set_of_data_and_batches_and_another_seed_gives_another(
    make: Callable[[int], Problem],
) -> None:
    seeds = (0, 1, 2, 2**40 + 1)
    first, again = ([make(seed) for seed in seeds] for _ in range(2))
    x = torch.full_like(first[0].start(), 0.01)
    for step in (0, 3):
        gradients = [problem.gradients(x, step, 2) for problem in first]
        for problem, gradient in zip(again, gradients, strict=True):
            assert torch.equal(problem.gradients(x, step, 2), gradient)
        for number, gradient in enumerate(gradients):
            assert not any(torch.equal(gradient, other) for other in gradients[:number])


def test_uses_and_steps_of_a_seed_have_random_numbers_of_their_own() -> None:
    draws = {float(torch.rand(1, generator=generator_of(7, use, step))) for use in range(3) for step in range(20)}
    assert len(draws) == 60
    assert float(torch.rand(1, generator=generator_of(0, 2, 5))) == float(
        torch.rand(1, generator=generator_of(0, 1, 5))
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_noise_and_spread_of_a_quadratic_have_nothing_to_do_with_its_optimum(seed: int) -> None:
    noisy = Quadratic(5000, condition=1, noise=1.0, seed=seed)
    spread = Quadratic(5000, condition=1, spread=1.0, seed=seed)
    for problem in (noisy, spread):
        away = problem.gradients(problem.optimum, 0, 4)
        for row in away:
            assert abs(float(torch.corrcoef(torch.stack([row, problem.optimum]))[0, 1])) < 0.07


def test_batches_average_to_the_full_gradient_and_depend_on_the_step_only() -> None:
    problem = LeastSquares(dimension=10, rows=51, batch=8, spread=1.0)
    x = torch.ones(10)
    assert torch.equal(problem.gradients(x, 3, 4), problem.gradients(x, 3, 4))
    assert not torch.equal(problem.gradients(x, 3, 4), problem.gradients(x, 4, 4))
    mean = torch.stack([problem.gradients(x, step, 4).mean(0) for step in range(4000)]).mean(0)
    full = dataclasses.replace(problem, batch=None).gradients(x, 0, 4).mean(0)
    assert (mean - full).norm() < 0.03 * full.norm()


@pytest.mark.parametrize("by_label", [False, True])
def test_gradients_of_the_digits_are_those_of_a_module(by_label: bool) -> None:
    pytest.importorskip("sklearn")
    problem = DigitsMLP(batch=1400, hidden=16, by_label=by_label, dtype=torch.float64)
    x = problem.start()
    assert problem.loss(x) == pytest.approx(math.log(10), rel=0.05)
    gradients = problem.gradients(x, 0, 7)
    direction = gradients.mean(0)
    slope = (problem.loss(x + 1e-4 * direction) - problem.loss(x - 1e-4 * direction)) / 2e-4
    assert float(direction @ direction) == pytest.approx(slope, rel=0.1)  # drawn with replacement
    assert [segment.raw for segment in problem.segments] == [False, True, True, True]
    alike = torch.nn.functional.cosine_similarity(gradients[0], gradients[6], dim=0)
    assert alike < 0.3 if by_label else alike > 0.6


@pytest.mark.parametrize("preset", ["ddp", "gqsgd", "ecq_sgd", "artemis", "signsgd_ef", "gqsgd_exponential_tree"])
def test_simulated_training_goes_downhill_and_is_recorded(preset: str) -> None:
    problem = Quadratic(300, condition=10, spread=0.1)
    record = simulate(preset, problem, workers=4, steps=25, lr=0.1, record_every=10, progress=False)
    assert record.step.tolist() == [0, 10, 20, 25]
    assert record.loss[-1] < 0.75 * record.loss[0]
    assert record.diverged_at is None
    assert record.last("distance", 2) == pytest.approx(record.metrics["distance"][-2:].mean())
    assert set(record.metrics) == {"distance", "gradient_norm"}
    assert record.parameters.shape == (300,)
    assert problem.loss(torch.from_numpy(record.parameters)) == record.loss[-1]
    assert record.bytes_sent[0] == 0
    assert (np.diff(record.bytes_sent / record.step.clip(1))[1:] == 0).all()
    assert np.isnan(record.relative_error[0])
    assert (record.relative_error[1:] < (1e-6 if preset == "ddp" else 8)).all()
    assert record.wire_bits[-1] == 32 if preset == "ddp" else record.wire_bits[-1] > 0
    again = simulate(preset, problem, workers=4, steps=25, lr=0.1, record_every=10, progress=False)
    assert np.array_equal(again.loss, record.loss)


def test_uncompressed_training_is_that_of_the_optimizer_alone() -> None:
    problem = Quadratic(40, condition=3, spread=1.0, noise=0.1, dtype=torch.float64)
    record = simulate(
        "ddp", problem, workers=8, steps=30, optimizer=lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True)
    )
    x = problem.start().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.05, amsgrad=True)
    for step in range(30):
        x.grad = problem.gradients(x.detach(), step, 8).mean(0)
        optimizer.step()
    np.testing.assert_allclose(record.parameters, x.detach().numpy(), rtol=1e-12)
    assert record.parameters.dtype == np.float64


def test_a_configuration_is_trained_as_its_fields() -> None:
    config = GQSGDConfig(bits=3)
    found = simulate(config, LeastSquares(dimension=64, rows=100), workers=2, steps=5, progress=False)
    named = simulate("gqsgd", LeastSquares(dimension=64, rows=100), workers=2, steps=5, progress=False, bits=3)
    assert np.array_equal(found.loss, named.loss)
    assert found.name == config.describe()
    gradients = list(torch.randn(2, 300))
    assert torch.equal(average(gradients, preset=config)[0], average(gradients, bits=3)[0])


def test_other_seeds_give_other_dither() -> None:
    runs = [simulate("gqsgd_4bit", Quadratic(300), workers=2, steps=3, seed=seed, progress=False) for seed in (0, 1)]
    assert runs[0].config.seed == 0
    assert runs[1].config.seed == 1
    assert not np.array_equal(runs[0].loss, runs[1].loss)


@pytest.mark.parametrize("reducer", ["gather", "sum"])
def test_a_thousand_workers(reducer: str) -> None:
    bits = {"bits": 8} if reducer == "gather" else {"bits": 5}
    workers = 1024 if reducer == "gather" else 31
    record = simulate(
        "gqsgd", Quadratic(1000, spread=1.0), workers=workers, steps=3, reducer=reducer, progress=False, **bits
    )
    assert (np.diff(record.loss) < 0).all()


def test_a_run_that_diverges_ends_and_says_so() -> None:
    record = simulate("ddp", Quadratic(20), workers=2, steps=1000, lr=50.0, record_every=1, progress=False)
    assert record.diverged_at is not None
    assert record.diverged_at < 100
    assert record.step[-1] == record.diverged_at - 1
    assert np.isfinite(record.loss).all()
    assert record.last() == math.inf
    assert math.isnan(record.last("distance"))


def test_torch_has_its_threads_back() -> None:
    before = torch.get_num_threads()
    simulate("ddp", Quadratic(20), workers=2, steps=1, progress=False)
    assert torch.get_num_threads() == before


def test_a_record_as_table_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    runs = [simulate(preset, Quadratic(20), workers=2, steps=5) for preset in ("ddp", "gqsgd_4bit")]
    columns = ["step", "loss", "distance", "gradient_norm", "bytes_sent", "relative_error", "wire_bits"]
    assert list(runs[0].to_dict()) == columns
    runs[0].plot(tmp_path / "runs.png", runs[1])
    assert (tmp_path / "runs.png").stat().st_size > 10_000
    made = {}
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=made.update))
    runs[0].to_pandas()
    assert list(made) == columns


@pytest.mark.parametrize(
    ("module", "act"),
    [
        ("pandas", lambda record: record.to_pandas()),
        ("matplotlib.figure", lambda record: record.plot("x.png")),
        ("sklearn.datasets", lambda record: DigitsMLP()),
    ],
)
def test_missing_packages_are_named(
    module: str, act: Callable[[Record], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = simulate("ddp", Quadratic(20), workers=2, steps=1, progress=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="pip install"):
        act(record)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"preset": "qsdg"}, r"unknown preset 'qsdg'; did you mean 'qsgd'\? \(presets: ddp, gqsgd"),
        ({"workers": 0}, "workers=0 is out of range: 1 to"),
        ({"steps": 0}, "steps=0 is out of range: 1 to"),
        ({"record_every": 0}, "record_every=0 is out of range: 1 to"),
        ({"lr": 0.1, "optimizer": torch.optim.Adam}, "lr=0.1 is for the default optimizer"),
        ({"bit": 4}, "unknown field 'bit'"),
        ({"problem": LeastSquares(dimension=2, rows=3), "workers": 4}, "workers=4 are more than the 3 rows"),
    ],
)
def test_simulations_that_cannot_work(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(**{"preset": "gqsgd", "problem": Quadratic(20), "workers": 2, "steps": 2, **arguments})


def test_a_loss_that_is_not_finite_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Quadratic(20)
    monkeypatch.setattr(problem, "start", lambda: torch.full((20,), math.inf))
    with pytest.raises(ConfigError, match="not finite before training"):
        simulate("ddp", problem, workers=2, steps=2)


def test_problems_that_cannot_work() -> None:
    with pytest.raises(ConfigError, match="condition=0.5 must be a finite number of at least 1"):
        Quadratic(condition=0.5)
    with pytest.raises(ConfigError, match="batch=-1 must be a finite number of at least 1"):
        LeastSquares(batch=-1)
