"""The DDP hook on real processes."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.reducers.base import ALL
from tests.distributed.models import Branches, batch, fingerprint, finish, loss_of, mlp, resume, save, train, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

QUANTISING = ["sum", "two_shot", "gather"]

DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    {"bucket_cap_mb": 0.02},
]


def _fifty_steps(rank: int, reducers: list[str]) -> list[Any]:
    results = []
    for reducer in reducers:
        model, state = wrapped({"bucket_cap_mb": 0.03}, {"reducer": reducer, "sample_every": 10})
        losses = train(model, rank, range(50))
        results.append({**finish(state, model), "first": sum(losses[:5]), "last": sum(losses[-5:])})
    return results


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4))])
def test_parameters_are_bit_identical_on_all_ranks_after_50_steps(ranks: int, tmp_path: Path) -> None:
    by_rank = run(_fifty_steps, ranks, tmp_path, QUANTISING)
    for results in zip(*by_rank, strict=True):
        assert len({result["bits"] for result in results}) == 1
        for result in results:
            assert result["totals"]["steps"] == 50
            assert 8 < result["totals"]["bits_per_coordinate"] < 10
            assert 0 < result["totals"]["rel_l2"] < 0.1
            assert result["last"] < result["first"]


@on_ranks(3)
def test_a_training_can_be_summed_up(rank: int) -> None:
    model, state = wrapped({}, {"bits": 8, "sample_every": 4})
    train(model, rank, range(12))
    values = state.summary()
    numel = sum(p.numel() for p in model.parameters())
    line = state.summary_line()
    assert values["steps"] == 12
    assert values["fp32_bytes"] == pytest.approx(2 * 2 / 3 * 4 * numel * 12)
    assert 3 < values["compression_ratio"] < 4  # biases travel as they are
    assert 8 < values["bits_per_coordinate"] < 10
    assert 0 < values["mean_rel_l2"] < 0.1
    assert values["step_s"] > 0
    assert 0 <= values["waiting_share"] <= 1
    assert line.startswith("gqsgd: in 12 steps, rank 0 sent ")


@on_ranks(3)
def test_results_do_not_depend_on_buckets_or_on_ddp_options(rank: int) -> list[str]:
    bits = []
    for options in DDP_OPTIONS:
        model, state = wrapped(options, {"bits": 5, "reducer": "two_shot"})
        train(model, rank, range(6))
        bits.append(finish(state, model)["bits"])
    assert len(set(bits)) == 1
    return bits


def _native(rank: int) -> tuple[str, str, str]:
    plain = DistributedDataParallel(mlp())
    train(plain, rank, range(8))
    native, state = wrapped({}, {"reducer": "native"})
    train(native, rank, range(8))
    warm, other = wrapped({}, {"warmup_steps": 8})
    train(warm, rank, range(8))
    found = fingerprint(plain), finish(state, native)["bits"], fingerprint(warm)
    for model in (plain, warm):
        train(model, rank, range(8, 9))
    other.close()
    assert fingerprint(plain) != fingerprint(warm)  # the warm-up is over
    return found


def test_native_reducer_and_warm_up_are_plain_ddp_to_the_bit(tmp_path: Path) -> None:
    for plain, native, warm in run(_native, 2, tmp_path):
        assert native == plain
        assert warm == plain


def _sixteen_bits(rank: int) -> tuple[str, str, float, float]:
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"bits": 16, "sample_every": 1})
    losses = train(model, rank, range(10))
    found = finish(state, model)
    warm, other = wrapped({}, {"bits": 16, "warmup_steps": 8})
    train(warm, rank, range(8))
    other.close()
    assert "16 bits (bf16" in state.report()
    assert losses[-1] < losses[0]
    return found["bits"], fingerprint(warm), found["totals"]["bits_per_coordinate"], found["totals"]["rel_l2"]


def _plain(rank: int) -> str:
    plain = DistributedDataParallel(mlp())
    train(plain, rank, range(8))
    return fingerprint(plain)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_16_bits_give_the_same_parameters_on_all_ranks_and_warm_up_as_plain_ddp(ranks: int, tmp_path: Path) -> None:
    plain = run(_plain, ranks, tmp_path)
    results = run(_sixteen_bits, ranks, tmp_path)
    assert len({bits for bits, *_ in results}) == 1
    for _, warm, bits_per_coordinate, error in results:
        assert warm == plain[0]
        assert bits_per_coordinate == 16
        assert 0 < error < 2**-7


@pytest.mark.parametrize(
    "reducer", [pytest.param(name, marks=[pytest.mark.slow] * (name != "two_shot")) for name in QUANTISING]
)
@on_ranks(3)
def test_interrupted_and_resumed_gives_the_same_bits(rank: int, tmp_path: Path, reducer: str) -> None:
    path = tmp_path / "checkpoint.pt"
    options, hook = {"bucket_cap_mb": 0.03}, {"reducer": reducer, "seed": 5, "warmup_steps": 3}
    whole, state = wrapped(options, hook)
    train(whole, rank, range(24))
    expected = finish(state, whole)["bits"]

    first, state = wrapped(options, hook)
    train(first, rank, range(11))
    save(first, state, rank, path)
    state.close()
    second, state = resume(path, options, hook)
    train(second, rank, range(11, 24))
    resumed = finish(state, second)["bits"]
    assert resumed == expected


@on_ranks(1)
def test_a_state_is_saved_again_as_it_was_loaded(rank: int) -> None:
    _, state = wrapped({}, {"bits": 4})
    state.load_state_dict({**state.state_dict(), "seed": 5, "step": 7})
    saved = state.state_dict()
    assert (saved["seed"], saved["step"], saved["config"]["seed"]) == (5, 7, 5)
    state.close()


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_60_steps_of_many_small_buckets_at_different_speeds(rank: int) -> list[str]:
    random.seed(rank)
    bits = []
    for reducer in ("two_shot", "sum"):
        model, state = wrapped({"bucket_cap_mb": 0.002}, {"reducer": reducer, "min_numel": 50}, mlp(depth=12))
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: time.sleep(random.random() * 2e-4))  # noqa: S311
        train(model, rank, range(60), lr=0.01)
        assert len(state.telemetry.buckets) > 10
        bits.append(finish(state, model)["bits"])
    return bits


@on_ranks(2)
def test_parameters_that_only_some_ranks_use(rank: int) -> str:
    model, state = wrapped({"find_unused_parameters": True}, {}, Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x, (step + rank) % 2 if step > 2 else 0), y).backward()
        optimizer.step()
    return finish(state, model)["bits"]


@on_ranks(2)
def test_several_models_share_a_thread_and_nothing_else(rank: int) -> list[str]:
    models = [wrapped({}, {"bits": bits}) for bits in (8, 4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model, _ in models]
    for step in range(10):
        losses = [loss_of(model, rank, step) for model, _ in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(losses).backward()
        for optimizer in optimizers:
            optimizer.step()
    bits = [fingerprint(model) for model, _ in models]
    alone, state = wrapped({}, {"bits": 4})
    train(alone, rank, range(10))
    bits.append(fingerprint(alone))
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("gqsgd-sequencer") == 1
    for _, one in models:
        one.close()
        one.close()
    del alone
    state.close()
    assert "gqsgd-sequencer" not in [thread.name for thread in threading.enumerate()]
    assert bits[1] == bits[2]
    return bits


@on_ranks(2)
def test_threads_and_groups_end_with_the_model(rank: int) -> None:
    model, state = wrapped({}, {})
    train(model, rank, range(2))
    threads = psutil.Process().num_threads()
    del model, state
    gc.collect()
    assert "gqsgd-sequencer" not in [thread.name for thread in threading.enumerate()]
    # Gloo has at least two threads per group, of which there are three.
    assert threads - psutil.Process().num_threads() >= 6


@on_ranks(2, timeout=30)
def test_a_model_may_be_collected_by_the_thread_that_reduces(rank: int) -> None:
    """A collection of garbage happens on whatever thread allocates next."""
    model, state = wrapped({}, {})
    forgotten, its_state = wrapped({}, {})
    train(forgotten, rank, range(1))
    gc.disable()
    forgotten.itself = [forgotten]
    runner, is_closed = its_state._engine._runner, weakref.ref(its_state)
    del forgotten, its_state
    runner._events.put(gc.collect)
    train(model, rank, range(2))
    state.close()
    assert is_closed() is None
    assert "gqsgd-sequencer" not in [thread.name for thread in threading.enumerate()]


@on_ranks(2)
def test_a_model_may_be_collected_by_a_thread_that_the_sequencing_thread_waits_for(rank: int) -> None:
    """Garbage collection closes a model on the thread that serves another model's connections, while it has its lock,
    and the sequencing thread waits for that lock."""
    model, state = wrapped({}, {})
    other, its_state = wrapped({}, {})
    train(other, rank, range(1))
    group = state._engine.communicator._shared[0, ALL, 0]

    def need_the_lock() -> None:
        with group._held():
            pass

    with group._held():
        state._engine._runner._events.put(need_the_lock)
        its_state.close()  # raises an error if that thread does not answer
    train(model, rank, range(2))
    state.close()


def _subgroup(rank: int) -> str:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(mlp(), process_group=groups[rank % 2])
    state = register_gqsgd(model, bits=6)
    train(model, rank, range(5))
    return finish(state, model)["bits"]


def test_models_on_subgroups(tmp_path: Path) -> None:
    bits = run(_subgroup, 4, tmp_path)
    assert bits[0] == bits[2] != bits[1] == bits[3]


def _alone(rank: int) -> tuple[str, str, str]:
    plain = DistributedDataParallel(mlp())
    train(plain, rank, range(4))
    model, state = wrapped({}, {"bits": 2})
    train(model, rank, range(4))
    return fingerprint(plain), fingerprint(model), state.report()


def test_one_rank_is_plain_training(tmp_path: Path) -> None:
    ((plain, quantised, report),) = run(_alone, 1, tmp_path)
    assert plain == quantised
    assert "nothing to reduce" in report


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@on_ranks(3)
def test_a_loss_that_is_not_finite_on_one_rank_reaches_all(rank: int, value: float) -> list[list[bool]]:
    finite = []
    for reducer in QUANTISING:
        model, state = wrapped({}, {"reducer": reducer})
        loss = loss_of(model, rank, 0)
        if rank == 1:
            loss = loss * value
        loss.backward()
        finite += [parameter.grad.isfinite().flatten().tolist() for parameter in model.parameters()]
        assert state.telemetry.totals()["nonfinite_blocks"] > 0
        state.close()
    assert not any(all(parameter) for parameter in finite)
    return finite


@on_ranks(2)
def test_grad_scaler_skips_the_same_steps_on_all_ranks(rank: int) -> list[Any]:
    model, state = wrapped({}, {"bits": 4})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    history = []
    for step in range(8):
        loss = loss_of(model, rank, step)
        if step in (2, 5) and rank == step % 2:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        history.append(scaler.get_scale())
    result = [history, finish(state, model)["bits"]]
    assert result[0][2] < result[0][1]
    return result


@on_ranks(2)
def test_models_in_other_dtypes(rank: int) -> list[str]:
    bits = []
    for dtype in (torch.bfloat16, torch.float64):
        model, state = wrapped({}, {}, mlp().to(dtype))
        for step in range(3):
            x, y = batch(rank, step)
            nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        bits.append(str(sum(parameter.grad.double().sum().item() for parameter in model.parameters())))
        state.close()
    return bits


@on_ranks(2)
def test_ranks_that_do_not_agree_are_an_error_on_every_rank(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    text = error_text(ConfigError, register_gqsgd, model, bits=8 if rank == 0 else 4)
    other = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match="parameters"):
        register_gqsgd(other, exclude=["0.weight"] if rank == 0 else ["2.weight"])
    with pytest.raises(ConfigError, match="bucket_cap_mb: 25.0 != 24.0"):
        register_gqsgd(DistributedDataParallel(mlp(), bucket_cap_mb=25 - rank))
    assert "ranks 0 and 1 do not agree: bits: 8 != 4" in text


@on_ranks(2)
def test_models_and_configurations_that_cannot_work(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    state = register_gqsgd(model)
    with pytest.raises(ConfigError, match="already has the communication hook 'gqsgd_hook'.*DDP takes one only"):
        register_gqsgd(model)
    state.close()
    with pytest.raises(ConfigError, match="not a DistributedDataParallel"):
        register_gqsgd(mlp())  # type: ignore[arg-type]
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True)))
    with pytest.raises(ConfigError, match="sparse=False"):
        register_gqsgd(sparse)
    stepping = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    with pytest.raises(ConfigError, match="an optimizer that steps in the backward pass.* after backward"):
        register_gqsgd(DistributedDataParallel(stepping))
    with pytest.raises(ConfigError, match="match no parameter; names look like 0.weight"):
        register_gqsgd(DistributedDataParallel(mlp()), exclude=["*.embedding"])
    with pytest.raises(ConfigError, match="did you mean 'bits'"):
        register_gqsgd(DistributedDataParallel(mlp()), bit=4)
    with pytest.raises(ConfigError, match="at most 1 rank, not 2"):
        register_gqsgd(DistributedDataParallel(mlp()), bits=2, reducer="sum", dither="stochastic")
    closed, state = wrapped({}, {})
    train(closed, rank, range(1))
    state.close()
    with pytest.raises(RuntimeError, match="the hook was closed"):
        train(closed, rank, range(1))


def _killed(rank: int) -> str:
    model, state = wrapped({}, {}, mlp(width=600))
    train(model, rank, range(3))
    if rank == 1:
        # In the middle of a backward pass: after the first bucket has been submitted.
        next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda _: os._exit(7))
    try:
        train(model, rank, range(3, 5))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_an_error_in_backward(tmp_path: Path) -> None:
    text, _ = run(_killed, 2, tmp_path, dies=(1,), timeout=60)
    assert "failed on rank 0 of 2" in text
    assert "Look for the first error among all ranks' logs" in text


def _late(rank: int, has_failed: Path) -> str:
    model, state = wrapped({}, {})
    train(model, rank, range(2))
    if rank == 1:
        while not has_failed.exists():
            time.sleep(0.05)
        return "late"
    try:
        train(model, rank, range(2, 3))
    except RuntimeError as error:
        return str(error)
    finally:
        has_failed.touch()  # not before: the other rank has sent nothing until now
    return "no error"


def test_a_rank_that_falls_behind_the_timeout_is_an_error(tmp_path: Path) -> None:
    text, _ = run(_late, 2, tmp_path, tmp_path / "has_failed", collective_timeout=3)
    assert "imed out" in text or "imeout" in text


@on_ranks(2)
def test_report_says_what_is_compressed_and_what_is_not(rank: int) -> None:
    hook = {"bits": 4, "block_size": 128, "exclude": ["4.weight"], "warmup_steps": 7, "min_numel": 1024}
    model, state = wrapped({}, hook)
    state.close()
    text = state.report()
    assert "20,480 gradient values in 2 tensors at 4 bits" in text
    assert "blocks of 128" in text
    assert "by gather over 2 ranks" in text
    assert "uncompressed: 1,546 values in 4 tensors (3 smaller than 1024, 1 excluded by name)" in text
    assert "uncompressed until step 7" in text


@on_ranks(2)
def test_a_trace_of_the_profiler_names_what_the_hook_does(rank: int) -> list[int]:
    model, state = wrapped({}, {"bits": 4})
    train(model, rank, range(2))
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as trace:
        train(model, rank, range(2, 4))
    found = {event.key: event.count for event in trace.key_averages() if event.key.startswith("gqsgd: ")}
    finish(state, model)
    assert set(found) == {"gqsgd: reduce", "gqsgd: agreement", "gqsgd: stage 1", "gqsgd: stage 2"}
    assert found["gqsgd: reduce"] <= found["gqsgd: stage 1"] == found["gqsgd: stage 2"]
    return sorted(found.values())
