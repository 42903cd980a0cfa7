"""Clicks drawn from a known model, in the shape of Criteo's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.data.click_lines import MISSING
from recipes.data.criteo import CATEGORICAL, FIELDS, NUMERICAL, ClickLog

ROWS = 20_480
FACTORS = 4

#: AUC of the true probabilities over all rows: no model has a higher AUC, up to chance.
TRUE_AUC = 0.807


def synthetic_clicks() -> tuple[ClickLog, NDArray[np.float64]]:
    """Clicks of a hidden factorisation machine, the same in every call, and the probability of a click in each row.

    The log-odds of a row are the sum of one weight for each value, and of the products of the vectors of all pairs of
    values. Categories are Zipf-distributed over 3 to 3,000 values, as most of Criteo's are. Numbers are counts, a tenth
    of which is missing.
    """
    rng = np.random.default_rng(0)
    sizes = np.geomspace(3, 3000, CATEGORICAL).astype(int)
    categorical = np.stack([_zipf(rng, size) for size in sizes], axis=1)
    counts = np.floor(rng.lognormal(1.5, 1.5, (ROWS, NUMERICAL))).clip(0, 10_000)
    levels = np.floor(np.log2(1 + counts)).astype(np.int64)  # 0 to 13: all that the model sees of a count
    absent = rng.random(counts.shape) < 0.1
    levels[absent] = 14
    linear, vectors = np.zeros(ROWS), []
    for column in (*levels.T, *categorical.T):
        size = column.max() + 1
        linear += rng.normal(size=size)[column]
        vectors.append(rng.normal(size=(size, FACTORS))[column])
    total = np.sum(vectors, axis=0)
    pairs = 0.5 * (total**2 - np.sum(np.square(vectors), axis=0)).sum(axis=1)
    odds = 1.3 * linear / np.sqrt(FIELDS) + 0.7 * (pairs - pairs.mean()) / pairs.std() - 1.4
    probabilities = 1 / (1 + np.exp(-odds))
    labels = (rng.random(ROWS) < probabilities).astype(np.int8)
    numerical = np.where(absent, MISSING, counts).astype(np.int32)
    return ClickLog(categorical.astype(np.uint32), numerical, labels), probabilities


def _zipf(rng: np.random.Generator, size: int) -> NDArray[np.int64]:
    """Values 0 to ``size`` - 1, one for each row, each with a probability in proportion to 1 / (1 + value)."""
    weights = np.cumsum(1 / np.arange(1, size + 1))
    return np.searchsorted(weights, rng.random(ROWS) * weights[-1], side="right").clip(max=size - 1)
