"""Ids in a fixed range from the values of a click log, so that the network's shape does not depend on the data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.data.click_lines import MISSING
from recipes.data.criteo import NUMERICAL, ClickLog

#: Number of classes into which the values of a numerical field fall; with fewer buckets the classes wrap around.
NUMBER_CLASSES = 928


def field_ids(log: ClickLog, buckets: int) -> NDArray[np.int32]:
    """The ids of a log: 13 numerical fields, then 26 categorical fields.

    Each field has buckets of its own. In a field of c different values, a value shares its bucket with no other value
    with probability about exp(-c / buckets). Values that share a bucket are the same to the network.

    Args:
        log: the log, with N rows.
        buckets: number of buckets of each field.

    Returns:
        Ids, int32 (N, 39), each 0 to ``buckets`` - 1.
    """
    numbers = number_classes(log.numerical) % buckets
    fields = np.arange(NUMERICAL, NUMERICAL + log.categorical.shape[1], dtype=np.uint64)
    # The field is part of what is hashed, so that values which collide in one field are apart in the others.
    categories = mixed(log.categorical | (fields << np.uint64(32))) % np.uint64(buckets)
    return np.concatenate([numbers.astype(np.int32), categories.astype(np.int32)], axis=1)


def number_classes(numbers: NDArray[np.int32]) -> NDArray[np.int64]:
    """Classes of numbers, 0 to `NUMBER_CLASSES` - 1.

    A missing number and each of -2 to 2 has a class of its own. Above 2 the class follows from floor(ln(x)^2), and
    below -2 from floor(ln(-x)^2), in classes of their own. Counts are heavy-tailed: the squared logarithm keeps small
    counts apart and joins large ones.

    Args:
        numbers: int32 of any shape.

    Returns:
        Classes, int64 of the same shape.
    """
    wide = numbers.astype(np.int64)
    size = np.maximum(np.abs(wide), 2)
    squared = np.floor(np.log(size) ** 2).astype(np.int64)  # from 1 for 3 to 461 for 2^31
    classes = np.where(wide > 2, 5 + squared, 466 + squared)
    classes = np.where(size > 2, classes, wide + 3)
    return np.where(numbers == MISSING, 0, classes)


def mixed(counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers whose values look random: SplitMix64's output after one step from each number.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = counters + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
