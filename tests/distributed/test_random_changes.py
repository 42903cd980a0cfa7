"""After random changes to a model, ranks have equal bits, or all of them have an error; 30 sequences.

`tests/reliability/test_random_changes.py` makes 300.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.random_changes import FRAMEWORKS, sequences
from tests.distributed.ranks import run, run_alike
from tests.integrations.changed_fits import fits

#: DistributedDataParallel always, the frameworks around it as slow tests.
SOME = [pytest.param(name, marks=[] if name == "ddp" else pytest.mark.slow) for name in FRAMEWORKS]


@pytest.mark.parametrize("framework", SOME)
def test_ranks_agree_whatever_is_changed(tmp_path: Path, framework: str) -> None:
    first, second = run(sequences, 2, tmp_path, framework, range(9), initialise=framework == "ddp")
    for one, other in zip(first, second, strict=True):
        # What differs first, alone: a whole sequence is too long for a message.
        assert [pair for pair in zip(one, other, strict=False) if len(set(pair)) > 1][:1] == []
    assert first == second
    endings = [seen[-1] for seen in first]
    assert not any(ending == "went around: silent" for ending in endings), endings
    assert any(": ConfigError: " in seen for sequence in first for seen in sequence)


@pytest.mark.slow
def test_lightning_wraps_anew_whatever_is_changed(tmp_path: Path) -> None:
    run_alike(fits, 2, tmp_path, range(4), initialise=False)
