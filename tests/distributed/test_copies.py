"""Copies, pickles and forks of what has a hook."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from lightning_gqsgd.ddp.functional import all_reduce
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.session.copies import DetachedState
from tests.distributed.models import fingerprint, train, wrapped
from tests.distributed.ranks import logged, on_ranks, run

#: One that remembers, and one that does not.
HOOKS: list[dict[str, Any]] = [{"bits": 4}, {"preset": "signsgd_ef"}, {"auto": True}]


def _saved_and_loaded(model: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@on_ranks(2)
def test_copies_of_a_model_have_no_hook_and_say_so_when_they_are_trained(rank: int) -> list[Any]:
    records = logged()
    found: list[Any] = []
    for hook in HOOKS:
        model, state = wrapped({"bucket_cap_mb": 0.03}, hook)
        alone, its_state = wrapped({"bucket_cap_mb": 0.03}, hook)
        train(model, rank, range(3))
        train(alone, rank, range(3))
        for make in (copy.deepcopy, copy.copy, _saved_and_loaded, lambda model: AveragedModel(model).module):
            other = make(model)
            assert isinstance(other, DistributedDataParallel)
            assert other._get_ddp_logging_data().get("comm_hook") in (None, "")
            if make is not copy.copy:  # which has the same parameters
                assert isinstance(other._comm_hooks[0][1], DetachedState)
                records.clear()
                train(other, rank, range(3, 5))
                assert len([text for text in records if "is a copy of one with a hook" in text]) == 1, records
                again = register_gqsgd(other, **hook)
                train(other, rank, range(5, 6))
                found.append(fingerprint(other))
                again.close()
        # The original goes on as if nothing had been copied.
        records.clear()
        train(model, rank, range(3, 6))
        train(alone, rank, range(3, 6))
        assert records == []
        assert fingerprint(model) == fingerprint(alone)
        detached = copy.deepcopy(state)
        assert (detached.step, detached.config["codec"]) == (6, state.requested.codec)
        assert not hasattr(detached, "before_forward")
        with pytest.raises(AttributeError, match="this is a copy of a hook's state .* no 'counters'"):
            _ = detached.counters
        state.close()
        its_state.close()
    return found


def _in_a_fork(what: Any) -> tuple[int, float]:
    """Exit code of a child that does something, and its seconds."""
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            what()
            code = 0
        finally:
            os._exit(code)
    signal.alarm(60)
    _, status = os.waitpid(child, 0)
    signal.alarm(0)
    return os.waitstatus_to_exitcode(status), time.monotonic() - begun


def _forked(rank: int) -> list[Any]:
    model, state = wrapped({}, {"bits": 4})
    train(model, rank, range(2))
    all_reduce(torch.ones(3000))
    holder = [model, state]
    del model, state

    def drop() -> None:
        holder.clear()
        gc.collect()

    def use() -> None:
        with pytest.raises(RuntimeError, match="this process was forked"):
            holder[1]._engine.check_open()
        holder[1].close()

    found = [_in_a_fork(drop), _in_a_fork(use)]
    model, state = holder
    train(model, rank, range(2, 4))  # the parent's connections are as they were
    mean = all_reduce(torch.full((3000,), float(rank)))
    state.close()
    return [*found, fingerprint(model), mean.tolist()]


def test_a_forked_child_leaves_the_hook_alone(tmp_path: Path) -> None:
    first, second = run(_forked, 2, tmp_path)
    assert first[2:] == second[2:]
    for code, seconds in [*first[:2], *second[:2]]:
        assert code == 0
        assert seconds < 30  # nothing is waited for: a child that waits for its parents' ranks ends after 60
