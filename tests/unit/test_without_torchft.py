"""What is said where the extra torchft is not installed."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lightning_gqsgd import ConfigError, LocalSteps
from lightning_gqsgd.cli.app import app

#: Modules that import it.
NEED_IT = ("membership.manager", "membership.transport", "membership.process_group", "cli.lighthouse")


@pytest.fixture(autouse=True)
def _without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.coordination", None)
    for name in NEED_IT:
        monkeypatch.delitem(sys.modules, f"lightning_gqsgd.{name}", raising=False)


def test_elastic_local_steps_name_it() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"^elastic=True needs torchft, which is not installed: pip install"):
        LocalSteps(model, torch.optim.SGD(model.parameters(), 0.1), every="1s", elastic=True)


def test_the_lighthouse_names_it() -> None:
    result = CliRunner().invoke(app, ["lighthouse"])
    assert result.exit_code == 2
    assert "a lighthouse needs torchft, which is not installed: pip install" in result.output
