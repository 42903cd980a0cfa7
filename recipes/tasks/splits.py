"""Splits and parts of labelled data that are the same in every run and on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.tasks.sources import DataError


def stratified(labels: NDArray[np.integer], count: int | None, setting: str) -> NDArray[np.int64]:
    """Indices of ``count`` samples with the classes in proportion, the same in every run; None: all, in order.

    Raises:
        DataError: more than there are, or none; ``setting`` is the name in the message.
    """
    if count is None:
        return np.arange(len(labels))
    if not 1 <= count <= len(labels):
        raise DataError(f"{setting}={count} is out of range: 1 to {len(labels)}")
    shuffled = np.random.default_rng(0).permutation(len(labels))
    place = np.empty(len(labels))  # of each sample inside its class, as a fraction
    for label in np.unique(labels):
        rows = shuffled[labels[shuffled] == label]
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.sort(shuffled[np.argsort(place[shuffled], kind="stable")][:count])


def split(labels: NDArray[np.integer], test_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of a stratified training and test part, both sorted.

    Raises:
        DataError: a fraction that leaves one of them empty.
    """
    count = round(test_fraction * len(labels))
    if not 1 <= count < len(labels):
        raise DataError(
            f"data.test_fraction={test_fraction} takes {count} of {len(labels)} samples; both parts need some"
        )
    test = stratified(labels, count, "data.test_fraction")
    return np.setdiff1d(np.arange(len(labels)), test, assume_unique=True), test
