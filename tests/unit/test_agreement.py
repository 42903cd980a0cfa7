"""Cards on the wire."""

from __future__ import annotations

import json

import pytest
import torch

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.wire.agreement import CARD_BYTES, Card, compared


@pytest.mark.parametrize("error", ["short", "ω" * 1000, "\U0001f600" * 1000, "\n" * 1000, "x" * 5000])
@pytest.mark.parametrize("facts", [{"bits": 4}, {"exclude": ["*.bias"] * 1000}])
def test_a_card_with_any_error_and_any_facts_can_be_read_by_other_ranks(error: str, facts: dict[str, object]) -> None:
    steps = compared(Card("all_reduce", facts, error), 2, torch.device("cpu"))
    (exchange,) = next(steps)
    assert exchange.input.numel() == CARD_BYTES
    card = Card.from_json(bytes(exchange.input.tolist()).decode())
    assert card.purpose == "all_reduce"
    assert card.error
    assert error.startswith(card.error)

    other = compared(Card("all_reduce", {}), 2, torch.device("cpu"))
    (received,) = next(other)
    received.output[0] = received.input
    received.output[1] = exchange.input
    with pytest.raises(ConfigError, match="rank 1 refused"):
        next(other)


def test_a_card_that_fits_travels_as_it_is() -> None:
    card = Card("all_reduce", {"bits": 4}, "too few", is_own=False)
    (exchange,) = next(compared(card, 2, torch.device("cpu")))
    assert json.loads(bytes(exchange.input.tolist())) == ["all_reduce", {"bits": 4}, "too few", False, {}]
