"""Names of arguments that are read from source, and entries of a configuration that nothing takes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from recipes import signatures
from recipes.arguments import NODES, check_arguments
from recipes.overrides import composed
from recipes.signatures import argument_names
from recipes.strategies.choices import choices_of, strategies
from recipes.training.building import ALLOWED_TARGETS
from tests.recipes.conftest import ROOT, clean_environment

OWN = [node.target for node in NODES.values() if node.target]


def _parameters(target: Any) -> set[str]:
    """Names of arguments, as far as calls hand on those that they do not name."""
    names: set[str] = set()
    for owner in inspect.getmro(target) if inspect.isclass(target) else [target]:
        if inspect.isclass(owner) and "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(owner.__init__ if inspect.isclass(owner) else owner).parameters.values()
        open_ended = [parameter for parameter in parameters if parameter.kind is parameter.VAR_KEYWORD]
        names |= {parameter.name for parameter in parameters if parameter not in open_ended} - {"self"}
        if not open_ended:
            break
        if owner is DDPStrategy:
            return names | _parameters(DistributedDataParallel)
    return names


@pytest.mark.parametrize("target", sorted({*ALLOWED_TARGETS, *OWN}))
def test_names_are_those_of_the_imported_target(target: str) -> None:
    assert argument_names(target) == _parameters(get_object(target))


def test_reading_imports_nothing(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from recipes.signatures import argument_names\n"
        "assert 'max_epochs' in argument_names('lightning.pytorch.Trainer')\n"
        "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=clean_environment(), check=True)


@pytest.mark.parametrize("target", ["no_such_package.Thing", "recipes.no_such_module.Thing", "recipes.run.Thing", "x"])
def test_what_cannot_be_read_is_left_to_the_call(target: str) -> None:
    assert argument_names(target) is None


def test_sources_that_cannot_be_read_are_left_to_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "unreadable_package"
    package.mkdir()
    (package / "__init__.py").write_text("class Thing(\n")
    (package / "circle.py").write_text("from unreadable_package.circle import Thing\n")
    (package / "more.py").write_text("class Thing:\n    def __init__(self, a, **more): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    signatures.argument_names.cache_clear()
    for module in ("unreadable_package", "unreadable_package.circle", "unreadable_package.more"):
        assert argument_names(f"{module}.Thing") is None


CHOICES = [*(f"+exp={name}" for name in choices_of("exp")), *(f"logger={name}" for name in choices_of("logger"))]
#: Strategies with a file of their own, and a preset of each kind. All other presets become choices in the same way.
KINDS = (*choices_of("strategy"), "gqsgd", "gqsgd_auto", "dore", "gqsgd_diloco", "gqsgd_elastic")
CHOICES += [pytest.param(f"strategy={name}", marks=[] if name in KINDS else pytest.mark.slow) for name in strategies()]


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_takes_its_own_entries(choice: str) -> None:
    check_arguments(composed([choice]))


def test_further_arguments_pass() -> None:
    further = ["+trainer.deterministic=true", "+strategy.static_graph=true", "+model.bottleneck=true"]
    check_arguments(composed(["strategy=gqsgd", "+strategy.block_size=64", "+strategy.delay=1", *further]))
