"""Local steps between processes: what users do by mistake, and what a process does beside."""

from __future__ import annotations

import copy
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.errors import CollectiveError, ConfigError
from tests.bits import bits_of
from tests.distributed.local_models import bits_of_anchors, bits_of_model, local_steps
from tests.distributed.models import batch, mlp, train_with
from tests.distributed.ranks import logged, on_ranks, run
from tests.errors import error_text


@on_ranks(2)
def test_weights_that_are_loaded_after_local_steps_began_are_an_error_on_all_ranks(rank: int) -> None:
    """Weights that all ranks load, and that one rank loads, after LocalSteps was made."""
    texts = []
    for loads in ((0, 1), (1,)):
        model = mlp()
        optimizer = local_steps(model, {"every": 4})
        if rank in loads:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        texts.append(error_text(ConfigError, train_with, model, optimizer, rank, range(1)))
        optimizer.close()
    assert all("load weights before LocalSteps is made" in text for text in texts)


@on_ranks(4)
def test_ddp_inside_of_nodes_and_local_steps_between_them_is_as_it_should_be(rank: int) -> list[str]:
    """What is said where DDP averages over the ranks of a node, and local steps over one rank of each node."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    said = logged()
    model = mlp()
    optimizer = local_steps(model, {"every": 2, "group": across[rank % 2]})
    train_with(DistributedDataParallel(model, process_group=nodes[rank // 2]), optimizer, rank, range(8))
    optimizer.finish()
    optimizer.close()
    first = [bits_of_model(model), *(word for word in said if "DistributedDataParallel" in word)]
    assert len(first) == 1
    return first


@on_ranks(2)
def test_a_model_that_is_called_through_ddp_beside_local_steps_is_said_once(rank: int) -> None:
    """What is said of a model that is called through DDP: one from before that is not used, and one that is."""
    words = []
    for is_used in (False, True):
        said = logged()
        model = mlp()
        wrapped = DistributedDataParallel(model) if not is_used else None
        optimizer = local_steps(model, {"every": 2})
        wrapped = wrapped or DistributedDataParallel(model)
        with torch.no_grad():
            wrapped(batch(rank, 0)[0])
        train_with(wrapped if is_used else model, optimizer, rank, range(8))
        optimizer.finish()
        copy.deepcopy(wrapped)
        optimizer.close()
        words.append([word for word in said if "DistributedDataParallel" in word])
    without, used = words
    assert without == []
    assert len(used) == 1
    assert "averages gradients in every step, so that local steps save nothing" in used[0]


@on_ranks(2)
def test_beginning_anew_leaves_nothing_of_the_past(rank: int) -> list[str]:
    """The bits of a run that begins anew with loaded weights within a round, and of a new LocalSteps with them."""
    weights = {name: value + 1 for name, value in mlp().state_dict().items()}
    results = []
    for begins_anew in (True, False):
        model = mlp()
        way: dict[str, Any] = {"every": 3, "delay": 1, "preset": "signsgd_ef", "outer_after": 0}
        if begins_anew:
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer = LocalSteps(model, inner, **way)
            train_with(model, optimizer, rank, range(7))
            model.load_state_dict(weights)
            optimizer.averages.start_anew()
        else:
            model.load_state_dict(weights)
            optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **way)
        # Dither goes by the number of averages so far.
        optimizer.averages.averages = 0
        train_with(model, optimizer, rank, range(7))
        optimizer.finish()
        optimizer.close()
        results.append(bits_of_model(model))
    assert results[0] == results[1]
    return results


def _refused(rank: int) -> list[str]:
    texts = []
    model = mlp()
    model.register_buffer("mask", torch.ones(1).expand(5))
    texts.append(error_text(ConfigError, local_steps, model, {}))
    model = mlp()
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    texts.append(error_text(ConfigError, LocalSteps, model, zero))
    optimizer = local_steps(model, {})
    with pytest.raises(AttributeError) as attribute:
        optimizer.inner = torch.optim.SGD(model.parameters(), lr=0.1)
    texts.append(str(attribute.value))
    optimizer.close()
    return texts


def test_what_breaks_local_training_is_refused_with_its_remedy(tmp_path: Path) -> None:
    for buffer, zero, inner in run(_refused, 2, tmp_path):
        assert "buffer 'mask' of shape (5,) is expanded" in buffer
        assert "a ZeroRedundancyOptimizer gives the parameters" in zero
        assert "make a new LocalSteps around the other optimizer" in inner


@on_ranks(2)
def test_several_modules_may_be_given_in_a_list_that_nobody_else_keeps(rank: int) -> list[str]:
    """Two modules in a list that was made for LocalSteps alone; by steps and by the clock."""
    results = []
    for every in (2, "50ms"):
        encoder, decoder = mlp(), nn.Linear(10, 4)
        inner = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        optimizer = LocalSteps(nn.ModuleList([encoder, decoder]), inner, every=every)
        train_with(nn.Sequential(encoder, decoder), optimizer, rank, range(4))
        optimizer.finish()
        optimizer.close()
        results.append(bits_of((*encoder.parameters(), *decoder.parameters())))
    return results


class _Alarm(Exception):
    pass


def _interrupted(rank: int) -> list[str]:
    """A signal's handler raises on the first rank, while it waits for the second."""

    def handler(*_: Any) -> None:
        raise _Alarm

    signal.signal(signal.SIGALRM, handler)
    model = mlp()
    optimizer = local_steps(model, {"every": 2})
    train_with(model, optimizer, rank, range(1))
    if rank == 1:
        time.sleep(2)
        train_with(model, optimizer, rank, range(1, 2))
        with pytest.raises(CollectiveError):
            optimizer.finish()
        return []
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(_Alarm):
        train_with(model, optimizer, rank, range(1, 2))
    texts = []
    for call in (optimizer.step, optimizer.finish):
        texts.append(error_text(RuntimeError, call))
    time.sleep(2)
    optimizer.close()
    return texts


def test_after_an_exception_in_a_wait_nothing_is_averaged_any_more(tmp_path: Path) -> None:
    texts, _ = run(_interrupted, 2, tmp_path, collective_timeout=10)
    assert len(texts) == 2
    assert all("has ended an average on this rank" in text for text in texts)


def _interrupted_in_use(rank: int) -> list[Any]:
    """An exception leaves the outer optimizer's step, after it has moved the anchor."""
    model = mlp()
    optimizer = local_steps(model, {"every": 2, "outer_after": 0})

    def interrupt(*_: Any) -> None:
        raise _Alarm

    train_with(model, optimizer, rank, range(1))
    optimizer.averages.outer.register_step_post_hook(interrupt)
    with pytest.raises(_Alarm):
        train_with(model, optimizer, rank, range(1, 2))
    anchors = bits_of_anchors(optimizer)
    texts = [error_text(RuntimeError, call) for call in (optimizer.step, optimizer.finish)]
    saved = optimizer.state_dict()["local_steps"]["under_way"]
    optimizer.close()
    return [texts, bits_of_anchors(optimizer) == anchors, saved]


def test_an_average_is_not_used_twice_after_an_exception_in_its_use(tmp_path: Path) -> None:
    for texts, is_same, saved in run(_interrupted_in_use, 2, tmp_path):
        assert all("has ended an average on this rank" in text for text in texts)
        assert is_same
        assert saved == []


def train_gradients(model: nn.Module, rank: int, step: int) -> None:
    """Set the gradients of a rank's step."""
    model.zero_grad()
    torch.manual_seed(100 * rank + step)
    model(torch.randn(4, 32)).square().mean().backward()


@on_ranks(2)
def test_a_default_device_changes_nothing(rank: int) -> list[list[str]]:
    """Bits with and without a default device on which no numbers are."""
    results = []
    for way in ({"every": 2, "inner_state": "average"}, {"every": 2, "preset": "gqsgd_predictive"}):
        bits = []
        for device in (None, "meta"):
            model = mlp()
            with torch.device(device or "cpu"):
                optimizer = local_steps(model, way)
            torch.set_default_device(None)
            for step in range(4):
                torch.set_default_device(None)
                train_gradients(model, rank, step)
                torch.set_default_device(device)
                optimizer.step()
            optimizer.finish()
            torch.set_default_device(None)
            optimizer.close()
            bits.append(bits_of_model(model))
        results.append(bits)
    assert all(usual == elsewhere for usual, elsewhere in results)
    return results


@pytest.mark.slow
@on_ranks(2)
def test_a_step_may_be_compiled(rank: int) -> str:
    model = mlp()
    optimizer = local_steps(model, {"every": 2})
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(4):
        train_gradients(model, rank, number)
        step()
    torch.compile(optimizer.finish, backend="eager")()
    optimizer.close()
    return bits_of_model(model)


@on_ranks(2)
def test_buffers_of_8_bits_are_those_of_the_first_rank_and_lazy_layers_are_named(rank: int) -> list[str]:
    model = mlp()
    for bits in (torch.float8_e4m3fn, torch.float8_e5m2):
        model.register_buffer(f"codes_{bits}".replace(".", "_"), torch.full((8,), 1.0 + rank).to(bits))
    optimizer = local_steps(model, {"every": 2})
    train_with(model, optimizer, rank, range(3))
    optimizer.finish()
    optimizer.close()
    assert all(bool((buffer.float() == 1.0).all()) for buffer in model.buffers())
    lazy = nn.Sequential(nn.Linear(32, 10), nn.LazyLinear(10))
    text = error_text(ConfigError, LocalSteps, lazy, torch.optim.SGD(lazy.parameters(), lr=0.1), every=2)
    assert "parameter '1.weight', '1.bias' has no shape before the first forward pass" in text
    return [bits_of_model(model), text]
