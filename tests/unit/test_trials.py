"""The state machine that chooses bits from the lengths of steps, on made-up lengths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gqsgd.adaptive.prediction import Measured, predicted_steps
from lightning_gqsgd.adaptive.trials import UNKNOWN, PlainDDP, Predictor, Trials
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.spec.decisions import LAG, Decision, Rules
from tests.errors import check_refused_in_one_line

ALLOW = (32, 16, 8, 4)
Length = Callable[[int, int], float | None]  # of a step, by its number and its bits


def run(
    trials: Trials,
    steps: range,
    length: Length,
    exposed_s: float = 0.5,
    backward_s: float = 0.2,
    plain: PlainDDP = UNKNOWN,
) -> list[int]:
    """The bits of all steps; lengths are known `LAG` steps later."""
    chosen: list[int] = []
    for step in steps:
        if step - LAG in steps:
            seconds = length(step - LAG, chosen[step - LAG - steps.start])
            trials.observe(step - LAG, seconds, exposed_s, backward_s)
        chosen.append(trials.choose(step, plain))
    return chosen


def constant(lengths: dict[int, float]) -> Length:
    return lambda step, bits: lengths[bits]


@given(st.lists(st.floats(0.001, 10.0), min_size=4, max_size=4), st.integers(0, 10**6))
@settings(max_examples=100)
def test_stationary_lengths_end_in_the_widest_candidate_within_the_tie_of_the_shortest(
    lengths: list[float], start: int
) -> None:
    of_bits, trials, rules = dict(zip(ALLOW, lengths, strict=True)), Trials(ALLOW), Rules()
    chosen = run(trials, range(start, start + 200), constant(of_bits))
    expected = next(bits for bits in ALLOW if of_bits[bits] <= min(lengths) * (1 + rules.tie))
    assert len(trials.decisions) == 1
    assert trials.decisions[0].bits == expected
    assert set(chosen[-50:]) == {expected}
    assert trials.decisions[0].step - start < rules.settling + rules.rounds * rules.block * len(ALLOW) + 2 * LAG


lengths_or_none = st.one_of(st.none(), st.floats(1e-6, 100.0))


@given(st.lists(lengths_or_none, min_size=50, max_size=400), st.integers(0, 2**32))
@settings(max_examples=50)
@pytest.mark.slow
def test_ranks_that_know_the_same_lengths_choose_alike_whatever_the_lengths_are(
    lengths: list[float | None], seed: int
) -> None:
    def length(step: int, bits: int) -> float | None:
        return lengths[(step * 7 + bits + seed) % len(lengths)]

    first, second = Trials(ALLOW), Trials(tuple(reversed(ALLOW)))
    assert run(first, range(400), length) == run(second, range(400), length)
    assert first.decisions == second.decisions


@given(st.integers(0, 2**32), st.floats(1.2, 20.0))
@settings(max_examples=20)
def test_trials_take_a_bounded_share_of_the_steps_on_a_machine_that_never_rests(seed: int, factor: float) -> None:
    def length(step: int, bits: int) -> float:
        noisy = hash((seed, step // 60, bits)) % 2
        return 0.1 * factor**noisy

    trials, steps, trying = Trials(ALLOW), 4000, 0
    for step in range(steps):
        if step >= LAG:
            trials.observe(step - LAG, length(step - LAG, 0))
        trials.choose(step)
        trying += trials.is_trying
    cost = Rules.longest_trial(len(ALLOW))
    assert trying <= cost * (1 + Rules.most_trials) + Rules.share * steps + cost


def test_native_wins_ties() -> None:
    trials = Trials(ALLOW)
    run(trials, range(100), constant({32: 1.015, 16: 1.0, 8: 1.0, 4: 1.0}))
    assert trials.bits == 32
    assert "within 2% of" in trials.decisions[0].reason


def test_a_hopeless_candidate_has_one_turn_only() -> None:
    trials = Trials(ALLOW)
    chosen = run(trials, range(100), constant({32: 4.0, 16: 2.1, 8: 1.1, 4: 1.0}))
    assert trials.bits == 4
    rules = Rules()
    assert chosen.count(32) <= rules.settling + rules.block
    assert chosen.count(16) <= rules.block + LAG  # until its lengths and those of the shortest are known
    assert chosen.count(8) == rules.block * rules.rounds


def test_a_single_long_step_does_not_make_a_candidate_hopeless() -> None:
    def length(step: int, bits: int) -> float:
        return 50.0 if step % 11 == 0 else {32: 1.0, 16: 1.3, 8: 1.3, 4: 1.3}[bits]

    trials = Trials(ALLOW)
    run(trials, range(100), length)
    assert trials.bits == 32


@pytest.mark.parametrize("direction", ["slower", "faster"])
def test_a_link_that_changes_is_noticed_and_the_right_choice_is_made_within_100_steps(direction: str) -> None:
    slow, fast = {32: 4.0, 16: 2.2, 8: 1.4, 4: 1.0}, {32: 0.5, 16: 0.6, 8: 0.7, 4: 0.7}
    before, after = (fast, slow) if direction == "slower" else (slow, fast)

    def length(step: int, bits: int) -> float:
        return (before if step < 200 else after)[bits]

    trials = Trials(ALLOW)
    chosen = run(trials, range(400), length)
    wanted = {"slower": 4, "faster": 32}[direction]
    assert chosen[199] == {"slower": 32, "faster": 4}[direction]
    assert set(chosen[300:]) == {wanted}
    assert len(trials.decisions) == 2
    assert ("longer" if direction == "slower" else "shorter") in trials.decisions[1].reason


def _first_step_of_a_second_trial(change: Callable[[int], float], expected: bool = True) -> int:
    """The number of steps after step 200 at which a trial begins, where steps are longer by a factor from then on."""

    def length(step: int, bits: int) -> float:
        return {32: 1.0, 16: 2.1, 8: 2.1, 4: 2.1}[bits] * (change(step - 200) if step >= 200 else 1.0)

    trials = Trials(ALLOW)
    run(trials, range(400), length)
    assert len(trials.decisions) == 1 + expected
    return trials.decisions[-1].step - 200


def test_a_jump_is_noticed_sooner_than_a_drift() -> None:
    drift = _first_step_of_a_second_trial(lambda after: 1.4)
    jump = _first_step_of_a_second_trial(lambda after: 1.6)
    assert drift - jump >= 10


def test_a_disturbance_of_less_than_half_of_the_steps_is_no_jump() -> None:
    _first_step_of_a_second_trial(lambda after: 3.0 if after < Rules.latest // 2 - 1 else 1.0, expected=False)


@given(st.lists(st.floats(1e-6, 100.0), max_size=50))
def test_the_watch_goes_by_a_whole_window_or_by_a_jump(lengths: list[float]) -> None:
    trials, rules = Trials(ALLOW), Rules()
    run(trials, range(100), constant({32: 1.0, 16: 2.1, 8: 2.1, 4: 2.1}))
    now = trials.watched(lengths)
    latest = median(lengths[-rules.latest :]) if len(lengths) >= rules.latest else 1.0
    if not 1 / (1 + rules.jump) <= latest <= 1 + rules.jump:
        assert now == latest
    else:
        assert now == (median(lengths) if len(lengths) == rules.window else None)


def test_without_any_comparable_step_the_widest_candidate_stays() -> None:
    trials = Trials(ALLOW)
    chosen = run(trials, range(200), lambda step, bits: None)
    assert len(trials.decisions) == 1
    assert set(chosen[-50:]) == {trials.bits}
    assert "no step could be measured" in trials.decisions[0].reason


def test_a_resumed_run_goes_on_with_the_decision_and_without_a_trial() -> None:
    lengths = constant({32: 4.0, 16: 2.2, 8: 1.0, 4: 1.4})
    trials = Trials(ALLOW)
    run(trials, range(150), lengths)
    saved = json.loads(json.dumps(trials.to_dict()))
    resumed = Trials.resumed(ALLOW, saved, is_same_world=True)
    assert set(run(resumed, range(150, 400), lengths)) == {8}
    assert resumed.decisions == trials.decisions
    elsewhere = Trials.resumed(ALLOW, saved, is_same_world=False)
    chosen = run(elsewhere, range(150, 400), constant({32: 1.0, 16: 2.2, 8: 3.0, 4: 3.4}))
    assert chosen[0] == 8
    assert chosen[-1] == 32
    assert "another number of ranks" in elsewhere.decisions[-1].reason


def test_a_run_that_was_saved_during_a_trial_tries_again() -> None:
    lengths = constant({32: 4.0, 16: 2.2, 8: 1.0, 4: 1.4})
    trials = Trials(ALLOW)
    run(trials, range(20), lengths)
    assert trials.is_trying
    resumed = Trials.resumed(ALLOW, trials.to_dict(), is_same_world=True)
    assert run(resumed, range(20, 200), lengths)[-1] == 8


def test_a_decision_for_bits_that_are_no_longer_allowed_is_not_taken_over() -> None:
    trials = Trials(ALLOW)
    run(trials, range(150), constant({32: 4.0, 16: 2.2, 8: 1.4, 4: 1.0}))
    resumed = Trials.resumed((32, 8), trials.to_dict(), is_same_world=True)
    assert resumed.choose(150) == 32


def test_bits_that_the_saved_run_was_not_allowed_are_tried_soon() -> None:
    lengths, trials = constant({32: 1.0, 16: 2.2, 8: 1.4, 4: 1.3}), Trials((8, 4))
    run(trials, range(150), lengths)
    assert trials.bits == 4
    saved = json.loads(json.dumps(trials.to_dict()))
    resumed = Trials.resumed(ALLOW, saved, is_same_world=True)
    assert resumed.choose(150) == 4
    assert set(run(resumed, range(151, 300), lengths)[-20:]) == {32}
    assert "32, 16 bits are allowed now" in resumed.decisions[-1].reason
    for allow in ((8, 4), (4,)):  # what was left out needs no trial
        same = Trials.resumed(allow, saved, is_same_world=True)
        assert set(run(same, range(150, 300), lengths)) == {4}


@pytest.mark.parametrize("state", [{}, {"decisions": 3}, {"decisions": [{"step": 1}], "bits": 8}])
def test_a_damaged_state_is_refused_in_one_line(state: dict) -> None:
    check_refused_in_one_line(ConfigError, "'auto' cannot be read", Trials.resumed, ALLOW, state, is_same_world=True)


def predictor(ranks: int = 2) -> Predictor:
    """The predictor of the candidates that a configuration has by default."""
    candidates = GQSGDConfig(auto=True).candidates()
    return partial(predicted_steps, {bits: resolve(config, ranks) for bits, config in candidates.items()}, ranks)


def test_where_steps_wait_for_nothing_only_the_gradient_as_it_is_has_a_turn() -> None:
    trials = Trials(ALLOW, predictor=predictor())
    chosen = run(trials, range(60), constant(dict.fromkeys(ALLOW, 1.0)), exposed_s=0.01)
    assert set(chosen) == {32}
    (decision,) = trials.decisions
    assert decision.seconds == {32: 1.0}
    assert decision.predicted[32] is None
    assert all(0.98 < (decision.predicted[bits] or 0) < 1.0 for bits in (16, 8, 4))
    assert "16, 8, 4 bits were not tried, because they are predicted not to win" in decision.reason
    assert "4 bits not tried (predicted at least 99" in decision.describe()
    assert decision.step < 20  # a trial of all candidates takes about 50


def test_on_a_slow_link_the_fewest_bits_are_tried_second_and_what_cannot_win_is_left_out() -> None:
    lengths = {32: 4.0, 16: 2.1, 8: 1.4, 4: 1.2}
    trials = Trials(ALLOW, predictor=predictor())
    chosen = run(trials, range(100), constant(lengths), exposed_s=3.5, backward_s=0.3)
    order = list(dict.fromkeys(chosen))
    assert order == [32, 4, 8]
    (decision,) = trials.decisions
    assert decision.bits == 4
    assert set(decision.seconds) == {32, 8, 4}
    assert decision.predicted[32] is None
    # With the costs that 32 bits and 4 bits have shown.
    assert decision.predicted[8] == pytest.approx(1.4, rel=0.15)
    assert decision.predicted[16] == pytest.approx(2.1, rel=0.15)
    # Before anything was known of the codec: a lower bound.
    assert 0.5 < (decision.predicted[4] or 0) < 0.9
    assert "8 bits 1.4 s (predicted" in decision.describe()
    assert decision.at_least == (16, 4)  # 4 bits were the first with codes, and rounding to 16 bits is never known


def test_candidates_that_a_prediction_leaves_a_chance_are_tried_and_the_measured_lengths_decide() -> None:
    lengths = {32: 1.0, 16: 0.9, 8: 0.5, 4: 0.7}  # 4 bits should be shorter than 8, and are not
    trials = Trials(ALLOW, predictor=predictor())
    run(trials, range(100), constant(lengths), exposed_s=0.6)
    assert trials.bits == 8


def test_nothing_is_left_out_where_steps_turn_out_shorter_than_they_could_be() -> None:
    def length(step: int, bits: int) -> float:  # the machine is busy until all else has been predicted
        return 1.0 if step < 10 else {32: 0.3, 16: 0.3, 8: 0.25, 4: 0.3}[bits]

    trials = Trials(ALLOW, predictor=predictor())
    chosen = run(trials, range(100), length, exposed_s=0.2)
    assert set(chosen) == set(ALLOW)
    assert trials.bits == 8


@given(st.lists(lengths_or_none, min_size=50, max_size=200), st.floats(0.0, 1.0), st.integers(0, 2**32))
@settings(max_examples=5)
def test_ranks_predict_and_choose_alike_whatever_the_lengths_are(
    lengths: list[float | None], exposed_s: float, seed: int
) -> None:
    def length(step: int, bits: int) -> float | None:
        return lengths[(step * 7 + bits + seed) % len(lengths)]

    first, second = (Trials(ALLOW, predictor=predictor(3)) for _ in range(2))
    steps = range(120)
    assert run(first, steps, length, exposed_s) == run(second, steps, length, exposed_s)
    assert first.decisions == second.decisions


def test_without_a_known_wait_there_is_no_prediction_and_every_candidate_is_tried() -> None:
    trials = Trials(ALLOW, predictor=predictor())
    chosen = run(trials, range(100), constant({32: 1.0, 16: 0.9, 8: 0.8, 4: 0.7}), exposed_s=float("nan"))
    assert set(chosen) == set(ALLOW)
    assert trials.decisions[0].predicted == dict.fromkeys(ALLOW)
    assert "predicted" not in trials.decisions[0].describe()
    assert predictor()({8: Measured(1.0, 0.5, 0.1)}) == dict.fromkeys(ALLOW)  # 32 bits are what all else starts from
    config = resolve(GQSGDConfig(bits=4, reducer="hierarchical", node_size=2), 4)
    levels = {32: resolve(GQSGDConfig(bits=32), 4), 4: config}
    assert predicted_steps(levels, 4, {32: Measured(1.0, 0.5, 0.1)}) == {32: None, 4: None}


def test_predictions_are_kept_in_states_and_rows_of_earlier_versions_have_none() -> None:
    decision = Decision(7, 4, {32: 1.0, 4: 0.5}, "first trial", {32: None, 4: 0.4})
    assert Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) == decision
    assert Decision.from_dict({"step": 7, "bits": 4, "seconds": {}, "reason": ""}).predicted == {}


def test_a_candidate_that_is_forbidden_is_left_at_once_and_one_that_is_permitted_is_tried() -> None:
    lengths, trials = constant({32: 4.0, 16: 2.2, 8: 1.4, 4: 1.0}), Trials(ALLOW)
    trials.permit((32,), 0, "nothing is known")
    assert set(run(trials, range(30), lengths)) == {32}
    assert trials.decisions == []
    trials.permit((32, 16, 8), 30, "noise")
    chosen = run(trials, range(30, 100), lengths)
    assert set(chosen) == {32, 16, 8}
    assert chosen[-1] == 8
    trials.permit(ALLOW, 100, "more noise")
    assert run(trials, range(100, 200), lengths)[-1] == 4
    assert "4 bits are allowed" in trials.decisions[-1].reason
    trials.permit((32, 16), 200, "less noise")
    assert trials.choose(200) == 16
    assert trials.decisions[-1] == Decision(200, 16, {32: 4.0, 16: 2.2}, "less noise", dict.fromkeys(ALLOW))


def test_a_candidate_that_is_forbidden_during_its_turn_has_no_further_step() -> None:
    lengths, trials = constant(dict.fromkeys(ALLOW, 1.0)), Trials(ALLOW)
    run(trials, range(Rules.settling + 3 * Rules.block + 2), lengths)
    assert trials.bits == 4
    trials.permit((32, 16, 8), 19, "noise")
    assert 4 not in run(trials, range(19, 100), lengths)
    assert len(trials.decisions) == 1


def test_a_candidate_that_is_forbidden_before_its_first_turn_needs_no_prediction() -> None:
    trials = Trials(ALLOW, predictor=predictor())
    length = constant({32: 4.0, 16: 2.2, 8: 1.4, 4: 1.0})
    almost_over = Rules.settling + Rules.block + LAG - 1  # the first turn, some of whose lengths are known
    assert set(run(trials, range(almost_over), length, exposed_s=3.5)) == {32}
    trials.permit((32, 8, 4), almost_over, "noise")
    assert 16 not in run(trials, range(almost_over, 100), length, exposed_s=3.5)
    assert trials.decisions[-1].bits == 4


def _resting() -> Trials:
    """Trials that have kept 32 bits, whose hook has been left."""
    trials = Trials(ALLOW)
    run(trials, range(100), constant({32: 1.0, 16: 2.0, 8: 2.0, 4: 2.0}), plain=PlainDDP(""))
    assert trials.is_resting
    assert trials.decisions[-1].reason.endswith("plain DDP takes over")
    trials.begin_rest()
    return trials


def test_without_the_hook_steps_may_become_shorter_at_first_and_a_later_change_begins_a_trial() -> None:
    trials = _resting()
    trials.rest(10, None, 200)
    trials.rest(10, 0.76, 200)  # the trial's steps had the cost of the hook in them
    assert trials.is_resting
    trials.rest(10, 0.87, 200)
    assert trials.is_resting
    trials.rest(10, 1.064, 200)
    assert not trials.is_resting
    assert trials.is_trying
    run(trials, range(200, 300), constant({32: 3.0, 16: 2.0, 8: 2.0, 4: 1.0}))
    assert "steps became 40% longer" in trials.decisions[-1].reason
    assert trials.bits == 4
    assert not trials.is_resting
    assert "plain DDP" not in trials.decisions[-1].reason


def test_without_the_hook_steps_that_are_shorter_than_the_hook_explains_begin_a_trial() -> None:
    trials = _resting()
    trials.rest(10, 1 - Rules.hook - 0.01, 200)
    assert not trials.is_resting
    run(trials, range(200, 300), constant({32: 0.74, 16: 0.5, 8: 0.5, 4: 0.3}))
    assert "steps became 26% shorter" in trials.decisions[-1].reason
    assert trials.bits == 4


def test_a_hook_that_costs_more_than_is_assumed_costs_one_trial_more_and_not_one_after_another() -> None:
    trials = _resting()
    trials.rest(10, 0.6, 200)
    assert not trials.is_resting
    run(trials, range(200, 300), constant({32: 1.0, 16: 2.0, 8: 2.0, 4: 2.0}), plain=PlainDDP("", is_countable=True))
    assert (trials.bits, len(trials.decisions)) == (32, 2)
    trials.begin_rest()
    trials.rest(10, 0.6, 300)
    assert trials.is_resting
    trials.rest(10, 0.5, 400)  # the reference is plain DDP's now
    assert not trials.is_resting


@pytest.mark.parametrize("has_reference", [True, False])
def test_a_resumed_run_compares_plain_ddp_with_plain_ddp_if_the_saved_run_had_its_length(has_reference: bool) -> None:
    trials = _resting()
    if has_reference:
        trials.rest(10, 0.9, 200)
    again = Trials.resumed(ALLOW, json.loads(json.dumps(trials.to_dict())), is_same_world=True)
    assert again._watch.is_plain == has_reference
    run(again, range(200, 206), constant({32: 0.5}))
    again.begin_rest()
    again.rest(10, 0.76, 210)
    assert again.is_resting != has_reference
    older = {key: value for key, value in trials.to_dict().items() if key not in ("is_plain", "began_s")}
    again = Trials.resumed(ALLOW, older, is_same_world=True)
    again.begin_rest()
    again.rest(10, 0.76, 210)
    assert again.is_resting


def test_without_the_hook_longer_steps_begin_a_trial_at_once_if_the_credit_of_steps_is_enough() -> None:
    trials = _resting()
    trials._credit = 0.0
    trials.rest(10, 1.5, 200)
    assert trials.is_resting
    trials.rest(20 * Rules.longest_trial(len(ALLOW)), None, 200)
    trials.rest(10, 1.5, 200)
    assert not trials.is_resting


def test_nothing_rests_before_a_decision_for_measured_steps_of_32_bits() -> None:
    trials = Trials(ALLOW)
    assert not trials.is_resting
    saved = {"bits": 32, "reference_s": None, "credit": 0.0}
    measured, unmeasured = (Decision(3, 32, seconds, "first trial").to_dict() for seconds in ({32: 1.0}, {}))
    assert Trials.resumed(ALLOW, {**saved, "decisions": [measured]}, is_same_world=True).is_resting
    assert not Trials.resumed(ALLOW, {**saved, "decisions": [measured]}, is_same_world=False).is_resting
    assert not Trials.resumed(ALLOW, {**saved, "decisions": [unmeasured]}, is_same_world=True).is_resting
    quicker = Trials(ALLOW)
    run(quicker, range(100), constant({32: 4.0, 16: 2.0, 8: 2.0, 4: 1.0}))
    assert not quicker.is_resting


@pytest.mark.parametrize(
    "entry",
    [
        {"reference_s": "long"},
        {"reference_s": 0},
        {"reference_s": -1.0},
        {"reference_s": math.nan},
        {"reference_s": [1.0]},
        {"credit": math.nan},
        {"credit": None},
        {"credit": -math.inf},
        {"credit": math.inf},
        {"bits": 77},
        {"bits": 4.5},
        {"allow": (32, 77)},
        {"allow": 3},
        {"decisions": [{"step": 3, "bits": 77, "seconds": {}, "reason": ""}]},
        {"decisions": [{"step": -3, "bits": 4, "seconds": {}, "reason": ""}]},
        {"decisions": [{"step": 3, "bits": 4, "seconds": {"4": -1.0}, "reason": ""}]},
        {"decisions": [{"step": 3, "bits": 4, "seconds": {}, "reason": "", "predicted": {"4": -1.0}}]},
        {"challenge": {"bits": 77, "seconds": {77: 1.0}}},
        {"challenge": {"bits": 4, "seconds": {4: math.inf}}},
        {"challenge": {"bits": 4, "seconds": {4: 0.0}}},
    ],
)
def test_a_length_of_steps_that_no_step_can_have_is_an_error_when_it_is_loaded(entry: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Trials.resumed(ALLOW, _resting().to_dict() | entry, is_same_world=True)
