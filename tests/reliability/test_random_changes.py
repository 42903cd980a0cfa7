"""300 sequences of random changes to a model between its steps, under four frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.random_changes import FRAMEWORKS, sequences
from tests.distributed.ranks import run_alike
from tests.integrations.changed_fits import fits
from tests.reliability.knobs import SEED, scaled

pytestmark = pytest.mark.reliability

#: Sequences with each framework that has no Trainer.
COUNT = 90

#: Sequences with Lightning's Trainer.
FITS = 30


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_ranks_agree_whatever_is_changed(tmp_path: Path, framework: str) -> None:
    seeds = range(1000 * SEED + 100, 1000 * SEED + 100 + scaled(COUNT))
    result = run_alike(sequences, 2, tmp_path, framework, seeds, initialise=framework == "ddp", timeout=1800)
    assert not any(seen[-1] == "went around: silent" for seen in result)


@pytest.mark.timeout(1800)
def test_lightning_wraps_anew_whatever_is_changed(tmp_path: Path) -> None:
    seeds = range(1000 * SEED + 100, 1000 * SEED + 100 + scaled(FITS))
    run_alike(fits, 2, tmp_path, seeds, initialise=False, timeout=1800)
