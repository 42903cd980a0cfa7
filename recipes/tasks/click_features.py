"""Ids of fixed range from the numbers of a click log: the network's shape does not depend on the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.tasks.criteo import MISSING, NUMERICAL, ClickLog

#: Numbers fall into so many classes; with fewer buckets these wrap around.
NUMBER_CLASSES = 928


def field_ids(log: ClickLog, buckets: int) -> NDArray[np.int32]:
    """Ids (N, 39), each 0 to ``buckets`` - 1: 13 numerical fields, then 26 categorical ones.

    Each field has buckets of its own. In a field of c different values, a value has one of its own with probability
    about exp(-c / buckets); those that share one are the same to the network.
    """
    numbers = number_classes(log.numerical) % buckets
    fields = np.arange(NUMERICAL, NUMERICAL + log.categorical.shape[1], dtype=np.uint64)
    # The field is part of what is hashed: ids that collide in one field are apart in the others.
    categories = mixed(log.categorical | (fields << np.uint64(32))) % np.uint64(buckets)
    return np.concatenate([numbers.astype(np.int32), categories.astype(np.int32)], axis=1)


def number_classes(numbers: NDArray[np.int32]) -> NDArray[np.int64]:
    """Classes 0 to `NUMBER_CLASSES` - 1: missing; each of -2 to 2; floor(ln(x)^2) above, and apart from it below.

    Counts are heavy-tailed: the squared logarithm keeps small ones apart and joins large ones.
    """
    wide = numbers.astype(np.int64)
    size = np.maximum(np.abs(wide), 2)
    squared = np.floor(np.log(size) ** 2).astype(np.int64)  # 1 for 3, 461 for 2^31
    classes = np.where(wide > 2, 5 + squared, 466 + squared)
    classes = np.where(size > 2, classes, wide + 3)
    return np.where(numbers == MISSING, 0, classes)


def mixed(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers whose values look random: SplitMix64's, of its state after one step."""
    z = counters + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
