"""Several connections between ranks give the bits of one, with every reducer, and ranks agree on their number."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_gqsgd import register_gqsgd
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.wire.communicator import Communicator
from tests.distributed.models import fingerprint, train, wrapped
from tests.distributed.ranks import on_ranks
from tests.errors import error_text

#: Four pieces, the last of which is short.
NUMEL = 3 * 524_288 + 1_001

MEANS: list[dict[str, Any]] = [
    {"bits": 8, "reducer": "two_shot"},
    {"bits": 4, "reducer": "gather", "sample_every": 1},
    {"bits": 8, "reducer": "sum"},
    {"bits": 5, "reducer": "tree", "codec": "exponential"},
    {"bits": 16},
    {"reducer": "native"},
    {"bits": 8, "reducer": "hierarchical", "node_size": 2},
]
TRAININGS: list[dict[str, Any]] = [
    {"bits": 8, "reducer": "two_shot"},
    {"codec": "linear", "bits": 8, "memory": "diana", "reducer": "two_shot"},
    {"bits": {"*": 4, "0.*": 8}},
]


def _used(rank: int, case: dict[str, Any], connections: int) -> tuple[torch.Tensor, set[int]]:
    """A mean, and the turns that were taken."""
    turns: set[int] = set()
    start = Communicator._start

    def record(communicator: Communicator, exchange: Any, stage: int, turn: int) -> Any:
        turns.add(turn)
        return start(communicator, exchange, stage, turn)

    torch.manual_seed(rank)
    with mock.patch.object(Communicator, "_start", record):
        means = [all_reduce(torch.randn(NUMEL), step=step, connections=connections, **case) for step in range(2)]
    close()
    return torch.stack(means), turns


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks(timeout=240)
def test_connections_change_no_bit(rank: int, ranks: int) -> None:
    for case in MEANS:
        one, only = _used(rank, case, 1)
        three, turns = _used(rank, case, 3)
        assert torch.equal(one, three), case
        assert only == {0}
        assert turns >= {0, 1}, (case, turns)  # a native mean is one piece, and others are four


def _trains(rank: int, fields: dict[str, Any]) -> str:
    torch.manual_seed(0)
    wide = torch.nn.Sequential(torch.nn.Linear(32, 40_000), torch.nn.ReLU(), torch.nn.Linear(40_000, 10))
    model, state = wrapped({"bucket_cap_mb": 4}, {"min_numel": 0, **fields}, wide)
    train(model, rank, range(3))
    state.close()
    return fingerprint(model)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_a_model_trained_over_several_connections_is_that_of_one(rank: int) -> list[str]:
    made = []
    for fields in TRAININGS:
        made += [_trains(rank, fields), _trains(rank, {**fields, "connections": 4})]
    assert made[::2] == made[1::2]
    assert len(set(made)) == 3
    return made


@on_ranks(2)
def test_ranks_with_other_numbers_of_connections_are_told(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    text = error_text(ConfigError, register_gqsgd, model, connections=1 + rank)
    assert "connections" in text


@on_ranks(2, collective_timeout=10)
def test_a_call_that_one_rank_refuses_leaves_all_ranks_at_the_same_connection(rank: int) -> None:
    one_piece = torch.full((2000,), float(rank))
    all_reduce(one_piece, connections=2)
    with pytest.raises(ConfigError, match=r"torch\.int32"):
        all_reduce(one_piece.int() if rank else one_piece, connections=2)
    mean = float(all_reduce(one_piece, connections=2).mean())
    close()
    assert mean == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("connections", [0, 17, 1.5, "4", True, None])
def test_other_numbers_are_refused(connections: Any) -> None:
    with pytest.raises(ConfigError, match="connections="):
        GQSGDConfig(connections=connections)


def test_every_number_of_bits_keeps_the_connections() -> None:
    automatic = GQSGDConfig(auto=True, connections=3)
    assert {config.connections for config in automatic.candidates().values()} == {3}
    assert {config.connections for config in GQSGDConfig(bits={"*": 4, "a": 32}, connections=2).by_bits().values()} == {
        2
    }
    assert GQSGDConfig(bits=4, connections=2).replaced(bits=32).connections == 2
