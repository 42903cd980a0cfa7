"""A parameter that one rank freezes, which DDP allows where parameters may be unused."""

from __future__ import annotations

from typing import Any

from tests.distributed.models import train
from tests.distributed.ranks import on_ranks
from tests.distributed.test_plain import LEAVES_AFTER, SMALL_BUCKETS, asks_for_a_trial, auto, carrier


@on_ranks(2)
def test_a_parameter_that_one_rank_freezes_does_not_part_ranks_when_they_change_places(rank: int) -> list[Any]:
    """It was the end of the processes, by SIGABRT, once plain DDP took over on the other rank only."""
    model, state = auto({**SMALL_BUCKETS, "find_unused_parameters": True})
    carriers = []
    first = model.module[0].bias
    for step in range(LEAVES_AFTER + 26):
        if step == LEAVES_AFTER + 12:
            asks_for_a_trial(state)
        first.requires_grad_(rank == 0)
        train(model, rank, range(step, step + 1))
        assert first.requires_grad == (rank == 0)
        carriers.append(carrier(model))
    state.close()
    result = [carriers, [p.tolist() for p in model.parameters() if p is not first]]
    assert set(result[0]) == {"gqsgd_hook", "plain"}
    assert result[0][-1] == "gqsgd_hook"
    return result
