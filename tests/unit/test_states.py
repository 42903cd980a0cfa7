"""States of another kind, or of an earlier version, that are given to a hook."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.checkpoint import check_state

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


@pytest.mark.parametrize("entry", ["anchors", "merged"])  # of rounds of steps, and by the clock
def test_a_hook_refuses_a_state_of_local_steps(entry: str) -> None:
    state = torch.load(CHECKPOINTS / "local_steps.pt", weights_only=True)["optimizer"]["local_steps"]
    state[entry] = state.pop("anchors")
    with pytest.raises(ConfigError, match="this is the state of local steps"):
        check_state(state, GQSGDConfig())


def test_a_field_that_an_earlier_version_did_not_have_is_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    state = {"schema": 1, "seed": 0, "step": 3}
    check_state({**state, "config": {"bits": GQSGDConfig().bits}}, GQSGDConfig())
    assert not caplog.records
    check_state({**state, "config": {"seed": 5}}, GQSGDConfig())
    assert "written under another configuration (seed: 5 != 0)" in caplog.text
