"""What is said where the extra torchft is not installed, or cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

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


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import torchft._torchft", "No module named 'torchft._torchft'"),  # compiled for another Python
        ("raise AttributeError('no such option')", "no such option"),  # next to a torch that it does not know
    ],
)
def test_a_torchft_that_cannot_be_loaded_is_not_called_missing(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torchft")
    monkeypatch.delitem(sys.modules, "torchft._torchft", raising=False)  # other tests have loaded the real one
    (tmp_path / "torchft").mkdir()
    (tmp_path / "torchft" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    result = CliRunner().invoke(app, ["lighthouse"])
    assert result.exit_code == 2
    assert f"torchft, which cannot be loaded ({reason}): pip install --force-reinstall" in result.output
