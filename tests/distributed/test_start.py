"""A start cannot diverge: whatever ranks do differently, all of them hear of it at once, and all can try again."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.ddp import hook
from lightning_gqsgd.ddp.functional import all_reduce, close
from lightning_gqsgd.ddp.hook import register_gqsgd
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.kernels.wire import VERSION
from lightning_gqsgd.session.opening import Side, facts_of, open_engines
from lightning_gqsgd.version import __version__
from lightning_gqsgd.wire.engine import Engine, Words
from lightning_gqsgd.wire.meeting import Meeting
from tests.distributed.models import fingerprint, mlp, train, train_with, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

#: Seconds in which an error is to be there; less than any timeout.
AT_ONCE = 15.0


def _error(call: Any, kind: type[Exception] = ConfigError) -> tuple[str, float]:
    """The text of the error that a call ends with, and the seconds until then."""
    begun = time.monotonic()
    return error_text(kind, call), time.monotonic() - begun


# --- registering ------------------------------------------------------------------------------------------------------


def _refused_by_one(rank: int) -> list[Any]:
    found: list[Any] = []
    wrong: list[dict[str, Any]] = [{"bits": 99}, {"bit": 4}, {"exclude": ["*.embedding"]}]
    wrong += [{"memory": "ecq", "codec": "sign"}, {"timeout": 5}, {"exclude": {"a", "b"}}, {"exclude": None}]
    wrong += [{"preset": "gqsgd_diloco"}, {"post_local_sgd": True}]
    for fields in wrong:
        model = DistributedDataParallel(mlp())
        mine = fields if rank == 1 else {}
        found.append(_error(lambda model=model, mine=mine: register_gqsgd(model, **mine)))
        state = register_gqsgd(model)  # the same model, with good arguments
        train(model, rank, range(2))
        found.append(fingerprint(model))
        state.close()
    return found


def test_what_one_rank_refuses_is_an_error_of_all_at_once_and_all_can_try_again(tmp_path: Path) -> None:
    results = run(_refused_by_one, 3, tmp_path)
    reasons = ["bits=99 is out of range", "unknown field 'bit'", "match no parameter", "codec='sign' is biased"]
    reasons += ["timeout=5 must be a positive datetime.timedelta", "exclude={'", "exclude=None must be a sequence"]
    reasons += ["is for local steps", "must be torch's PostLocalSGDState"]
    for rank, found in enumerate(results):
        for (text, seconds), reason in zip(found[::2], reasons, strict=True):
            assert reason in text
            assert ("rank 1 refused: " in text) == (rank != 1)
            assert seconds < AT_ONCE
        assert found[1::2] == results[0][1::2]


@on_ranks(2)
def test_presets_with_other_stages_are_an_error_before_any_group_is_made(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    preset = "gqsgd" if rank == 0 else "gqsgd_exponential_tree"
    text, seconds = _error(lambda: register_gqsgd(model, preset))
    assert "ranks 0 and 1 do not agree: " in text
    assert "codec: " in text
    assert seconds < AT_ONCE


def _another_function(rank: int) -> tuple[str, float]:
    if rank == 0:
        model = DistributedDataParallel(mlp())
        return _error(lambda: register_gqsgd(model))
    DistributedDataParallel(mlp())
    return _error(lambda: all_reduce(torch.zeros(5)))


def test_ranks_that_call_other_functions_are_an_error_on_all(tmp_path: Path) -> None:
    for text, seconds in run(_another_function, 2, tmp_path):
        assert "rank 0 calls register_gqsgd while rank 1 calls all_reduce" in text
        assert seconds < AT_ONCE


def _local_steps() -> None:
    model = mlp()
    LocalSteps(model, torch.optim.SGD(model.parameters(), 0.1), every=4)


@on_ranks(2)
def test_a_rank_of_another_build_is_named_before_anything_of_it_is_read(rank: int) -> None:
    """Its news and facts may have other names, and other defaults."""
    model = DistributedDataParallel(mlp())
    build, agree = "lightning_gqsgd.wire.build", Meeting.agree
    calls = [lambda: register_gqsgd(model), lambda: all_reduce(torch.zeros(5)), _local_steps]
    for call in calls:
        with pytest.MonkeyPatch.context() as older:
            if rank == 1:
                older.setattr(f"{build}.digest_of_sources", lambda: 64 * "0")
                older.setattr(Meeting, "agree", lambda meeting, *_, **__: agree(meeting))
            text, seconds = _error(call)
        assert text.startswith(
            f"rank 1 runs another build of lightning-gqsgd ({__version__}-wire{VERSION}-000000000000) than rank 0 ("
        )
        assert text.endswith("; install the same on all ranks")
        assert seconds < AT_ONCE


def _alone(rank: int, has_failed: Path) -> tuple[str, float]:
    model = DistributedDataParallel(mlp())
    if rank == 1:
        while not has_failed.exists():
            time.sleep(0.05)
        return "", 0.0
    try:
        return _error(lambda: register_gqsgd(model, timeout=timedelta(seconds=3)), CollectiveError)
    finally:
        has_failed.touch()


def test_a_rank_that_registers_alone_ends_with_the_timeout_and_the_name_of_the_other(tmp_path: Path) -> None:
    (text, seconds), _ = run(_alone, 2, tmp_path, tmp_path / "has_failed", collective_timeout=20)
    assert "register_gqsgd on rank 0 of 2 waited 3 s for rank 1" in text
    assert seconds < AT_ONCE


@on_ranks(4)
def test_nodes_of_unequal_size_are_an_error(rank: int) -> None:
    os.environ["GROUP_RANK"] = "0012"[rank]  # two ranks on one node, one on each of two others
    model = DistributedDataParallel(mlp())
    text, seconds = _error(lambda: register_gqsgd(model, reducer="hierarchical"))
    assert "on the nodes [0, 0, 1, 2], are not in order on nodes of equal size" in text
    assert seconds < AT_ONCE


def _late_failure(rank: int) -> tuple[str, float, str]:
    """What goes wrong on one rank after all have agreed is told to the others, too."""
    compile_kernels = hook.Engine.compile

    def fail(*args: Any) -> None:
        raise ConfigError("gradients on a GPU need Triton")

    hook.Engine.compile = fail if rank == 1 else compile_kernels  # type: ignore[method-assign]
    model = DistributedDataParallel(mlp())
    text, seconds = _error(lambda: register_gqsgd(model))
    hook.Engine.compile = compile_kernels  # type: ignore[method-assign]
    state = register_gqsgd(model)
    train(model, rank, range(1))
    state.close()
    return text, seconds, fingerprint(model)


def test_a_rank_whose_kernels_cannot_be_compiled_tells_the_others(tmp_path: Path) -> None:
    results = run(_late_failure, 2, tmp_path)
    assert len({bits for *_, bits in results}) == 1
    for text, seconds, _ in results:
        assert "gradients on a GPU need Triton" in text
        assert seconds < AT_ONCE


@on_ranks(2)
def test_what_is_left_in_a_store_that_lives_on_does_no_harm(rank: int) -> list[Any]:
    """Cards and keys that processes left in the store before they died."""
    model = DistributedDataParallel(mlp())
    circle = Meeting("x", [model.process_group], timedelta(seconds=1))._circles[0]
    if rank == 0:
        for stale in range(2):
            circle._store.set(f"card/{stale}", '["register_gqsgd", {"bits": 3}, "a dead rank refuses", true, {}]')
            circle._store.set(f"nonce/{stale}", "0123456789abcdef")
        circle._store.set("minutes", '["feedfeed", ["0123456789abcdef", "0123456789abcdef"], "old", [{}, {}]]')
        circle._store.set("token", "feedfeed")
        circle._store.set("done/feedfeed", "1")
        circle._store.set("acknowledged/1", "feedfeed")
    dist.barrier()
    time.sleep(rank * 0.3)
    state = register_gqsgd(model, bits=5)
    train(model, rank, range(2))
    state.close()
    return [fingerprint(model)]


@on_ranks(2)
def test_groups_that_are_destroyed_and_made_anew(rank: int) -> list[str]:
    bits = []
    for number in range(3):
        group = dist.new_group([0, 1])
        model = DistributedDataParallel(mlp(), process_group=group)
        state = register_gqsgd(model, seed=number)
        train(model, rank, range(2))
        bits.append(fingerprint(model))
        state.close()
        dist.destroy_process_group(group)
    return bits


# --- loading ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_state_that_one_rank_loads_is_an_error_of_all_in_the_next_step(rank: int) -> None:
    found = []
    for entry in ("seed", "step"):
        for steps in (0, 3):  # before the first step, and after some
            model, state = wrapped({"bucket_cap_mb": 0.03}, {"reducer": "two_shot"})
            train(model, rank, range(steps))
            saved = state.state_dict()
            if rank == 1:
                state.load_state_dict({**saved, entry: saved[entry] + 5})
            text, seconds = _error(lambda model=model: train(model, rank, range(3, 4)), RuntimeError)
            found.append((entry, text, seconds, all(p.isfinite().all() for p in model.parameters())))
            state.close()
    assert len(found) == 4
    for entry, text, seconds, finite in found:
        assert f"ranks 0 and 1 do not agree: {entry}: " in text
        assert "ConfigError" in text
        assert "load the same state on every rank" in text
        assert seconds < AT_ONCE
        assert finite


@on_ranks(2)
def test_ranks_that_train_other_parameters_of_the_same_size_are_an_error(rank: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[rank].requires_grad_(False)  # of the same size, so that plain DDP does not notice
    ddp = DistributedDataParallel(model)
    text, seconds = _error(lambda: register_gqsgd(ddp, bits=4))
    assert "do not agree: parameters that require a gradient" in text
    assert seconds < AT_ONCE


def _other_memories(rank: int) -> list[str]:
    """States of the same step of two runs; a state whose memory one rank does not load."""
    shared: list[Any] = []
    for seed in (0, 1):
        model, state = wrapped({}, {"preset": "diana"})
        train(model, rank + 7 * seed, range(3))
        saved = [state.state_dict()]
        dist.broadcast_object_list(saved)
        shared += saved
        state.close()
    texts = []
    without = {name: value for name, value in shared[0].items() if name != "memory"}
    for other in (shared[1], without):
        model, state = wrapped({}, {"preset": "diana"})
        state.load_state_dict(other if rank else shared[0])
        texts.append(_error(lambda model=model: train(model, rank, range(3, 4)), RuntimeError)[0])
        state.close()
    model, state = wrapped({}, {"preset": "diana"})
    for _ in range(1 + rank):  # the same state, on one rank twice
        state.load_state_dict(shared[0])
    train(model, rank, range(3, 5))
    texts.append(fingerprint(model))
    state.close()
    return texts


def test_states_of_one_step_with_other_memories_are_an_error_of_all(tmp_path: Path) -> None:
    first, second = run(_other_memories, 2, tmp_path)
    for text in (*first[:2], *second[:2]):
        assert "ranks 0 and 1 do not agree: digest" in text
    assert first[2] == second[2]


def _saved_in_inference_mode(rank: int) -> list[str]:
    bits = []
    for mode in (torch.no_grad, torch.inference_mode):
        model, state = wrapped({}, {"preset": "diana", "warmup_steps": 2})
        with mode():  # type: ignore[operator]
            saved = [state.state_dict()]
        train(model, rank, range(4))
        with mode():  # type: ignore[operator]
            saved = [state.state_dict()]
        dist.broadcast_object_list(saved)
        state.close()
        again, state = wrapped({}, {"preset": "diana", "warmup_steps": 2}, model.module)
        with mode():  # type: ignore[operator]
            state.load_state_dict(saved[0])
        train(again, rank, range(4, 6))
        bits.append(fingerprint(again))
        state.close()
    return bits


def test_states_may_be_saved_and_loaded_in_inference_mode(tmp_path: Path) -> None:
    (first, second), *others = run(_saved_in_inference_mode, 2, tmp_path)
    assert first == second
    assert others == [[first, second]]


@on_ranks(2)
def test_a_start_in_inference_mode_trains_as_any_other(rank: int) -> list[str]:
    bits: dict[bool, list[str]] = {}
    for mode in (False, True):
        model = DistributedDataParallel(mlp())
        alone = mlp()
        with torch.inference_mode(mode):
            state = register_gqsgd(model, preset="dore")
            optimizer = LocalSteps(alone, torch.optim.SGD(alone.parameters(), lr=0.1), every=2, outer_after=0)
        train(model, rank, range(4))
        train_with(alone, optimizer, rank, range(6))
        optimizer.close()
        state.close()
        bits[mode] = [fingerprint(model), fingerprint(alone)]
    assert bits[True] == bits[False]
    return bits[True]


@on_ranks(2, collective_timeout=20)
def test_threads_register_one_after_another(rank: int) -> list[str]:
    """Two threads register on groups of the same ranks."""
    models = [DistributedDataParallel(mlp(), process_group=dist.new_group([0, 1])) for _ in range(2)]
    bits: dict[int, str] = {}

    def work(number: int) -> None:
        model = models[number]
        state = register_gqsgd(model, bits=4)
        train(model, rank, range(2))
        bits[number] = fingerprint(model)
        state.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    result = [bits.get(number, "no end") for number in range(2)]
    assert result[0] == result[1] != "no end"
    return result


@on_ranks(2)
def test_what_is_no_state_is_refused_and_a_field_of_another_version_is_not(rank: int) -> list[str]:
    model, state = wrapped({}, {"bits": 4})
    saved = state.state_dict()
    texts = []
    for wrong in (None, [], {}, {**saved, "schema": 7}, {**saved, "seed": "0"}, {**saved, "step": -1}, {"schema": 1}):
        texts.append(_error(lambda wrong=wrong: state.load_state_dict(wrong))[0])
    state.load_state_dict({**saved, "config": {**saved["config"], "from_the_future": 1}})
    train(model, rank, range(2))
    state.close()
    result = [*texts, fingerprint(model)]
    words = [
        "not NoneType",
        "not list",
        "no entry 'schema'",
        "schema 7",
        "'seed' is '0'",
        "'step' is -1",
        "'seed' is None",
    ]
    for text, word in zip(result, words, strict=False):
        assert word in text
    return result


# --- arguments of another kind ----------------------------------------------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_a_configuration_is_accepted_wherever_fields_are_and_other_kinds_are_refused(rank: int) -> list[str]:
    config = GQSGDConfig(bits=4)
    bits = []
    for arguments, fields in (((config,), {}), (("gqsgd_4bit",), {}), ((), {"bits": 4})):
        model = DistributedDataParallel(mlp())
        state = register_gqsgd(model, *arguments, **fields)
        assert state.config.bits == 4
        train(model, rank, range(2))
        bits.append(fingerprint(model))
        state.close()
    model = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match="preset=4 is neither.*e.g. bits=4"):
        register_gqsgd(model, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="neither the name of a preset nor a GQSGDConfig; .* e.g. bits=2"):
        register_gqsgd(model, {"bits": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="before torch.compile"):
        register_gqsgd(torch.compile(model))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="takes the preset's place"):
        register_gqsgd(model, config=config)
    complex_model = nn.Linear(64, 64)
    complex_model.twist = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="parameter 'twist' has dtype torch.complex64.*view_as_real"):
        register_gqsgd(DistributedDataParallel(complex_model))
    state = register_gqsgd(model)
    for name, value in (("bits", 2), ("config", config), ("sed", 3)):
        with pytest.raises(AttributeError):
            setattr(state, name, value)
    state.close()
    with pytest.raises(ConfigError, match="hook 'gqsgd_hook' \\(which was closed\\).*new DistributedDataParallel"):
        register_gqsgd(model)
    close()
    assert len(set(bits)) == 1
    return bits


# --- all_reduce -------------------------------------------------------------------------------------------------------


def _calls(rank: int) -> list[Any]:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    found: list[Any] = [_error(lambda: all_reduce(x, bits=99 if rank == 1 else 8))]  # the very first call
    found.append(all_reduce(x, step=0).tolist())
    found.append(_error(lambda: all_reduce(x, bits=99 if rank == 1 else 8)))
    found.append(all_reduce(x).tolist())  # numbered by the calls, on all ranks alike
    found.append(_error(lambda: all_reduce(x.long() if rank == 0 else x)))
    found.append(_error(lambda: all_reduce(x, preset="gqsgd" if rank == 0 else "gqsgd_exponential_tree")))
    found.append(_error(lambda: all_reduce(x.double() if rank == 0 else x)))
    found.append(all_reduce(x).tolist())
    return found


def test_calls_that_one_rank_refuses_leave_everything_usable(tmp_path: Path) -> None:
    results = run(_calls, 2, tmp_path)
    for rank, found in enumerate(results):
        for index, refuses in ((0, 1), (2, 1), (4, 0)):
            text, seconds = found[index]
            assert (f"rank {refuses} refused: " in text) == (rank != refuses)
            assert seconds < AT_ONCE
        assert "codec: " in found[5][0]
        assert 'dtype: "torch.float64" != "torch.float32"' in found[6][0]
        assert [found[index] for index in (1, 3, 7)] == [results[0][index] for index in (1, 3, 7)]


def _saved_by_one(rank: int) -> list[str]:
    model, state = wrapped({}, {"preset": "signsgd_ef"})
    train(model, rank, range(3))
    assert (state.state_dict()["memory"] is None) == (rank > 0)  # on all ranks, it works
    train(model, rank, range(3, 6))
    # In the backward pass, torch wraps the error.
    return [_error(state.state_dict if rank == 0 else lambda: train(model, rank, range(6, 8)), RuntimeError)[0]]


def test_a_state_that_one_rank_asks_for_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    """It was the end of the other ranks' processes, by SIGABRT."""
    (first,), (second,) = run(_saved_by_one, 2, tmp_path, collective_timeout=4)
    assert "state_dict on rank 0 of 2 waited" in first
    assert "for rank 1. Every rank" in first
    assert "CollectiveError: gqsgd: bucket 0 of step 6" in second
    assert "failed on rank 1 of 2" in second


# --- what all of them have in common ----------------------------------------------------------------------------------


@on_ranks(2)
def test_ranks_with_processors_of_their_own_have_threads_for_all_of_them(rank: int) -> list[int]:
    group = dist.distributed_c10d._get_default_group()
    threads = []
    for first in (0, 4 * rank):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "sched_getaffinity", lambda _, first=first: set(range(first, first + 4)))
            patch.setattr(torch, "get_num_threads", lambda: 1)
            with (
                Meeting("a start", [group], timedelta(seconds=60)) as meeting,
                open_engines(meeting, [Side(group, {}, [])], torch.device("cpu"), words=Words()) as (engine,),
            ):
                threads.append(engine._threads)
                engine.close()
    assert threads == [1, 3]
    return threads


@on_ranks(2)
def test_engines_are_closed_where_the_last_step_of_a_start_fails_and_ranks_can_start_again(rank: int) -> None:
    group = dist.distributed_c10d._get_default_group()
    config = resolve(GQSGDConfig(bits=4), dist.get_world_size())
    seen: list[Engine] = []

    def start(last_step: str) -> None:
        with Meeting("a start", [group], timedelta(seconds=60)) as meeting:
            sides = [Side(group, facts_of(config, {"parameters": "two"}), [config])]
            with open_engines(
                meeting, sides, torch.device("cpu"), words=Words(), dtypes=[torch.float32], prepare=seen.append
            ) as engines:
                assert engines == seen[-1:]
                if last_step:
                    raise ConfigError(last_step)

    error, _ = _error(lambda: start("there is no room for a hook"))
    failed = [engine.is_closed for engine in seen]
    start("")
    later = [engine.is_closed for engine in seen]
    seen[-1].close()
    assert "there is no room for a hook" in error
    assert failed == [True]
    assert later == [True, False]
