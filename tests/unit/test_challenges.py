"""Plain DDP has its turn where other bits win a trial by less than the hook may cost."""

from __future__ import annotations

import json

import pytest

from lightning_gqsgd.adaptive.trials import PlainDDP, Trials
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.spec.decisions import LAG, Rules
from tests.unit.test_trials import ALLOW, constant, run


def _challenged() -> Trials:
    """Trials in which 4 bits have won with the hook by little, so that plain DDP is to have its turn."""
    trials = Trials(ALLOW)
    chosen: list[int] = []
    while not trials.decisions:
        if len(chosen) >= LAG:
            trials.observe(len(chosen) - LAG, {32: 1.0, 16: 2.0, 8: 2.0, 4: 0.9}[chosen[-LAG]])
        chosen.append(trials.choose(len(chosen), PlainDDP("", is_countable=True)))
    return trials


def test_plain_ddp_has_its_turn_where_other_bits_win_by_less_than_the_hook_may_cost() -> None:
    trials = _challenged()
    assert trials.bits == 32
    assert trials.is_resting
    assert trials.is_trying
    assert "by less than the hook may cost at 32 bits; plain DDP takes over" in trials.decisions[0].reason
    trials.begin_rest()
    assert trials.watched([0.88] * (Rules.latest - 1)) is None
    assert trials.watched([0.88] * Rules.latest) == 0.88
    trials.rest(10, None, 70)
    assert trials.is_trying
    trials.rest(10, 0.94, 80)
    assert trials.is_resting
    assert not trials.is_trying
    assert [(row.bits, row.seconds[32]) for row in trials.decisions] == [(32, 1.0), (32, 0.94)]
    assert "plain DDP, which stays" in trials.decisions[1].describe()
    trials.rest(10, 0.94 * (1 + Rules.drift) + 0.01, 90)  # the watch goes by the steps of plain DDP
    assert not trials.is_resting


def test_steps_that_are_shorter_than_the_hook_explains_begin_another_trial_at_the_end_of_plain_ddps_turn() -> None:
    trials = _challenged()
    trials.begin_rest()
    trials.rest(10, 0.4, 80)  # the trial has measured all bits while steps were slow
    assert (len(trials.decisions), trials.is_resting) == (2, False)
    run(trials, range(80, 180), constant({32: 0.4, 16: 0.5, 8: 0.5, 4: 0.1}))
    assert "steps became 60% shorter" in trials.decisions[-1].reason
    assert trials.bits == 4


def test_bits_that_are_shorter_than_plain_ddp_are_taken_after_its_turn_which_costs_credit() -> None:
    trials = _challenged()
    trials.begin_rest()
    credit = trials._credit
    trials.rest(10, None, 70)
    trials.rest(10, 0.96, 80)
    assert (trials.bits, trials.is_resting, trials.is_trying) == (4, False, False)
    assert trials._credit < credit - 15
    assert (trials.decisions[1].step, trials.decisions[1].seconds[32]) == (80, 0.96)
    assert set(run(trials, range(80, 180), constant({4: 0.9}))) == {4}
    assert len(trials.decisions) == 2


def test_bits_that_have_won_are_taken_where_the_hook_does_not_leave_its_place() -> None:
    trials = _challenged()
    chosen = run(trials, range(100, 130), constant({32: 1.0, 4: 0.9}))
    assert chosen == [32] * Rules.latest + [4] * (30 - Rules.latest)
    assert trials.decisions[1].reason == "plain DDP could not take over"
    assert not trials.is_trying


@pytest.mark.parametrize(
    ("can_rest", "least", "allow"), [(False, 0.9, ALLOW), (True, 0.7, ALLOW), (True, 0.9, (16, 4))]
)
def test_plain_ddp_has_no_turn_where_it_cannot_come_or_cannot_win(
    can_rest: bool, least: float, allow: tuple[int, ...]
) -> None:
    trials = Trials(allow)
    lengths = constant({32: 1.0, 16: 1.0, 8: 2.0, 4: least})
    run(trials, range(100), lengths, plain=PlainDDP("", is_countable=can_rest))
    assert [row.bits for row in trials.decisions] == [4]
    assert not trials.is_trying


def test_a_turn_of_plain_ddp_goes_on_in_a_resumed_run() -> None:
    saved = json.loads(json.dumps(_challenged().to_dict()))
    again = Trials.resumed(ALLOW, saved, is_same_world=True)
    assert again.is_trying
    assert again.is_resting
    again.begin_rest()
    again.rest(10, 0.96, 80)
    assert again.bits == 4
    assert not Trials.resumed(ALLOW, saved, is_same_world=False).is_trying
    assert not Trials.resumed((32, 16), saved, is_same_world=True).is_trying
    assert not Trials.resumed(ALLOW, saved | {"challenge": None}, is_same_world=True).is_trying
    del saved["challenge"]  # as versions before it wrote
    assert not Trials.resumed(ALLOW, saved, is_same_world=True).is_trying


@pytest.mark.parametrize(
    "challenge", [4, {}, {"bits": 4, "seconds": {}}, {"bits": "x", "seconds": {4: 1.0}}, {"bits": 4, "seconds": 3}]
)
def test_a_turn_of_plain_ddp_that_cannot_be_read_is_an_error(challenge: object) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Trials.resumed(ALLOW, _challenged().to_dict() | {"challenge": challenge}, is_same_world=True)
