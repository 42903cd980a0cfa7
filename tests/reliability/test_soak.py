"""Many steps of several models under random load: equal bits on all ranks, and no more memory, threads or files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reliability.knobs import SEED, SOAK_STEPS
from tests.reliability.pool import Pool
from tests.reliability.soak import HELD, HOOKS, LOCAL, REDUCTIONS, SoakRank

RANKS = 4
#: Steps after which hashes are compared.
COMPARED_EVERY = 100
#: What each model with a hook may leave behind after the first quarter of the steps, with everything closed.
#: Plain DDP leaves 0.004 MiB of heap behind, and two process groups as much.
MOST_PER_MODEL = {"memory": 0.25, "heap": 0.05, "threads": 0.1, "files": 0.1}
#: By how much threads and open files may differ, once everything is closed, from those after the warm-up.
MOST_LEFT = 2


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(SoakRank, RANKS, tmp_path, 60.0)
    yield made
    made.close()


def called(pool: Pool, name: str, within_s: float, **arguments: Any) -> list[Any]:
    """What a method gives on all ranks."""
    values = []
    for answer in pool.call([(name, arguments)] * RANKS, within_s=within_s):
        assert answer is not None
        assert not answer.error, answer.trace
        values.append(answer.value)
    return values


def soaked(pool: Pool, steps: int, compared_every: int) -> tuple[dict[str, list[float]], set[str]]:
    """Soak; the most that a rank holds after each comparison, with everything closed, and what was compared."""
    held: dict[str, list[float]] = {name: [] for name in (*MOST_PER_MODEL, "made")}
    names: set[str] = set()
    for first in range(0, steps, compared_every):
        called(pool, "soak", 600, seed=SEED, first=first, steps=min(compared_every, steps - first))
        values = called(pool, "close", 60)
        for value in values:
            assert not any(value[kind.__name__] for kind in HELD), value
            assert value["compared"] == values[0]["compared"], f"ranks differ after step {first}"
        names |= {name for name, _ in values[0]["compared"]}
        for name in held:
            held[name].append(max(value[name] for value in values))
    return held, names


def check_left(value: dict[str, Any], before: dict[str, float]) -> None:
    """With everything closed, a rank holds what it held after the warm-up, and no object of a hook is alive."""
    for name in ("threads", "files"):
        assert abs(value[name] - before[name]) <= MOST_LEFT, (name, value[name], before[name])
    assert not any(value[kind.__name__] for kind in HELD), {kind.__name__: value[kind.__name__] for kind in HELD}


@pytest.mark.reliability
@pytest.mark.timeout(24 * 3600)
def test_a_long_run_keeps_bits_equal_and_holds_no_more_than_before(pool: Pool) -> None:
    before = called(pool, "warm_up", 900)
    held, names = soaked(pool, SOAK_STEPS, COMPARED_EVERY)
    if SOAK_STEPS >= 500:  # every hook and all local steps have had their turn
        assert names >= {f"hook {number}" for number in range(len(HOOKS))}
        assert names >= {f"local {number}" for number in range(len(LOCAL))}
        assert names >= {f"mean {number}" for number in range(len(REDUCTIONS))}
    for first, last in zip(before, called(pool, "close", 120), strict=True):
        check_left(last, first)
    made = np.array(held.pop("made"))
    late = made >= made[-1] / 4
    for name, values in held.items():
        slope = float(np.polyfit(made[late], np.array(values)[late], 1)[0]) if late.sum() > 4 else 0.0
        print(f"{name}: {values[0]:.0f} to {values[-1]:.0f}, {slope:+.4f} per model with a hook")
        assert slope <= MOST_PER_MODEL[name], (name, values)


@pytest.mark.slow
def test_few_steps_keep_bits_equal_and_hold_nothing_at_the_end(pool: Pool) -> None:
    _, names = soaked(pool, 4, 2)
    assert names >= {"hook 0", "hook 1", "hook 2", "hook 3", "local 0", "local 1"}, names
