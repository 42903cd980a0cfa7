"""A start waits for a rank that compiles for long, and not for one that died, stopped or left while it compiled."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.local_steps.optimizer import LocalSteps
from lightning_gqsgd.wire.engine import Engine
from tests.distributed.models import fingerprint, mlp, train
from tests.distributed.ranks import on_ranks, run
from tests.reliability.test_forks import code_of_a_child_that_drops

#: The process group's timeout, and what it takes beyond it at most, in seconds.
TIMEOUT_S, BEYOND_S = 4.0, 10.0


def _register(**fields: Any) -> str:
    model = DistributedDataParallel(mlp(64))
    state = register_gqsgd(model, **fields)
    train(model, dist.get_rank(), range(2))
    state.close()
    return fingerprint(model)


def _reduce() -> str:
    mean = all_reduce(torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank())))
    close()
    return str(mean.sum())


def _local_steps() -> str:
    model = mlp(64)
    steps = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    steps.close()
    return fingerprint(model)


#: What compiles kernels; each gives what has the same bits on all ranks.
STARTS: dict[str, Callable[[], str]] = {
    "register_gqsgd": _register,
    "with other groups for other bits": partial(_register, auto=True),
    "all_reduce": _reduce,
    "LocalSteps": _local_steps,
}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    """Stand still, but not with the lock of the store's file, until a shell ends this process."""
    time.sleep(0.5)
    subprocess.Popen(["/bin/sh", "-c", f"sleep {3 * TIMEOUT_S}; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _be_slow() -> None:
    time.sleep(2 * TIMEOUT_S)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _refuse() -> None:
    raise ConfigError("no compiler is installed")


@contextmanager
def _compiling(fault: Callable[[], None], on: bool) -> Iterator[list[float]]:
    """A fault in this rank's compiler, if it is ``on``; gives the time at which kernels were compiled first."""
    compiled = Engine.compile
    begun: list[float] = []

    def compile_with_a_fault(*arguments: Any) -> None:
        begun.append(time.monotonic())
        if on and len(begun) == 1:
            fault()
        compiled(*arguments)

    Engine.compile = compile_with_a_fault  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        Engine.compile = compiled  # type: ignore[method-assign]


def _beating() -> int:
    """How many threads of this process give signs of life."""
    return sum(thread.name == "gqsgd-heartbeat" for thread in threading.enumerate())


def _seconds_until_error(rank: int, start: str, faults: dict[int, Callable[[], None]]) -> tuple[str, float, int]:
    """What a start says where some ranks' compilers have faults, the seconds until then, and the threads left."""
    fault = faults.get(rank, _be_slow)
    with (
        _compiling(fault, rank in faults) as begun,
        pytest.raises((CollectiveError, ConfigError, KeyboardInterrupt)) as e,
    ):
        STARTS[start]()
    return f"{e.type.__name__}: {e.value}", time.monotonic() - begun[0], _beating()


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_dies_while_it_compiles_is_an_error_within_the_timeout(start: str, tmp_path: Path) -> None:
    first, _, third = run(_seconds_until_error, 3, tmp_path, start, {1: _die}, collective_timeout=TIMEOUT_S, dies=(1,))
    for text, seconds, threads in (first, third):
        assert "CollectiveError" in text
        assert "no sign of life from rank 1 for 4 s" in text
        assert seconds < TIMEOUT_S + BEYOND_S
        assert threads == 0


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_stops_while_it_compiles_counts_as_dead(odd: int, tmp_path: Path) -> None:
    faults = {odd: _stop}
    answers = run(
        _seconds_until_error, 3, tmp_path, "register_gqsgd", faults, collective_timeout=TIMEOUT_S, dies=(odd,)
    )
    for text, seconds, _ in answers[:odd] + answers[odd + 1 :]:
        assert f"no sign of life from rank {odd} for 4 s" in text
        assert seconds < 3 * TIMEOUT_S  # while the rank was there


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
@on_ranks(2, collective_timeout=TIMEOUT_S)
def test_ranks_wait_for_one_that_is_alive_and_compiles_for_longer_than_the_timeout(
    rank: int, start: str
) -> tuple[str, int, int]:
    """Bits after a start in which one rank compiles for twice the timeout, a forked child's exit code, and threads."""
    slow = 1
    codes = []

    def fork_and_be_slow() -> None:
        _be_slow()
        codes.append(code_of_a_child_that_drops([]))

    with _compiling(fork_and_be_slow, rank == slow):
        bits = STARTS[start]()
    result = bits, sum(codes), _beating()
    assert result[1:] == (0, 0)
    return result


@pytest.mark.slow
def test_a_rank_hears_what_went_wrong_elsewhere_when_it_has_compiled_for_longer_than_the_timeout(
    tmp_path: Path,
) -> None:
    faults = {0: _be_slow, 1: _refuse}
    first, second, third = run(
        _seconds_until_error, 3, tmp_path, "register_gqsgd", faults, collective_timeout=TIMEOUT_S
    )
    assert "ConfigError: no compiler is installed" in second[0]
    for text, seconds, threads in (first, third):
        assert "rank 1 has left: no compiler is installed" in text
        assert seconds < 2 * TIMEOUT_S + BEYOND_S
        assert threads == 0


def test_an_interrupt_of_one_rank_while_it_compiles_ends_the_waiting_of_the_others(tmp_path: Path) -> None:
    first, second = run(_seconds_until_error, 2, tmp_path, "register_gqsgd", {1: _interrupt}, collective_timeout=60.0)
    assert "KeyboardInterrupt" in second[0]
    assert "rank 1 has left: KeyboardInterrupt" in first[0]
    assert first[1] < BEYOND_S
