"""The smallest experiments of rows of tables, with the parts that reduce sparse gradients in training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.reducers import StepKeys, run_virtual
from lightning_gqsgd.reducers.base import Steps
from lightning_gqsgd.research.experiments.rows import Row
from lightning_gqsgd.sparse import row_numbers
from lightning_gqsgd.sparse.gathering import all_gathered, gathered_mean
from lightning_gqsgd.sparse.rows import rows_for
from lightning_gqsgd.sparse.sketching import places_of, sketch_of, sketched_mean
from lightning_gqsgd.sparse.tables import Table, Touched, sparse_rows
from lightning_gqsgd.wire.telemetry import BucketCounters


def gathered(touched: Sequence[Touched], height: int, step: int = 0, number: int = 3, **fields: Any) -> list[Touched]:
    """Returns the mean of virtual ranks' rows, as computed by each rank.

    Args:
        touched: the rows of each rank.
        height: number of rows of the table.
        step: number of the dither.
        number: number of the table's parameter.
        **fields: fields of `GQSGDConfig`.
    """
    ranks = len(touched)
    dtype = touched[0].values.dtype
    config = resolve(GQSGDConfig(**{"min_numel": 0, "sparse": "gather", **fields}), ranks)
    table = Table(number, height, touched[0].values.shape[1], False)
    keys = StepKeys.of(config.seed, step, ranks)
    results: dict[int, Touched] = {}

    def steps(rank: int) -> Steps:
        rows = rows_for(table, config, dtype, keys, compressed=True)
        numbers = row_numbers.write(touched[rank].rows.numpy())
        mine = Touched(touched[rank].rows, touched[rank].values.clone())
        counters = BucketCounters()
        lengths = yield from all_gathered(torch.tensor([len(mine.rows), len(numbers)]), ranks, counters)
        results[rank] = yield from gathered_mean(table, mine, numbers, lengths, rows, rank, counters)
        return 0

    run_virtual([steps(rank) for rank in range(ranks)])
    return [results[rank] for rank in range(ranks)]


def sketched(touched: Sequence[Touched], height: int) -> list[Touched]:
    """Returns the mean of virtual ranks' rows by sketches, as computed by each rank; see `gathered`."""
    ranks = len(touched)
    table = Table(3, height, touched[0].values.shape[1], False)
    key = StepKeys.of(resolve(GQSGDConfig(sparse="sketch"), ranks).seed, 0, ranks).rotation
    results: dict[int, Touched] = {}
    bad = sum(int((~values.isfinite()).any(dim=1).sum()) for _, values in touched)

    def steps(rank: int) -> Steps:
        results[rank] = yield from sketched_mean(table, touched[rank], bad, key, ranks, BucketCounters())
        return 0

    run_virtual([steps(rank) for rank in range(ranks)])
    return [results[rank] for rank in range(ranks)]


def some_rows(seed: int, count: int = 30, height: int = 100, width: int = 10, dtype: Any = torch.float32) -> Touched:
    """Returns ``count`` random rows of a table, with normal values."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(height, generator=generator)[:count].sort().values
    return Touched(rows, torch.randn(count, width, generator=generator).to(dtype))


def exact_mean(touched: Sequence[Touched], height: int) -> Tensor:
    """Returns the mean of all ranks' rows as a dense table, fp64 [height, width]."""
    total = torch.zeros(height, touched[0].values.shape[1], dtype=torch.float64)
    for rows, values in touched:
        total[rows] += values.double() / len(touched)
    return total


def dense(mean: Touched, height: int) -> Tensor:
    """Returns rows as a dense table, fp64 [height, width]."""
    total = torch.zeros(height, mean.values.shape[1], dtype=torch.float64)
    total[mean.rows] = mean.values.double()
    return total


class SparseRows:
    """Logistic regression on samples that have 60 of 20,000 features, with labels from a hidden vector."""

    features = 20_000
    per_sample = 60

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randint(0, self.features, (4000, self.per_sample), generator=generator)
        hidden = torch.randn(self.features, generator=generator)
        self.labels = (hidden[self.samples].sum(1) > 0).float() * 2 - 1

    def gradient(self, x: Tensor, chosen: Tensor) -> Touched:
        """Returns the touched rows of the gradient of some samples."""
        samples = self.samples[chosen]
        labels = self.labels[chosen]
        slopes = -labels * torch.sigmoid(-labels * x[samples].sum(1)) / len(chosen)
        values = slopes.repeat_interleave(self.per_sample)[:, None]
        made = sparse_rows(samples.flatten(), values, self.features).coalesce()
        return Touched(made.indices()[0], made.values())

    def loss(self, x: Tensor) -> float:
        """Returns the mean loss of all samples."""
        return torch.nn.functional.softplus(-self.labels * x[self.samples].sum(1)).mean().item()

    def trained(self, **fields: Any) -> float:
        """Returns the loss after 150 steps of Adagrad, batches of 32 on each of 4 workers."""
        x = torch.zeros(self.features)
        squares = torch.full((self.features,), 1e-10)
        generator = torch.Generator().manual_seed(1)
        for step in range(150):
            batches = torch.randint(0, 4000, (4, 32), generator=generator)
            mean = gathered([self.gradient(x, batch) for batch in batches], self.features, step, **fields)[0]
            gradient = mean.values[:, 0]
            squares[mean.rows] += gradient.square()
            x[mean.rows] -= 0.1 * gradient / squares[mean.rows].sqrt()
        return self.loss(x)


def fastsgd() -> Iterator[Row]:
    """FastSGD's signs and powers of a base."""
    touched = some_rows(0, count=500, height=500)
    for mantissa, base in enumerate(("2", "√2")):
        decoded = gathered([touched], 500, sparse="logarithmic", bits=5 + mantissa, mantissa=mantissa)[0].values
        kept = decoded != 0
        ratio = decoded[kept] / touched.values[kept]
        most = 2 ** (0.5 / 2**mantissa)
        yield Row(
            f"base {base}: kept coordinates are off by a factor of at most {most:.3f}",
            f"{float(ratio.min()):.3f} to {float(ratio.max()):.3f}",
            bool((ratio >= 0.999 / most).all() and (ratio <= 1.001 * most).all()),
        )
    problem = SparseRows()
    exact = problem.trained(reducer="native")
    found = problem.trained(sparse="logarithmic", bits=5)
    yield Row("trains as exact rows do, at 5 bits", f"loss {found:.3g}, {exact:.3g}", found < 1.1 * exact)


def median_error(exact: Tensor, rows: Tensor, times: int) -> float:
    """Returns the relative error of the medians that S2 Reducer's paper reads from a sketch of the mean.

    Args:
        exact: the mean of all ranks' rows, [height, 1].
        rows: numbers of the rows that at least one rank has touched.
        times: number of cells of the sketch, divided by the number from which peeling reads rows.
    """
    table = Table(3, len(exact), 1, False)
    places = places_of(table, rows, times * len(rows), StepKeys.of(0, 0, 1).rotation, exact.dtype)
    estimates = sketch_of(exact[rows], places)[places.cells] * places.signs[:, :, None]
    return float((estimates.quantile(0.5, dim=1) - exact[rows]).norm() / exact.norm())


def s2_reducer() -> Iterator[Row]:
    """S2 Reducer's sums of sketches."""
    height = 20_000
    touched = [some_rows(rank, count=200, height=height, width=1) for rank in range(8)]
    exact = exact_mean(touched, height)
    mean = sketched(touched, height)[0]
    error = float((dense(mean, height) - exact).norm() / exact.norm())
    yield Row("the sum of sketches gives the mean to rounding", f"relative error {error:.1g}", error < 1e-5)
    share = (1.6 * len(mean.rows) + 64) / height
    yield Row("a sketch is smaller than the dense gradient", f"{share:.1%} of its rows", share < 0.2)
    few, many = (median_error(exact, mean.rows, times) for times in (1, 16))
    yield Row(
        "the paper's median needs more cells: from as many, most of the mean is lost",
        f"relative error {few:.2f}, from 16 times as many {many:.2f}",
        few > 0.5 > many,
    )
