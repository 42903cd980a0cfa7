"""The state machine that chooses bits from the lengths of steps, on made-up lengths."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.tuning.trials import LAG, Rules, Trials

ALLOW = (32, 16, 8, 4)
Length = Callable[[int, int], float | None]  # of a step, by its number and its bits


def run(trials: Trials, steps: range, length: Length) -> list[int]:
    """The bits of all steps; lengths are known `LAG` steps later."""
    chosen: list[int] = []
    for step in steps:
        if step - LAG in steps:
            trials.observe(step - LAG, length(step - LAG, chosen[step - LAG - steps.start]))
        chosen.append(trials.choose(step))
    return chosen


def constant(lengths: dict[int, float]) -> Length:
    return lambda step, bits: lengths[bits]


@given(st.lists(st.floats(0.001, 10.0), min_size=4, max_size=4), st.integers(0, 10**6))
@settings(max_examples=200, deadline=None)
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
@settings(max_examples=100, deadline=None)
def test_ranks_that_know_the_same_lengths_choose_alike_whatever_the_lengths_are(
    lengths: list[float | None], seed: int
) -> None:
    def length(step: int, bits: int) -> float | None:
        return lengths[(step * 7 + bits + seed) % len(lengths)]

    first, second = Trials(ALLOW), Trials(tuple(reversed(ALLOW)))
    assert run(first, range(400), length) == run(second, range(400), length)
    assert first.decisions == second.decisions


@given(st.integers(0, 2**32), st.floats(1.2, 20.0))
@settings(max_examples=20, deadline=None)
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
    cost = Rules().longest_trial(len(ALLOW))
    assert trying <= cost * (1 + Rules().most_trials) + Rules().share * steps + cost


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
    saved = json.loads(json.dumps(trials.state()))
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
    resumed = Trials.resumed(ALLOW, trials.state(), is_same_world=True)
    assert run(resumed, range(20, 200), lengths)[-1] == 8


def test_a_decision_for_bits_that_are_no_longer_allowed_is_not_taken_over() -> None:
    trials = Trials(ALLOW)
    run(trials, range(150), constant({32: 4.0, 16: 2.2, 8: 1.4, 4: 1.0}))
    resumed = Trials.resumed((32, 8), trials.state(), is_same_world=True)
    assert resumed.choose(150) == 32


@pytest.mark.parametrize("state", [{}, {"decisions": 3}, {"decisions": [{"step": 1}], "bits": 8}])
def test_a_damaged_state_is_refused_in_one_line(state: dict) -> None:
    with pytest.raises(ConfigError, match="'auto' cannot be read") as caught:
        Trials.resumed(ALLOW, state, is_same_world=True)
    assert "\n" not in str(caught.value)
