"""States of one kind that are given to an object of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.checkpoint import check_state

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"


def test_a_hook_refuses_a_state_of_local_steps() -> None:
    state = torch.load(CHECKPOINTS / "local_steps.pt", weights_only=True)["optimizer"]["local_steps"]
    with pytest.raises(ConfigError, match="this is the state of local steps"):
        check_state(state, GQSGDConfig())
