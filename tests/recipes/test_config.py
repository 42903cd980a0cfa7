from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hydra.errors import ConfigCompositionException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lightning_gqsgd import GQSGDStrategy
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.membership.door import LIGHTHOUSE
from lightning_gqsgd.presets import LOCAL_PRESETS, PRESETS, Preset, make_config
from recipes.errors import RecipeError
from recipes.strategies.baselines import BaselineDDPStrategy
from recipes.strategies.choices import (
    CONF,
    TARGET,
    baselines,
    check_elastic,
    check_strategies,
    choices_of,
    strategies,
)
from recipes.training.building import ALLOWED_TARGETS, build
from tests.errors import check_refused_in_one_line
from workloads.resnet import ResNet

Compose = Callable[..., DictConfig]


# --- strategies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experiment", "strategy"),
    [(experiment, "gqsgd") for experiment in choices_of("exp")]
    + [
        pytest.param(experiment, strategy, marks=pytest.mark.slow)
        for experiment, strategy in itertools.product(choices_of("exp"), strategies())
        if strategy != "gqsgd"
    ],
)
def test_every_experiment_with_every_strategy(composed: Compose, experiment: str, strategy: str) -> None:
    cfg = composed(f"+exp={experiment}", f"strategy={strategy}")
    config = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    assert config["title"] == experiment
    assert config["strategy"]["name"] == strategy
    assert config["run_root"] == f"outputs/{experiment}/{strategy}-seed0"
    for number in ("num_classes", "vocabulary_size"):
        assert config["model"].get(number) == config["data"].get(number)


def test_every_preset_is_a_strategy_and_only_torchs_own_strategies_have_files() -> None:
    assert strategies() == ["ddp", "ddp_bf16", "ddp_fp16", "powersgd", *PRESETS, *LOCAL_PRESETS, "gqsgd_elastic"]
    targets = {OmegaConf.load(file)._target_ for file in (CONF / "strategy").glob("*.yaml")}
    assert targets == {"recipes.strategies.baselines.BaselineDDPStrategy"}


@pytest.mark.parametrize("name", LOCAL_PRESETS)
def test_local_steps_are_strategies_whose_steps_a_key_changes(composed: Compose, name: str) -> None:
    cfg = composed(f"strategy={name}", "strategy.local_steps=5", "+strategy.fragments=2", "+strategy.min_numel=2")
    strategy = build(cfg.strategy, leave_out=("name",))
    assert (strategy._local.options.every, strategy._local.options.fragments) == (5, 2)
    assert strategy._local.options.outer == LOCAL_PRESETS[name].options["outer"]
    assert strategy.gqsgd_config.min_numel == 2


def test_elastic_runs_are_local_steps_by_the_clock(composed: Compose) -> None:
    cfg = composed("strategy=gqsgd_elastic", "strategy.local_steps=5s", "+strategy.min_replicas=2")
    options = build(cfg.strategy, leave_out=("name",))._local.options
    assert (options.every_s, options.delay, options.elastic, options.min_replicas) == (5.0, 1, True, 2)


@pytest.mark.parametrize(
    ("overrides", "address", "message"),
    [
        ([], "host:29510", "add trainer.devices=1, and start a run with another seed for each process"),
        (["trainer.devices=1", "trainer.num_nodes=2"], "host:29510", "trainer.devices=1 on 2 nodes"),
        (["trainer.devices=1"], "", "strategy=gqsgd_elastic: .* start one with `gqsgd lighthouse`"),
        (["trainer.devices=1"], "host", "TORCHFT_LIGHTHOUSE='host' is not an address"),
    ],
)
def test_an_elastic_run_has_one_process_and_a_lighthouse(
    composed: Compose, overrides: list[str], address: str, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        check_elastic(composed("strategy=gqsgd_elastic", *overrides), {LIGHTHOUSE: address})
    check_elastic(composed("strategy=gqsgd_elastic", "trainer.devices=1"), {LIGHTHOUSE: "host:29510"})
    check_elastic(composed("strategy=gqsgd_diloco"), {})


#: What the package's own presets list: the one field in which they differ.
OWN_BITS = {"gqsgd": 8, "gqsgd_4bit": 4, "gqsgd_3bit": 3}
#: Presets whose choices list a field, and one that does not; the others go the same way, as slow tests.
SOME_PRESETS = [pytest.param(name, marks=[] if name in (*OWN_BITS, "dore") else pytest.mark.slow) for name in PRESETS]


@pytest.mark.parametrize("preset", SOME_PRESETS)
def test_strategy_has_the_presets_configuration(composed: Compose, preset: str) -> None:
    cfg = composed(f"strategy={preset}")
    assert cfg.run_root == f"outputs/digits/{preset}-seed0"
    # The preset says everything else.
    bits = OWN_BITS.get(preset)
    listed = {} if bits is None else {"bits": bits}
    assert cfg.strategy == {"name": preset, "_target_": "lightning_gqsgd.GQSGDStrategy", "preset": preset, **listed}
    assert build(cfg.strategy, leave_out=("name",)).gqsgd_config == PRESETS[preset].config


def test_a_new_preset_is_a_strategy_at_once(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "mine", Preset({"bits": 3, "reducer": "sum"}, "a paper", "what it does"))
    check_strategies(["strategy=mine"])
    node = composed("strategy=mine", "+strategy.block_size=64").strategy
    assert OmegaConf.to_container(node) == {
        "name": "mine",
        "_target_": "lightning_gqsgd.GQSGDStrategy",
        "preset": "mine",
        "block_size": 64,
    }


def test_fields_are_added_or_changed(composed: Compose) -> None:
    added = build(composed("strategy=dore", "+strategy.block_size=128").strategy, leave_out=("name",))
    assert added.gqsgd_config == make_config("dore", block_size=128)
    changed = build(composed("strategy=gqsgd", "strategy.bits=2").strategy, leave_out=("name",))
    assert changed.gqsgd_config == make_config("gqsgd", bits=2)
    both = build(composed("strategy=gqsgd_auto", "+strategy.bits=auto").strategy, leave_out=("name",))
    assert both.gqsgd_config == make_config("gqsgd_auto", bits="auto", max_slowdown=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "strategy=ddp,gqsdg"], "strategy=gqsdg is not a strategy; did you mean 'gqsgd'"),
        (["strategy=all"], r"strategy=all is a comparison .* take python recipes/compare\.py"),
    ],
)
def test_a_misspelt_strategy_is_one_line(arguments: list[str], message: str) -> None:
    check_refused_in_one_line(RecipeError, message, check_strategies, arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["strategy=dore", "strategy.name=mine", "title=strategy=none"],
        ["-m", "strategy=choice(ddp,gqsgd)"],
        ["--config-dir", "there", "strategy=mine"],
        ["hydra.searchpath=[file://there]", "strategy=mine"],
    ],
)
def test_only_names_of_strategies_are_checked(arguments: list[str]) -> None:
    check_strategies(arguments)


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


#: Networks take their shape from data of their kind.
_PAIRS = {"deepfwfm": "criteo", **dict.fromkeys(("gpt2", "transformer_small", "transformer_xl_base"), "wikitext")}
_TASKS = {"criteo": "click_prediction", "wikitext": "language_model"}


def test_every_choice_composes(composed: Compose) -> None:
    images = itertools.cycle(choice for choice in choices_of("data") if choice not in _TASKS)
    others = {group: itertools.cycle(choices_of(group)) for group in ("hardware", "logger", "trainer")}
    tried = set()
    for model in choices_of("model"):
        data = _PAIRS.get(model) or next(images)
        chosen = {"model": model, "data": data, "task": _TASKS.get(data, "image_classification")}
        chosen |= {group: next(choices) for group, choices in others.items()}
        cfg = composed(*(f"{group}={choice}" for group, choice in chosen.items()))
        assert OmegaConf.to_container(cfg, resolve=True)
        tried |= set(chosen.items())
    assert tried == {(group, choice) for group in (*others, "model", "data", "task") for choice in choices_of(group)}


@pytest.mark.parametrize("task", choices_of("task"))
def test_the_task_says_what_it_is_judged_by(task: str) -> None:
    node = OmegaConf.load(CONF / "task" / f"{task}.yaml")
    assert isinstance(node, DictConfig)
    assert node.metric == get_object(node._target_).metric.key


def test_experiments_are_added_not_overridden(composed: Compose) -> None:
    with pytest.raises(ConfigCompositionException):
        composed("exp=quickstart")


def test_files_and_presets_name_exactly_the_allowed_targets() -> None:
    # Hydra itself builds its launcher.
    files = [OmegaConf.load(file) for file in CONF.rglob("*.yaml") if "hydra" not in file.relative_to(CONF).parts]
    named = {cfg._target_ for cfg in files if isinstance(cfg, DictConfig) and "_target_" in cfg}
    assert {*named, TARGET} == ALLOWED_TARGETS
    assert {target.partition(".")[0] for target in ALLOWED_TARGETS} == {"lightning_gqsgd", "recipes", "workloads"}


@pytest.mark.parametrize("target", ["recipes.data.images.np.load", None])
def test_no_other_target_is_called(target: str | None) -> None:
    with pytest.raises(RecipeError, match="is not one of"):
        build(OmegaConf.create({"_target_": target, "command": "true"}))


def test_targets_inside_a_node_are_not_called() -> None:
    node = OmegaConf.create(
        {
            "_target_": "workloads.resnet.ResNet",
            "blocks": {"_target_": "os.system", "command": "true"},
            "width": 4,
        }
    )
    with pytest.raises(RecipeError, match="TypeError"):
        build(node)


def test_build_calls_with_plain_values(composed: Compose) -> None:
    network = build(composed("model.width=4").model, leave_out=("name",))
    assert isinstance(network, ResNet)
    assert len(network.stages) == 3


@pytest.mark.parametrize("strategy", baselines())
def test_torchs_own_strategies_are_built(composed: Compose, strategy: str) -> None:
    built = build(composed(f"strategy={strategy}").strategy, leave_out=("name",))
    assert isinstance(built, BaselineDDPStrategy)
