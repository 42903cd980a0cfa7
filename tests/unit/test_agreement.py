"""Cards and stamps: what ranks tell each other, and what follows from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.wire.agreement import (
    CARD_BYTES,
    STEPS_KEPT,
    Agreed,
    Card,
    Stamp,
    StampCheck,
    StepCounter,
    Weights,
    compared,
    verdict,
)
from lightning_gqsgd.wire.build import this_build


@pytest.mark.parametrize("error", ["short", "ω" * 1000, "\U0001f600" * 1000, "\n" * 1000, "x" * 5000])
@pytest.mark.parametrize("facts", [{"bits": 4}, {"exclude": ["*.bias"] * 1000}])
def test_a_card_with_any_error_and_any_facts_can_be_read_by_other_ranks(error: str, facts: dict[str, object]) -> None:
    steps = compared(Card("all_reduce", facts, error), range(2), torch.device("cpu"))
    (exchange,) = next(steps)
    assert exchange.input.numel() == CARD_BYTES
    card = Card.from_json(bytes(exchange.input.tolist()).decode())
    assert card.purpose == "all_reduce"
    assert card.error
    assert error.startswith(card.error)

    other = compared(Card("all_reduce", {}), range(2), torch.device("cpu"))
    (received,) = next(other)
    received.output[0] = received.input
    received.output[1] = exchange.input
    with pytest.raises(ConfigError, match="rank 1 refused"):
        next(other)


def test_a_rank_that_refuses_waits_for_no_card_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the host would wait until the others come, which they may not."""
    steps = compared(Card("all_reduce", {}, "too few"), range(2), torch.device("cpu"))
    next(steps)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    with pytest.raises(StopIteration):
        next(steps)


def test_a_card_that_fits_travels_as_it_is() -> None:
    card = Card("all_reduce", {"bits": 4}, "too few", is_own=False)
    (exchange,) = next(compared(card, range(2), torch.device("cpu")))
    sent = json.loads(bytes(exchange.input.tolist()))
    assert sent == [this_build(), "all_reduce", {"bits": 4}, "too few", False, {}]


def test_only_the_ranks_that_refuse_for_the_first_reason_are_named() -> None:
    cards = [Card("f", {}, error) for error in ("", "one", "two", "one")]
    assert verdict(cards, range(4)) == "ranks 1 and 3 refused: one"
    assert verdict(cards, range(0, 8, 2)) == "global ranks 2 and 6 refused: one"


@pytest.mark.parametrize(
    "other", [{"error": "unknown field 'outlier'"}, {"purpose": "LocalSteps"}, {"facts": {"block_size": 128}}]
)
def test_ranks_of_another_build_are_named_before_what_follows_from_it(other: dict[str, Any]) -> None:
    """Such as a field that only one of the builds has, or another default."""
    cards = [Card("f", {})] + 2 * [Card(**{"purpose": "f", "facts": {}, **other}, build="0.1.0-wire3-0123456789ab")]
    builds = f"another build of lightning-gqsgd (0.1.0-wire3-0123456789ab) than rank 0 ({this_build()})"
    assert verdict(cards, range(3)) == f"ranks 1 and 2 run {builds}; install the same on all ranks"
    assert verdict(cards[:2], range(2)) == f"rank 1 runs {builds}; install the same on all ranks"


def stamped(check: StampCheck, *stamps: Stamp) -> None:
    """Let a check compare the stamps of all ranks, the first of which is this rank's."""
    steps = check.steps(stamps[0])
    (exchange,) = next(steps)
    for row, stamp in zip(exchange.output, stamps, strict=True):
        row.copy_(exchange.input)
        row[: len(stamp.row())] = torch.tensor(stamp.row())
    with pytest.raises(StopIteration):
        next(steps)


def test_a_step_lasts_as_long_as_on_the_slowest_rank_and_is_unknown_where_one_rank_does_not_know() -> None:
    check = StampCheck(range(2), torch.device("cpu"))
    stamped(check, Stamp(1, 5, 7, 300, (1,)), Stamp(1, 5, 7, 400, (2,)))
    stamped(check, Stamp(1, 6, 7, 300, (3,)), Stamp(1, 6, 7, 0, (4,)))
    assert check.take(5) == {5: Agreed(400, ((1,), (2,)))}
    assert check.take(6) == {6: Agreed(0, ((3,), (4,)))}
    assert check.take(9) == {}


def test_stamps_that_nobody_takes_are_forgotten() -> None:
    check = StampCheck(range(1), torch.device("cpu"))
    for step in range(2 * STEPS_KEPT):
        stamped(check, Stamp(0, step, 0))
    assert list(check.take(2 * STEPS_KEPT)) == list(range(STEPS_KEPT, 2 * STEPS_KEPT))


def test_only_the_step_after_a_jump_is_compared_first() -> None:
    steps = StepCounter()
    steps.go_to(7)
    assert (steps.number, steps.compares_first) == (7, True)
    steps.end()
    assert (steps.number, steps.compares_first) == (8, False)


def test_weights_of_a_tensor_subclass_are_not_compared() -> None:
    class Sharded(torch.Tensor):
        pass

    weights = torch.ones(4)
    assert Weights.of("name", weights, 0) is not None
    assert Weights.of("name", weights.as_subclass(Sharded), 0) is None
