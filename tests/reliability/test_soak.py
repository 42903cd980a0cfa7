"""Many steps of several models under random load: equal bits on all ranks, and no more memory, threads or files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.knobs import SEED, SOAK_STEPS
from tests.reliability.pool import Pool
from tests.reliability.soak import SoakRank

RANKS = 3
#: Steps after which parameters are compared.
COMPARED_EVERY = 100
#: What the second half of the steps may add, in units of the first compared value of that half.
MOST_GROWTH = {"memory": 0.05, "threads": 0.25, "files": 0.25}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(SoakRank, RANKS, tmp_path, 60.0)
    yield made
    made.close()


def soaked(pool: Pool, steps: int, compared_every: int) -> dict[str, list[float]]:
    """Soak; what rank 0 holds after each comparison."""
    held: dict[str, list[float]] = {name: [] for name in MOST_GROWTH}
    for first in range(0, steps, compared_every):
        arguments = {"seed": SEED, "first": first, "steps": min(compared_every, steps - first)}
        answers = pool.call([("soak", arguments)] * RANKS, within_s=600)
        for answer in answers:
            assert answer is not None
            assert not answer.error, answer.trace
            assert answer.value["bits"] == answers[0].value["bits"], f"ranks differ after step {first}"  # type: ignore[union-attr]
        for name in held:
            held[name].append(max(answer.value[name] for answer in answers if answer is not None))
    return held


@pytest.mark.reliability
@pytest.mark.timeout(24 * 3600)
def test_a_long_run_keeps_bits_equal_and_holds_no_more_than_before(pool: Pool) -> None:
    for answer in pool.call([("warm_up", {})] * RANKS, within_s=900):
        assert answer is not None
        assert not answer.error, answer.trace
    held = soaked(pool, SOAK_STEPS, COMPARED_EVERY)
    for name, values in held.items():
        half = np.array(values[len(values) // 2 :])
        slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) if len(half) > 1 else 0.0
        print(f"{name}: {values[0]:.0f} to {values[-1]:.0f}, {slope:+.3f} per {COMPARED_EVERY} steps")
        assert slope * len(half) <= MOST_GROWTH[name] * half[0], (name, values)
