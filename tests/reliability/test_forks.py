"""A forked child that drops what its parent still uses."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.errors import ConfigError
from tests.distributed.models import train, wrapped
from tests.distributed.ranks import on_ranks


def code_of_a_child_that_drops(held: list[Any]) -> int:
    """Exit code of a forked child that empties a list, and collects what nothing refers to; -9: it had to be killed."""
    child = os.fork()
    if child == 0:
        held.clear()
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


@pytest.mark.slow
@on_ranks(2, collective_timeout=20)
def test_a_forked_child_does_not_end_the_groups_of_a_closed_hook(rank: int) -> None:
    model, state = wrapped({}, {})
    train(model, rank, range(1))
    groups = list(state._engine.communicator._groups.values())
    state.close()
    code = code_of_a_child_that_drops(groups)
    tensor = torch.ones(3)
    groups[0].allreduce([tensor]).wait()
    assert code == 0
    assert float(tensor.sum()) == 6.0


@pytest.mark.slow
@on_ranks(2, collective_timeout=20)
def test_a_forked_child_does_not_wait_for_the_works_that_an_error_has_left_behind(rank: int) -> None:
    gc.disable()  # the parent keeps the cycle of the error and its frames
    with suppress(ConfigError):
        all_reduce(torch.ones(3000), step=rank, async_op=True).wait()
    close()
    code = code_of_a_child_that_drops([])
    gc.enable()
    assert code == 0
    assert float(all_reduce(torch.ones(3000), bits=32).sum()) == 3000.0
