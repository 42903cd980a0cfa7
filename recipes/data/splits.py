"""Splits and parts of labelled data that are the same in every run and on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recipes.errors import RecipeError


def stratified(labels: NDArray[np.integer], count: int | None, setting: str) -> NDArray[np.int64]:
    """Sorted indices of a part in which all classes have the proportions of the whole; the same in every run.

    Args:
        labels: class of each sample, (N,).
        count: number of samples in the part, 1 to N; None: all samples, in their order.
        setting: name of the setting that gave the count, for errors.
    """
    if count is None:
        return np.arange(len(labels))
    if not 1 <= count <= len(labels):
        raise RecipeError(f"{setting}={count} is out of range: 1 to {len(labels)}")
    shuffled = np.random.default_rng(0).permutation(len(labels))
    place = np.empty(len(labels))  # of each sample inside its class, as a fraction
    for label in np.unique(labels):
        rows = shuffled[labels[shuffled] == label]
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.sort(shuffled[np.argsort(place[shuffled], kind="stable")][:count])


def split(labels: NDArray[np.integer], test_fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted indices of a stratified training part, and of the test part, which has this fraction of the samples."""
    count = round(test_fraction * len(labels))
    if not 1 <= count < len(labels):
        raise RecipeError(
            f"data.test_fraction={test_fraction} takes {count} of {len(labels)} samples for the test part; the test "
            "part and the training part need at least one sample each"
        )
    test = stratified(labels, count, "data.test_fraction")
    return np.setdiff1d(np.arange(len(labels)), test, assume_unique=True), test
