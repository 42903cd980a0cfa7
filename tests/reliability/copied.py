"""Copies of one rank's model: in the same process, in a forked one, and in one that is started anew."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.session.copies import DetachedState
from tests.distributed.models import fingerprint, loss_of, train

#: Seconds in which a child ends.
CHILD_S = 120


def copied_and_saved(model: DistributedDataParallel, state: GQSGDState) -> None:
    """Copy, pickle and save a model and its hook's state; train nothing of it."""
    copied = copy.deepcopy(model)
    pickle.loads(pickle.dumps(state))  # noqa: S301 - its own bytes
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)
    del copied
    gc.collect()


def trained_copy(model: DistributedDataParallel, rank: int, steps: range, fields: dict[str, Any]) -> list[str]:
    """Copy a model, and train the copy and the model in turns: the copy without a hook, and then with one of its own.

    Returns hashes of both.
    """
    copied = copy.deepcopy(model)
    if not isinstance(copied._comm_hooks[0][1], DetachedState):
        raise AssertionError("the copy has the hook of its original")
    for step in steps:
        train(copied, rank, range(step, step + 1))
        train(model, rank, range(step, step + 1))
    without = fingerprint(copied)
    state = register_gqsgd(copied, **fields)
    for step in steps:
        train(model, rank, range(step, step + 1))
        train(copied, rank, range(step, step + 1))
    if state.step != len(steps):
        raise AssertionError(f"the copy's hook has counted {state.step} of {len(steps)} steps")
    state.close()
    return [without, fingerprint(copied), fingerprint(model)]


def check_forked(state: GQSGDState | None) -> None:
    """Fork a child that uses nothing, collects garbage and ends.

    Raises:
        AssertionError: the child could use the hook, or ended otherwise.
        TimeoutError: it did not end.
    """
    child = os.fork()
    if child == 0:
        try:
            gc.collect()
            os._exit(17 if state is not None and not state.is_closed else 0)
        finally:
            os._exit(18)
    deadline = time.monotonic() + CHILD_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise TimeoutError("a forked child did not end")
        time.sleep(0.01)
    _check_code(os.waitstatus_to_exitcode(ended[1]))


def check_spawned(model: DistributedDataParallel, state: GQSGDState) -> None:
    """Start a process anew that uses the model without the ranks; see `_use_without_ranks`.

    Raises:
        AssertionError: it failed.
        TimeoutError: it did not end.
    """
    pickled = pickle.dumps((model, state))
    child = multiprocessing.get_context("spawn").Process(target=_use_without_ranks, args=(model.module, pickled))
    child.start()
    child.join(CHILD_S)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise TimeoutError("a spawned child did not end")
    _check_code(child.exitcode)


def _check_code(code: int) -> None:
    if code:
        raise AssertionError(f"a child ended with exit code {code}")


def _use_without_ranks(module: nn.Module, pickled: bytes) -> None:
    """What a spawned child does with a module and a pickled DDP model, whose hook stays with the parent.

    The module works without any process group. The DDP model is refused by torch until there is one, and then it trains
    as a copy without a hook.
    """
    torch.set_num_threads(1)
    loss_of(module, 0, 0).backward()
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        pickle.loads(pickled)  # noqa: S301 - its parent's bytes
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, state = pickle.loads(pickled)  # noqa: S301
    assert isinstance(state, DetachedState), state
    before = fingerprint(model)
    train(model, 0, range(2))
    assert fingerprint(model) != before
    dist.destroy_process_group()
