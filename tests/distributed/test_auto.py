"""Bits that are chosen by the length of steps, on real processes: all ranks decide alike, whatever they measure."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.session.copies import DetachedState
from lightning_gqsgd.spec.decisions import Rules
from lightning_gqsgd.wire.telemetry import Meter
from tests.distributed.models import Branches, batch, fingerprint, mlp, resume, save, train, wrapped
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.distributed.test_hook import DDP_OPTIONS
from tests.errors import error_text

STEPS = 120  # a trial of four candidates takes about 56, and plain DDP's turn about 40


def _uneven(model: nn.Module, seed: int) -> None:
    """Make a rank's steps take random times."""
    generator = random.Random(seed)  # noqa: S311
    model.register_forward_pre_hook(lambda *_: time.sleep(generator.random() * 3e-3))


def _watches_nothing() -> None:
    """Let no second trial begin because other programs of the machine change the length of these short steps, or
    because the hook costs a larger share of them than of real ones."""
    Rules.drift = Rules.jump = Rules.hook = math.inf  # in this process, which is a rank of the test


def _try_all(state: GQSGDState) -> None:
    """Let every candidate have its turns, whatever is predicted for it, and only once."""
    _watches_nothing()
    assert state._steering is not None
    assert state._steering.trials is not None
    state._steering.trials._predictor = None


def _facts(state: GQSGDState, model: nn.Module) -> dict[str, Any]:
    decisions = json.dumps([decision.to_dict() for decision in state.decisions])
    return {"bits": fingerprint(model), "decisions": decisions}


def _random_times(rank: int) -> dict[str, Any]:
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"preset": "gqsgd_auto", "sample_every": 10})
    _uneven(model.module, rank)
    _try_all(state)
    said: list[str] = []
    state.announce(said.append)
    meter, used = Meter(state.telemetry), []
    for step in range(STEPS):
        train(model, rank, range(step, step + 1))
        used.append(state.config.num_bits)
    values = meter.read()
    state.close()
    return {**_facts(state, model), "used": used, "values": values, "report": state.report(), "said": said}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_decide_alike_through_random_sleeps_and_keep_equal_parameters(ranks: int, tmp_path: Path) -> None:
    results = run(_random_times, ranks, tmp_path)
    first = results[0]
    for result in results[1:]:
        assert {key: result[key] for key in ("bits", "decisions", "used")} == {
            key: first[key] for key in ("bits", "decisions", "used")
        }
    assert set(first["used"]) == {32, 16, 8, 4}
    *before, decision = json.loads(first["decisions"])
    assert len(before) <= 1  # plain DDP may have its turn after the trial
    assert decision["bits"] == first["used"][-1] == first["values"]["gqsgd/bits"]
    assert first["values"]["gqsgd/trying"] == 0
    assert f"auto takes {decision['bits']} bits" in first["report"]
    assert sum("auto takes" in line for line in first["said"]) == 1 + len(before)
    assert first["said"][0].startswith("gqsgd: auto over")
    assert not any(result["said"] for result in results[1:])


def _one_step(rank: int, start: dict[str, torch.Tensor], step: int, fields: dict[str, Any]) -> str:
    model = mlp()
    model.load_state_dict(start)
    fixed, state = wrapped({"bucket_cap_mb": 0.03}, fields, model)
    state.step = step
    train(fixed, rank, range(step, step + 1))
    state.close()
    return fingerprint(fixed)


@pytest.mark.slow
@on_ranks(2)
def test_each_candidates_step_is_that_of_the_fixed_configuration(rank: int) -> None:
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"auto": True, "seed": 4})
    _try_all(state)
    compared, seen = [], set()
    for step in range(70):
        before = copy.deepcopy(model.module.state_dict())
        train(model, rank, range(step, step + 1))
        bits = state.config.num_bits
        if bits not in seen:
            seen.add(bits)
            compared.append((bits, fingerprint(model), _one_step(rank, before, step, {"bits": bits, "seed": 4})))
    state.close()
    assert {bits for bits, *_ in compared} == {32, 16, 8, 4}
    for bits, of_auto, of_fixed in compared:
        assert of_auto == of_fixed, bits


@on_ranks(2)
def test_a_resumed_run_begins_with_the_decision_and_gives_the_same_bits(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    model, state = wrapped({}, {"auto": True, "allow": (16, 4)})
    _watches_nothing()
    train(model, rank, range(60))
    save(model, state, rank, path)
    train(model, rank, range(60, 80))
    expected, decided = fingerprint(model), [decision.bits for decision in state.decisions]
    state.close()
    again, state = resume(path, {}, {"auto": True, "allow": (16, 4)})
    _watches_nothing()
    assert state.config.num_bits == decided[0]
    train(again, rank, range(60, 80))
    known = [decision.bits for decision in state.decisions]
    state.close()
    resumed = fingerprint(again)
    assert len(decided) == 1
    assert known == decided
    assert resumed == expected


def _noise(rank: int, path: Path) -> dict[str, Any]:
    """Train with bits by the noise, save after each of some steps, and go on from each state in a new model."""
    fields = {"bits": "auto", "max_slowdown": 0.2, "allow": (32, 16, 8, 4), "min_numel": 64}
    model, state = wrapped({"bucket_cap_mb": 0.03}, fields)
    saved, used = {}, []
    for step in range(NOISE_STEPS):
        train(model, rank, range(step, step + 1))
        used.append(state.config.num_bits)
        if step + 1 in NOISE_STOPS and rank == 0:
            saved[step + 1] = {"model": copy.deepcopy(model.module.state_dict()), "gqsgd": state.state_dict()}
    report, values = state.report(), dict(state.telemetry.choice)
    facts = _facts(state, model)
    state.close()
    if rank == 0:
        torch.save(saved, path)
    dist.barrier()
    resumed = {}
    for stop, checkpoint in torch.load(path, weights_only=True).items():
        again = mlp()
        again.load_state_dict(checkpoint["model"])
        model, state = wrapped({"bucket_cap_mb": 0.03}, fields, again)
        state.load_state_dict(checkpoint["gqsgd"])
        train(model, rank, range(stop, NOISE_STEPS))
        resumed[stop] = _facts(state, model)
        state.close()
    return {**facts, "used": used, "report": report, "values": values, "resumed": resumed}


#: Steps of a run whose bits follow from the noise, and the steps after which it is saved: a measurement is under way at
#: different places then.
NOISE_STEPS, NOISE_STOPS = 65, (51, 52)


def test_bits_by_the_noise_are_equal_on_all_ranks_and_exact_on_resume_wherever_a_run_is_saved(tmp_path: Path) -> None:
    result = run_alike(_noise, 2, tmp_path, tmp_path / "checkpoint.pt")
    assert result["used"][0] == 32
    assert result["used"][-1] < 32
    assert {facts["bits"] for facts in result["resumed"].values()} == {result["bits"]}
    assert {facts["decisions"] for facts in result["resumed"].values()} == {result["decisions"]}
    assert "bits on average over 65 steps" in result["report"]
    assert result["values"]["noise_scale"] > 0
    assert result["values"]["bits"] == result["used"][-1]


def _loaded_on_one_rank(rank: int, bits: int, loading: int) -> str:
    """The state has another step, and a decision for other bits than those in use."""
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"auto": True, "allow": (32, 8)})
    _watches_nothing()
    train(model, rank, range(60))
    saved = state.state_dict()
    saved["auto"] = {**saved["auto"], "bits": bits}
    saved["step"] += loading
    if rank == 0:
        state.load_state_dict(saved)
    try:
        train(model, rank, range(60, 73))  # plain DDP has compared states after eleven steps
    except (ConfigError, RuntimeError) as error:
        return str(error)
    finally:
        state.close()
    return "no error"


@pytest.mark.parametrize(
    ("bits", "loading"),
    [(8, 7), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((32, 0), (32, 7), (8, 0)))],
)
def test_a_state_that_was_loaded_on_one_rank_only_is_an_error_on_all(bits: int, loading: int, tmp_path: Path) -> None:
    answers = run(_loaded_on_one_rank, 2, tmp_path, bits, loading, timeout=60)
    if loading or "no error" not in answers:
        assert all("do not agree" in answer for answer in answers), answers
    else:  # the state on rank 0 is that which both ranks were in
        assert answers == ["no error", "no error"]


@on_ranks(2)
def test_no_stamp_from_before_a_state_was_loaded_tells_the_choice_of_bits_anything(rank: int) -> None:
    """Go back ten steps; which steps' stamps the choice of bits is told before and after that."""
    model, state = wrapped({}, {"auto": True, "allow": (32, 8)})
    assert state._steering is not None
    told: set[int] = set()
    receive = state._steering.receive

    def listen(agreed: Any) -> None:
        told.update(agreed)
        receive(agreed)

    state._steering.receive = listen  # type: ignore[method-assign]
    train(model, rank, range(4))
    saved = state.state_dict()
    train(model, rank, range(4, 14))  # nobody has read the stamps of the last two steps when the state is loaded
    before = set(told)
    told.clear()
    state.load_state_dict(saved)
    train(model, rank, range(4, 7))
    state.state_dict()  # reads all stamps that there are
    state.close()
    assert max(before) >= 10
    assert told == {4, 5, 6}


@on_ranks(2, timeout=60)
def test_another_step_on_one_rank_is_an_error_on_all_while_gradients_travel_as_they_are(rank: int) -> None:
    """After warm-up with 32 bits only, so that no rank uses codes when the state is loaded."""
    model, state = wrapped({}, {"auto": True, "allow": (32, 8)})
    train(model, rank, range(4))
    if rank == 1:
        state.step = 40
    text = error_text((ConfigError, RuntimeError), train, model, rank, range(4, 8))
    state.close()
    assert "do not agree" in text
    assert "step" in text


@pytest.mark.slow
@on_ranks(2)
def test_ranks_stay_equal_under_every_option_of_ddp_with_no_sync_and_warm_up(rank: int) -> list[dict[str, Any]]:
    results = []
    for options in DDP_OPTIONS:
        model, state = wrapped(options, {"auto": True, "warmup_steps": 3})
        _uneven(model.module, rank)
        for step in range(20):  # in the midst of a trial, which takes turns of four steps
            with contextlib.nullcontext() if "static_graph" in options else model.no_sync():
                nn.functional.cross_entropy(model(batch(rank, step)[0]), batch(rank, step)[1]).backward()
            train(model, rank, range(step, step + 1))
        results.append(_facts(state, model))
        state.close()
    return results


@on_ranks(2)
def test_unused_parameters_copies_and_a_new_wrapping_during_a_trial(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(Branches(), find_unused_parameters=True)
    state = register_gqsgd(model, auto=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        model(batch(rank, step)[0], step % 2).sum().backward()
        optimizer.step()
    detached = copy.deepcopy(state)
    assert isinstance(detached, DetachedState)
    assert detached.config["auto"] is True
    train_bits = state.config.num_bits
    rewrapped = state.rewrap(lambda module: DistributedDataParallel(module, find_unused_parameters=True))
    for step in range(30, 40):
        optimizer.zero_grad()
        rewrapped(batch(rank, step)[0], step % 2).sum().backward()
        optimizer.step()
    state.close()
    return {**_facts(state, rewrapped), "at": train_bits}


def _dies(rank: int) -> list[str]:
    model, state = wrapped({}, {"reducer": "native"})
    train(model, rank, range(3))
    if rank == 1:
        os._exit(0)
    texts = [error_text(RuntimeError, train, model, rank, steps) for steps in (range(3, 6), range(6, 7))]
    state.close()
    return texts


def test_a_rank_that_dies_is_an_error_that_names_the_bucket_also_without_codes(tmp_path: Path) -> None:
    (first, second), _ = run(_dies, 2, tmp_path, dies=(1,), collective_timeout=10)
    assert "gqsgd: bucket 0 of step 3 failed on rank 0 of 2" in first
    assert "after an earlier failure" in second
