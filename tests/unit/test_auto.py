"""`auto` in a configuration: what it allows, what it does not go with, and where it cannot be."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch

from lightning_gqsgd.adaptive.clock import StepClock
from lightning_gqsgd.adaptive.states import Stay
from lightning_gqsgd.adaptive.steering import Steering
from lightning_gqsgd.cli.facts import facts_at, notes
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.presets import FIXED, PRESETS, make_config
from lightning_gqsgd.research.simulation import average
from lightning_gqsgd.spec.decisions import LAG, Decision
from lightning_gqsgd.wire import announcing
from lightning_gqsgd.wire.agreement import Agreed
from tests.errors import check_refused_in_one_line


def test_candidates_are_the_configurations_that_bits_alone_would_give() -> None:
    config = GQSGDConfig(auto=True, seed=3, warmup_steps=7)
    assert list(config.candidates()) == [32, 16, 8, 4]
    for bits, candidate in config.candidates().items():
        assert candidate == GQSGDConfig(bits=bits, seed=3, warmup_steps=7)
    coded = GQSGDConfig(auto=True, allow=(3, 8), codec="linear", block_size=64, reducer="gather", exclude=("*.bias",))
    fields = {"codec": "linear", "block_size": 64, "reducer": "gather", "exclude": ("*.bias",)}
    assert coded.candidates() == {bits: GQSGDConfig(bits=bits, **fields) for bits in (8, 3)}
    assert make_config("gqsgd_2bit", auto=True, allow=(32, 2), bits=2).candidates()[2] == PRESETS["gqsgd_2bit"].config


def test_a_configuration_with_auto_can_be_replaced_described_and_written() -> None:
    config = PRESETS["gqsgd_auto"].config
    assert replace(config, seed=5).candidates()[4] == GQSGDConfig(bits=4, seed=5)
    assert GQSGDConfig(**config.to_dict()) == config
    assert config.describe().startswith("32, 16, 8 or 4 bits, by the length of steps (codes: 8 bits (companded")
    assert GQSGDConfig(auto=True, allow=(16, 32)).describe() == "32 or 16 bits, by the length of steps"
    assert "gqsgd_auto" not in FIXED


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"allow": (8,)}, "nothing to choose"),
        ({"allow": ()}, "nothing to choose"),
        ({"allow": 8}, "must be a sequence"),
        ({"allow": ("8", "4")}, "must be a sequence"),
        ({"allow": (True, 4)}, "must be a sequence"),
        ({"allow": (32, 12)}, "asks for bits=12.*allow 32, 16 and 2 to 8, e.g. allow=.32, 8, 4"),
        ({"bits": 5}, "leave bits out"),
        ({"reducer": "native"}, "leave reducer out"),
        ({"memory": "ecq", "dither": "stochastic"}, "does not work with a memory"),
        ({"codec": "sign", "memory": "ef"}, "leave codec and memory out"),
        ({"allow": (9, 8)}, "allow=.9, 8. asks for bits=9"),
        ({"allow": (1, 8)}, "asks for bits=1, and"),
        ({"exclude": ("*.bias",)}, "exclude"),
        ({"codec": "eden"}, "asks for bits=8.*e.g. allow=.32, 4, 2"),
        ({"auto": "yes"}, "must be True or False"),
        ({"auto": False, "allow": (8, 4)}, "is for auto=True"),
    ],
)
def test_what_auto_does_not_go_with_is_refused_in_one_line(fields: dict, words: str) -> None:
    check_refused_in_one_line(ConfigError, words, GQSGDConfig, **{"auto": True, **fields})


@pytest.mark.parametrize("fields", [{"auto": True}, {"bits": "auto"}], ids=str)
def test_no_memory_in_any_spelling_goes_with_bits_that_change(fields: dict) -> None:
    assert GQSGDConfig(**fields, memory=None, memory_down=None) == GQSGDConfig(
        **fields, memory="none", memory_down="none"
    )


def decided(bits: int) -> Decision:
    """A decision for some bits."""
    return Decision(70, bits, {32: 0.04, bits: 0.01}, "first trial", {32: None, bits: 0.011})


@pytest.mark.parametrize("bits", [4, 16, 32])
def test_a_decision_in_the_place_of_auto_pins_its_bits(bits: int) -> None:
    assert GQSGDConfig(auto=decided(3)).bits == 3  # the default of allow is no wish
    row = decided(bits).to_dict()
    wanted = GQSGDConfig(auto=True, seed=3).candidates()[bits]
    for decision in (decided(bits), row, json.loads(json.dumps(row))):
        config = make_config("gqsgd_auto", auto=decision, seed=3)
        assert config == wanted
        assert not config.chooses_bits
        assert GQSGDConfig(**config.to_dict()) == wanted
        for chosen in (GQSGDConfig(auto=True, seed=3), GQSGDConfig(bits="auto", seed=3), GQSGDConfig(seed=3)):
            assert make_config(chosen, auto=decision) == wanted
        assert GQSGDConfig(auto=decision, allow=(bits, 3), seed=3) == wanted
    instant = row | {"predicted": {32: 0.0, bits: 0.0}}
    assert GQSGDConfig(auto=instant, seed=3) == wanted
    coded = GQSGDConfig(auto=True, codec="linear", allow=(32, 16, 4), min_numel=64)
    assert make_config(coded, auto=decided(bits)) == coded.candidates()[bits]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"auto": {}}, "is not a decision"),
        ({"auto": 3}, "must be True or False, or a decision"),
        ({"auto": None}, "must be True or False, or a decision"),
        ({"auto": replace(decided(4), bits=77)}, "77, not one of"),
        ({"auto": decided(4).to_dict() | {"bits": True}}, "True, not one of"),
        ({"auto": decided(4).to_dict() | {"seconds": {4: -1.0}}}, "not above 0"),
        ({"auto": decided(4).to_dict() | {"seconds": 3}}, "is not a decision"),
        ({"auto": decided(4).to_dict() | {"step": True}}, "True, not from 0"),
        ({"auto": decided(4), "allow": (32, 8)}, "leave allow out"),
        ({"auto": decided(4), "allow": 32}, "allow=32 must be a sequence of numbers of bits"),
        ({"auto": decided(4), "allow": (4, "eight")}, "allow=.4, 'eight'. must be a sequence of numbers of bits"),
        ({"auto": decided(4), "bits": 8}, "leave bits or auto out"),
        ({"auto": decided(4), "bits": "auto"}, "leave bits or auto out"),
        ({"auto": decided(4), "max_slowdown": 0.1}, "leave max_slowdown or auto out"),
        ({"auto": decided(8), "codec": "eden"}, "eden"),
        ({"auto": decided(32), "memory": "ecq"}, "memory"),
    ],
)
def test_what_is_no_decision_or_contradicts_it_is_refused_in_one_line(fields: dict, words: str) -> None:
    check_refused_in_one_line(ConfigError, words, GQSGDConfig, **fields)


@pytest.mark.parametrize(
    ("preset", "fields", "words"),
    [
        ("signsgd_ef", {"auto": True}, "leave codec and memory out, or the preset.*or leave auto out"),
        ("topk_ef", {"auto": True}, "leave codec and memory out, or the preset.*or leave auto out"),
        ("topk_ef", {"bits": "auto"}, "leave codec and memory out, or the preset.*or leave bits and max_slowdown out"),
        ("diana", {"auto": True}, "leave memory out, or the preset"),
        ("eden", {"bits": "auto"}, "allow=.32, 16, 8, 4. asks for bits=8.*e.g. allow=.32, 4, 2"),
        ("eden", {"auto": True}, "or give e.g. allow=.32, 2"),
    ],
)
def test_presets_that_auto_does_not_go_with_are_refused_with_the_remedy(preset: str, fields: dict, words: str) -> None:
    check_refused_in_one_line(ConfigError, words, make_config, preset, **fields)


def test_the_remedies_for_presets_work() -> None:
    assert make_config("eden", auto=True, allow=(32, 2)).candidates()[2] == PRESETS["eden"].config
    assert list(make_config("eden", bits="auto", allow=(32, 4, 2)).candidates()) == [32, 4, 2]
    assert list(GQSGDConfig(auto=True, codec="linear", allow=(32, 1)).candidates()) == [32, 1]


def test_auto_is_refused_where_no_steps_of_ddp_are_timed() -> None:
    with pytest.raises(ConfigError, match="one of bits=32, 16, 8, 4"):
        resolve(PRESETS["gqsgd_auto"].config, 2)
    with pytest.raises(ConfigError, match="length of the steps"):
        average([torch.ones(5000)] * 2, preset="gqsgd_auto")


def test_the_table_of_presets_says_that_auto_chooses_in_training() -> None:
    facts = facts_at("gqsgd_auto", 8)
    assert "chosen in training" in facts.row()
    assert not any("gqsgd_auto" in note for note in notes([facts]))
    assert facts.to_dict()["works"] is True


def test_steps_count_if_they_are_like_the_step_before() -> None:
    model, clock = torch.nn.Linear(2, 2), StepClock()
    clock.watch(model)
    x = torch.ones(1, 2)

    def step(forwards: int) -> int:
        for _ in range(forwards):
            model(x)
        return clock.begin_step()

    assert step(1) == 0  # there is no step before
    assert step(1) > 0
    assert step(4) == 0
    assert step(4) > 0
    model.eval()
    model(x)
    model.train()
    assert step(4) == 0
    assert step(4) > 0
    clock.interrupt()
    assert step(4) == 0


def test_steps_count_after_a_validation_of_lightnings_which_leaves_the_wrapper_in_evaluation_mode() -> None:
    wrapper, clock = torch.nn.Module(), StepClock()
    wrapper.module = torch.nn.Linear(2, 2)
    wrapper.forward = wrapper.module.forward  # type: ignore[method-assign]
    clock.watch(wrapper)
    wrapper.eval()
    wrapper.module.train()
    for _ in range(3):
        wrapper(torch.ones(1, 2))
        counted = clock.begin_step()
    assert counted > 0


def test_steering_gives_each_step_its_configuration_and_pins_are_described() -> None:
    steering, length_us = Steering(GQSGDConfig(auto=True, allow=(32, 4)), 2), {32: 40_000, 4: 10_000}
    used: list[int] = []
    for step in range(60):
        # Stamps of step - 2 say how long step - 3 took.
        steering.receive({step - 2: Agreed(length_us[used[step - LAG]], ((0, 0), (0, 0)))} if step >= LAG else {})
        steering.begin_step(step, None)
        config = steering.config
        assert config == resolve(GQSGDConfig(bits=config.num_bits), 2)
        used.append(config.num_bits)
    assert steering.decisions[-1].bits == 4
    assert steering.decisions[-1].seconds == {32: pytest.approx(0.04), 4: pytest.approx(0.01)}
    assert "auto=False, bits=4" in steering.decisions[-1].describe()
    assert "auto takes 4 bits" in steering.report(2)
    assert steering.choice() == {"bits": 4, "trying": 0, "plain": 0}  # nothing was predicted
    assert steering.trials is not None
    row = steering.decisions[-1]
    steering.trials.decisions.append(replace(row, predicted={32: None, 4: 0.011}))
    assert steering.choice() == {"bits": 4, "trying": 0, "plain": 0, "predicted_step_s": 0.011}
    assert "4 bits 10 ms (predicted 11 ms)" in steering.decisions[-1].describe()
    steering.trials.decisions.pop()
    again = Steering(GQSGDConfig(auto=True, allow=(32, 4)), 2)
    again.resume(steering.state())
    assert again.config.num_bits == 4
    with pytest.raises(ConfigError, match="entry 'auto'"):
        again.resume(7)


def steered(decision: Decision, *, says: bool = False, **fields: object) -> Steering:
    """What has decided so, in a run that has tried 32 and 4 bits, or those that are given."""
    steering = Steering(GQSGDConfig(**{"auto": True, "allow": (32, 4), **fields}), 2, says=says)
    assert steering.trials is not None
    steering.trials.decisions.append(decision)
    steering.trials.bits = steering.bits = decision.bits
    steering.trials.state = Stay()
    return steering


def test_a_decision_for_plain_ddp_is_kept_by_plain_ddp_and_not_by_the_hook_at_32_bits() -> None:
    steering = steered(decided(32))
    steering.permit_plain("static_graph=True")
    assert "give auto=False, bits=32" in steering.report(2)
    steering.permit_plain("")
    assert "To keep that in other runs, use plain DDP, without gqsgd" in steering.report(2)
    assert steering.trials is not None
    steering.trials._begin("steps became 20% longer")
    assert "; 32 bits on trial at present; auto takes 32 bits" in steering.report(2)
    assert "To keep that" not in steering.report(2)
    narrow = steered(decided(4))
    narrow.permit_plain("")
    assert "give auto=False, bits=4" in narrow.report(2)


@pytest.mark.parametrize(
    ("bits", "fields", "now"),
    [
        (4, {"auto": False, "bits": "auto", "allow": (32, 4)}, 32),
        (32, {"allow": (8, 4)}, 8),
        (4, {"allow": (32, 4)}, 4),
    ],
)
def test_a_report_says_which_bits_are_in_use_before_what_an_earlier_run_decided(
    bits: int, fields: dict, now: int
) -> None:
    resumed = Steering(GQSGDConfig(**{"auto": True, **fields}), 2)
    resumed.resume(steered(decided(bits)).state())
    report = resumed.report(2)
    assert resumed.config.num_bits == now
    assert f"; {now} bits at present; the run before took {bits} bits from step 70 on" in report
    assert "auto takes" not in report


def test_lower_bounds_and_decisions_that_no_time_has_made_are_called_so() -> None:
    bounds = replace(decided(16), predicted={32: None, 16: 0.00476}, at_least=(16,))
    assert "16 bits 10 ms (predicted at least 4.76 ms)" in bounds.describe()
    assert Decision.from_dict(json.loads(json.dumps(bounds.to_dict()))) == bounds
    noise = Decision(50, 4, {}, "variance of rounding over sampling variance: 4 bits 0.01", {32: None, 4: None})
    assert noise.describe().startswith("auto takes 4 bits from step 50 on (variance of rounding")


@pytest.mark.parametrize(
    "entry",
    [
        {"total_bits": -1},
        {"total_steps": -5},
        {"total_steps": 2**70},
        {"inbox": {"3": [[2**70], [0]]}},
        {"inbox": {"-3": [[1], [0]]}},
    ],
)
def test_numbers_that_no_run_has_are_refused_when_they_are_loaded(entry: dict) -> None:
    steering = steered(decided(4))
    with pytest.raises(ConfigError, match="'auto' cannot be read"):
        steering.resume(steering.state() | entry)


def test_a_decision_for_bits_that_nothing_has_is_refused_where_the_noise_decides() -> None:
    steering = Steering(GQSGDConfig(bits="auto"), 2)
    row = replace(decided(4), bits=77).to_dict()
    with pytest.raises(ConfigError, match="77, not one of"):
        steering.resume(steering.state() | {"decisions": [row]})


def test_a_decision_is_printed_where_no_logging_was_set_up_and_logged_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    steering = steered(decided(4), says=True)
    with caplog.at_level(logging.INFO, "lightning_gqsgd"):
        steering._say_from(0)
    assert "gqsgd: auto takes 4 bits" in caplog.text
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(announcing.logger, "propagate", False)  # so that pytest's handlers are not there
    steered(decided(4))._say_from(0)
    assert capsys.readouterr().err == ""
    steering._say_from(0)
    assert capsys.readouterr().err.startswith("gqsgd: auto takes 4 bits")
