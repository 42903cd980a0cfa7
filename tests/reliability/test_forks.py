"""A forked child that drops what its parent still uses."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch

from tests.distributed.models import train, wrapped
from tests.distributed.ranks import run


def _child_drops_the_groups_of_a_closed_hook(rank: int) -> tuple[int, float]:
    model, state = wrapped({}, {})
    train(model, rank, range(1))
    groups = list(state._engine.communicator._groups.values())
    state.close()
    child = os.fork()
    if child == 0:
        groups.clear()
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
        time.sleep(0.05)
    tensor = torch.ones(3)
    groups[0].allreduce([tensor]).wait()
    return os.waitstatus_to_exitcode(ended[1]), float(tensor.sum())


@pytest.mark.slow
def test_a_forked_child_does_not_end_the_groups_of_a_closed_hook(tmp_path: Path) -> None:
    assert run(_child_drops_the_groups_of_a_closed_hook, 2, tmp_path, collective_timeout=20) == [(0, 6.0)] * 2
