"""Values that a class of torch, Lightning or the environment refuses: one line, and no half-done run."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from lightning_gqsgd.errors import ConfigError
from recipes.comparison.plan import make_plan
from recipes.errors import RecipeError
from recipes.launch.command_line import examine
from recipes.launch.environment import check_threads
from recipes.strategies.choices import timeout_for
from recipes.training.building import build_callbacks, build_trainer
from recipes.training.refusals import refused_values


@pytest.mark.parametrize("kind", [TypeError, ValueError, AssertionError, MisconfigurationException])
def test_a_refused_value_is_one_line(kind: type[Exception]) -> None:
    said = rf"^optimizer: bad value \({kind.__name__}; HYDRA_FULL_ERROR=1"
    with pytest.raises(RecipeError, match=said), refused_values("optimizer"):
        raise kind("bad\n   value")


@pytest.mark.parametrize(
    "error", [RecipeError("of recipes"), ConfigError("of ours"), RuntimeError("no refusal"), KeyboardInterrupt()]
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, refused_values("model"):
        raise error
    assert raised.value is error


def test_an_error_of_a_later_step_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match="^of the network$"), refused_values("fit", applies=lambda: False):
        raise ValueError("of the network")


def test_what_lightning_refuses_is_one_line(tmp_path: Path) -> None:
    node = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val/loss", "mode": "up"}
    with pytest.raises(RecipeError, match="EarlyStopping: `mode` can be min, max, got up"):
        build_callbacks(OmegaConf.create({"stop": node}), tmp_path)
    with pytest.raises(RecipeError, match=r"^trainer: .*foo.*\(MisconfigurationException"):
        build_trainer({"accelerator": "cpu", "gradient_clip_algorithm": "foo"}, tmp_path)


def test_the_timeout_of_a_strategy_is_a_time() -> None:
    assert timeout_for({"timeout": "5min"}) == {"timeout": timedelta(minutes=5)}
    assert timeout_for({}) == {}
    for value in ("abc", "0s", 5, "5 parsec"):
        with pytest.raises(RecipeError, match=r"e\.g\. \+strategy\.timeout=5min"):
            timeout_for({"timeout": value})


def test_numbers_of_threads_in_the_environment() -> None:
    for value in ("1", "4,2"):
        check_threads({"OMP_NUM_THREADS": value})
    check_threads({})
    for value in ("0", "x", "", "-1", "4,0"):
        with pytest.raises(RecipeError, match=f"OMP_NUM_THREADS={value} is not a number of threads"):
            check_threads({"OMP_NUM_THREADS": value})


def test_a_range_without_a_value() -> None:
    with pytest.raises(RecipeError, match=r"optimizer\.lr=range\(1,0\) has no value"):
        examine(["-m", "+exp=quickstart", "optimizer.lr=range(1,0)"])


@pytest.mark.parametrize("place", ["paths.log_dir=elsewhere", "run_root=elsewhere", "hydra.run.dir=elsewhere"])
def test_a_comparison_has_one_folder(place: str) -> None:
    with pytest.raises(RecipeError, match="take output=FOLDER"):
        make_plan(["+exp=quickstart", place])
