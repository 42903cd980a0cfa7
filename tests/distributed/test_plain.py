"""Plain DDP in the place of the hook: who carries the gradients, and that nothing else changes, on real processes."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.telemetry import Meter
from lightning_gqsgd.tuning.decisions import Decision
from tests.distributed.models import Branches, batch, fingerprint, mlp, train, wrapped
from tests.distributed.ranks import run

#: Steps of the hook before plain DDP takes its place, where a decision for 32 bits was loaded.
LEAVES_AFTER = 8
SMALL_BUCKETS = {"bucket_cap_mb": 0.03}


def decided(state: GQSGDState, bits: int = 32) -> None:
    """Load a state that has decided for some bits, as after a resume."""
    saved = state.state_dict()
    saved["auto"] |= {
        "bits": bits,
        "reference_s": None,
        "decisions": [Decision(3, bits, {32: 0.1, bits: 0.1}, "made up").to_dict()],
    }
    state.load_state_dict(saved)


def carrier(model: DistributedDataParallel) -> str:
    """The hook that DDP's own Reducer knows."""
    return model._get_ddp_logging_data().get("comm_hook") or "plain"


def auto(ddp: dict[str, Any], module: nn.Module | None = None, **fields: Any):
    """A DDP model whose hook has decided for 32 bits."""
    model, state = wrapped(ddp, {"preset": "gqsgd_auto", "sample_every": 0, **fields}, module)
    decided(state)
    return model, state


def asks_for_a_trial(state: GQSGDState) -> None:
    """Let the watch find at the next comparison that steps have become longer."""
    assert state._steering is not None
    trials, plain = state._steering.trials, state._plain
    assert trials is not None
    assert plain is not None
    trials._reference_s, trials._is_refined = 1e-6, True
    plain._lengths.extend([10_000] * 50)


def _there_and_back(rank: int) -> dict[str, Any]:
    model, state = auto(SMALL_BUCKETS)
    meter, carriers, steps = Meter(state.telemetry), [], []
    for step in range(LEAVES_AFTER + 26):
        if step == LEAVES_AFTER + 12:
            asks_for_a_trial(state)
            values, report = meter.read(), state.report()
        train(model, rank, range(step, step + 1))
        carriers.append(carrier(model))
        steps.append(state.step)
    facts = {"bits": fingerprint(model), "carriers": carriers, "steps": steps, "values": values, "report": report}
    state.close()
    return facts


def test_plain_ddp_takes_the_hooks_place_and_the_hook_comes_back_for_a_trial_on_all_ranks_at_once(
    tmp_path: Path,
) -> None:
    first, second = run(_there_and_back, 2, tmp_path)
    assert first["bits"] == second["bits"]
    assert first["carriers"] == second["carriers"]
    back = LEAVES_AFTER + 21  # compared in the 20th step of plain DDP, and known in the next one
    assert first["carriers"] == (
        ["gqsgd_hook"] * LEAVES_AFTER + ["plain"] * (back - LEAVES_AFTER) + ["gqsgd_hook"] * (LEAVES_AFTER + 26 - back)
    )
    assert first["steps"] == list(range(1, LEAVES_AFTER + 27))
    assert first["values"]["gqsgd/plain"] == 1
    assert first["values"]["gqsgd/bits"] == 32
    assert first["values"]["gqsgd/bits_per_coordinate"] == 32
    assert "plain DDP carries the gradients at present" in first["report"]
