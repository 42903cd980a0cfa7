from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

from lightning_gqsgd import GQSGDStrategy
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.presets import PRESETS
from recipes.tasks.building import ALLOWED_TARGETS, TargetError, build
from recipes.tasks.networks import ResNet

CONF = Path(__file__).resolve().parents[2] / "conf"

Compose = Callable[..., DictConfig]


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (CONF / group).glob("*.yaml"))


@pytest.mark.parametrize("strategy", _choices("strategy"))
@pytest.mark.parametrize("experiment", _choices("exp"))
def test_every_experiment_with_every_strategy(composed: Compose, experiment: str, strategy: str) -> None:
    cfg = composed(f"+exp={experiment}", f"strategy={strategy}")
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    assert config["title"] == experiment
    assert config["strategy"]["name"] == strategy
    assert config["run_root"] == f"outputs/{experiment}/{strategy}-seed0"
    assert config["model"].get("num_classes") == config["data"].get("num_classes")


def test_one_strategy_for_each_preset_besides_the_baselines() -> None:
    baselines = ["ddp", "ddp_bf16", "ddp_fp16", "powersgd"]
    assert _choices("strategy") == sorted([*baselines, *PRESETS])


@pytest.mark.parametrize("preset", PRESETS)
def test_strategy_has_the_presets_configuration(composed: Compose, preset: str) -> None:
    built = build(composed(f"strategy={preset}").strategy, leave_out=("name",))
    assert built.gqsgd_config == PRESETS[preset].config
    assert (CONF / "strategy" / f"{preset}.yaml").read_text().startswith("# ")


def test_memory_is_given_by_name_or_by_numbers(composed: Compose) -> None:
    none = build(composed("strategy=ecq_sgd", "+strategy.memory=none").strategy, leave_out=("name",))
    assert none.gqsgd_config.up is None
    numbers = "+strategy.memory={alpha:0.2,beta:0.9,rho:0}"
    given = build(composed("strategy=ecq_sgd", numbers).strategy, leave_out=("name",))
    assert (given.gqsgd_config.up.alpha, given.gqsgd_config.up.beta) == (0.2, 0.9)


def test_every_field_is_a_named_argument_that_keeps_the_presets() -> None:
    arguments = inspect.signature(GQSGDStrategy.__init__).parameters
    assert [name for name in arguments if name in GQSGDConfig.field_names()] == list(GQSGDConfig.field_names())
    assert all(arguments[name].default is None for name in GQSGDConfig.field_names())
    given: dict[str, Any] = dict.fromkeys(GQSGDConfig.field_names())
    assert GQSGDStrategy(preset="cd_adam", **given).gqsgd_config == PRESETS["cd_adam"].config


#: Networks and tasks take their sizes from data of their kind; those that are not named here are of images.
CLICKS = ("data=criteo", "model=deepfwfm", "task=click_prediction")
COMPANIONS = dict.fromkeys(CLICKS, CLICKS)


@pytest.mark.parametrize("group", ["logger", "model", "task", "trainer", "data"])
def test_every_choice_composes(composed: Compose, group: str) -> None:
    for choice in _choices(group):
        override = f"{group}={choice}"
        assert OmegaConf.to_container(composed(*COMPANIONS.get(override, (override,))), resolve=True)


def test_experiments_are_added_not_overridden(composed: Compose) -> None:
    with pytest.raises(ConfigCompositionException):
        composed("exp=quickstart")


def test_the_files_name_exactly_the_allowed_targets() -> None:
    files = [OmegaConf.load(file) for file in CONF.rglob("*.yaml")]
    named = {cfg._target_ for cfg in files if isinstance(cfg, DictConfig) and "_target_" in cfg}
    assert named == ALLOWED_TARGETS


@pytest.mark.parametrize("target", ["os.system", "recipes.tasks.images.np.load", None])
def test_no_other_target_is_called(target: str | None) -> None:
    with pytest.raises(TargetError, match="is not one of"):
        build(OmegaConf.create({"_target_": target, "command": "true"}))


def test_targets_inside_a_node_are_not_called() -> None:
    node = OmegaConf.create(
        {
            "_target_": "recipes.tasks.networks.ResNet",
            "blocks": {"_target_": "os.system", "command": "true"},
            "width": 4,
        }
    )
    with pytest.raises(TypeError):
        build(node)


def test_build_calls_with_plain_values(composed: Compose) -> None:
    network = build(composed("model.width=4").model, leave_out=("name",))
    assert isinstance(network, ResNet)
    assert len(network.stages) == 3


def test_lightnings_strategies_are_built_from_their_files(composed: Compose) -> None:
    for strategy in _choices("strategy"):
        built = build(composed(f"strategy={strategy}").strategy, leave_out=("name",))
        assert hasattr(built, "configure_ddp")
