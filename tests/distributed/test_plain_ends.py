"""Plain DDP gives the hook its place back when steps become longer, and takes it again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gqsgd.adaptive import clock as clock_module
from lightning_gqsgd.adaptive import steering as steering_module
from tests.distributed.models import fingerprint, train, wrapped
from tests.distributed.ranks import run
from tests.distributed.test_plain import carrier

#: The step from which steps are longer.
LONGER_FROM = 120


def _slower(rank: int) -> dict[str, Any]:
    """A whole run: a trial, plain DDP, steps that become longer, and another trial.

    A clock that is made up says how long steps take, so that other programs of the machine decide nothing."""
    now = {"s": 0.0}
    for module in (clock_module, steering_module):
        module.time = SimpleNamespace(perf_counter=lambda: now["s"])
    model, state = wrapped({}, {"auto": True, "allow": (32, 16)})

    def pass_time(*_: object) -> None:
        seconds = 0.03 if state.step >= LONGER_FROM else 0.004
        now["s"] += seconds * (1 + 0.01 * rank) * (2 if state.config.num_bits == 16 else 1)

    model.module.register_forward_pre_hook(pass_time)
    carriers, decisions = [], []
    for step in range(2 * LONGER_FROM):
        train(model, rank, range(step, step + 1))
        carriers.append(carrier(model))
        decisions.append(len(state.decisions))
    facts = {"carriers": carriers, "decisions": decisions, "reasons": [row.reason for row in state.decisions]}
    state.close()
    return {**facts, "bits": fingerprint(model)}


@pytest.mark.slow
def test_ranks_go_there_and_back_together_when_steps_become_longer(tmp_path: Path) -> None:
    results = run(_slower, 3, tmp_path)
    assert results[0] == results[1] == results[2]
    first, second = results[0]["reasons"]
    assert first.endswith("plain DDP takes over")
    # Between them may be that 16 bits were not tried: the probe takes real time, and what it measures decides that.
    assert second.startswith("steps became 650% longer; it is the shortest")
    assert second.endswith("plain DDP takes over")
    carriers = results[0]["carriers"]
    assert set(carriers[LONGER_FROM - 10 : LONGER_FROM]) == {"plain"}
    assert carriers.index("gqsgd_hook", LONGER_FROM) <= LONGER_FROM + 30
    assert carriers[-1] == "plain"
