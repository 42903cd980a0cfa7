"""Plain DDP in the place of the hook: who carries the gradients, and that nothing else changes, on real processes."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive import plain as plain_module
from lightning_gqsgd.adaptive.trials import UNKNOWN
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp import hook as hook_module
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.spec.decisions import Decision
from lightning_gqsgd.wire.telemetry import Meter
from tests.distributed.models import Branches, batch, fingerprint, loss_of, mlp, refused_step, train, wrapped
from tests.distributed.ranks import on_ranks, run
from tests.errors import error_text

#: Steps of the hook before plain DDP takes its place, where a decision for 32 bits was loaded.
LEAVES_AFTER = 8
SMALL_BUCKETS = {"bucket_cap_mb": 0.03}


def decided(state: GQSGDState, bits: int = 32) -> None:
    """Load a state that has decided for some bits, as after a resume."""
    saved = state.state_dict()
    rows = [Decision(3, bits, {32: 0.1, bits: 0.1}, "made up").to_dict()]
    saved["auto"] |= {"bits": bits, "reference_s": None, "decisions": rows}
    state.load_state_dict(saved)


def carrier(model: DistributedDataParallel) -> str:
    """The hook that DDP's own Reducer knows."""
    return model._get_ddp_logging_data().get("comm_hook") or "plain"


def auto(ddp: dict[str, Any], module: nn.Module | None = None, **fields: Any):
    """A DDP model whose hook has decided for 32 bits."""
    model, state = wrapped(ddp, {"preset": "gqsgd_auto", "sample_every": 0, **fields}, module)
    decided(state)
    return model, state


def on_plain(rank: int, module: nn.Module | None = None):
    """The same, after so many steps that plain DDP carries the gradients."""
    model, state = auto({}, module)
    train(model, rank, range(LEAVES_AFTER + 2))
    assert carrier(model) == "plain"
    return model, state


@on_ranks(2)
def test_what_is_frozen_while_plain_ddp_carries_the_gradients_is_an_error_before_weights_change(rank: int) -> str:
    model, state = on_plain(rank)
    model.module[0].requires_grad_(False)
    text = refused_step(model, rank, 20)
    state.close()
    assert "still waits for the gradient of parameter '0.weight', '0.bias'" in text
    return text


def asks_for_a_trial(state: GQSGDState) -> None:
    """Let the watch find at the next comparison that steps have become longer."""
    assert state._steering is not None
    trials, path = state._steering.trials, state._attachment.plain
    assert trials is not None
    assert path is not None
    trials._watch.reference_s, trials._watch.is_refined = 1e-6, True
    path._lengths.extend([10_000] * 50)


def _there_and_back(rank: int) -> dict[str, Any]:
    model, state = auto(SMALL_BUCKETS)
    meter, carriers, steps = Meter(state.telemetry), [], []
    for step in range(LEAVES_AFTER + 26):
        if step == LEAVES_AFTER + 12:
            asks_for_a_trial(state)
            values, report = meter.read(), state.report()
        train(model, rank, range(step, step + 1))
        carriers.append(carrier(model))
        steps.append(state.step)
    facts = {"bits": fingerprint(model), "carriers": carriers, "steps": steps, "values": values, "report": report}
    state.close()
    return facts


def test_plain_ddp_takes_the_hooks_place_and_the_hook_comes_back_for_a_trial_on_all_ranks_at_once(
    tmp_path: Path,
) -> None:
    first, second = run(_there_and_back, 2, tmp_path)
    assert first["bits"] == second["bits"]
    assert first["carriers"] == second["carriers"]
    back = LEAVES_AFTER + 21  # compared in the 20th step of plain DDP, and known in the next one
    assert first["carriers"] == (
        ["gqsgd_hook"] * LEAVES_AFTER + ["plain"] * (back - LEAVES_AFTER) + ["gqsgd_hook"] * (LEAVES_AFTER + 26 - back)
    )
    assert first["steps"] == list(range(1, LEAVES_AFTER + 27))
    assert first["values"]["gqsgd/plain"] == 1
    assert first["values"]["gqsgd/bits"] == 32
    assert first["values"]["gqsgd/bits_per_coordinate"] == 32
    assert "plain DDP reduces the gradients at present" in first["report"]


@on_ranks(2)
def test_the_hook_keeps_its_place_where_its_own_sums_are_faster_and_gives_the_bits_of_plain_ddp(rank: int) -> list[Any]:
    facts = []
    for least in (0, hook_module.LEAST_IN_MEMORY):
        with mock.patch.object(hook_module, "LEAST_IN_MEMORY", least):
            model, state = auto(SMALL_BUCKETS)
        train(model, rank, range(LEAVES_AFTER + 2))
        obstacle = state._steering._plain.obstacle if state._steering is not None else None
        facts.append((carrier(model), obstacle, fingerprint(model)))
        state.close()
    (through_memory, why, bits), (over_gloo, nothing, bits_of_ddp) = facts
    assert (through_memory, over_gloo, nothing) == ("gqsgd_hook", "plain", "")
    assert "shared memory" in why
    assert bits == bits_of_ddp
    return facts


@pytest.mark.parametrize(("least", "bits", "last"), [(1e-9, 4, "gqsgd_hook"), (1e9, 32, "plain")])
@on_ranks(2)
def test_plain_ddp_has_its_turn_and_the_shorter_one_is_kept_on_all_ranks(
    rank: int, least: float, bits: int, last: str
) -> dict[str, Any]:
    """A trial has ended with 4 bits by little, in a state that is loaded."""
    model, state = wrapped(SMALL_BUCKETS, {"preset": "gqsgd_auto", "sample_every": 0})
    saved = state.state_dict()
    rows = [Decision(3, 32, {32: 0.1, 4: least}, "made up").to_dict()]
    challenge = {"bits": 4, "seconds": {32: 0.1, 4: least}}
    # Without credit, there is no new trial, although steps are much shorter than these lengths.
    entries = {"bits": 32, "decisions": rows, "challenge": challenge, "credit": 0.0}
    state.load_state_dict({**saved, "auto": {**saved["auto"], **entries}})
    carriers, trying = [], []
    for step in range(LEAVES_AFTER + 40):
        train(model, rank, range(step, step + 1))
        carriers.append(carrier(model))
        trying.append(state.telemetry.choice["trying"])
    facts = {"bits": fingerprint(model), "carriers": carriers, "trying": trying, "used": state.config.num_bits}
    state.close()
    result = {**facts, "decisions": [row.to_dict() for row in state.decisions]}
    assert result["carriers"][: LEAVES_AFTER + 20] == ["gqsgd_hook"] * LEAVES_AFTER + ["plain"] * 20
    assert (result["carriers"][-1], result["used"], result["trying"][-1]) == (last, bits, 0.0)
    assert result["trying"][LEAVES_AFTER] == 1.0
    assert [row["bits"] for row in result["decisions"]] == [32, bits]
    return result


def _accumulating(model: nn.Module, rank: int, steps: int, *, to_none: bool, at: dict[int, Callable[[], None]]) -> str:
    """Train with two micro-batches a step and momentum; ``at``: what is done before a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        at.get(step, lambda: None)()
        for number, context in enumerate((model.no_sync(), contextlib.nullcontext())):
            with context:
                loss_of(model, rank, 2 * step + number).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return fingerprint(model)


@pytest.mark.slow
@on_ranks(2)
def test_bits_are_those_of_ddp_with_accumulation_momentum_and_gradients_that_are_views_of_buckets(rank: int) -> None:
    results, back = [], LEAVES_AFTER + 11
    for view in (False, True):
        for to_none in (False, True):
            ddp = {**SMALL_BUCKETS, "gradient_as_bucket_view": view}
            model, state = auto(ddp)
            seen: list[str] = []

            def look(model: DistributedDataParallel = model, seen: list[str] = seen) -> None:
                seen.append(carrier(model))

            # The first steps of a trial are those of 32 bits, so results stay those of DDP.
            at = {10: look, 12: lambda state=state: asks_for_a_trial(state), back + 1: look}
            mine = _accumulating(model, rank, back + 3, to_none=to_none, at=at)
            assert seen == ["plain", "gqsgd_hook"], seen
            count = state.step
            state.close()
            theirs = DistributedDataParallel(mlp(), **ddp)
            results.append((mine, _accumulating(theirs, rank, back + 3, to_none=to_none, at={}), str(ddp), count))
    for mine, ddp, options, count in results:
        assert mine == ddp, options
        assert count == LEAVES_AFTER + 14


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_of_plain_ddps_steps_resumes_with_the_decision_and_states_can_be_loaded_meanwhile(
    rank: int, tmp_path: Path
) -> dict[str, Any]:
    path = tmp_path / "checkpoint.pt"
    model, state = on_plain(rank)
    train(model, rank, range(LEAVES_AFTER + 2, 15))
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "gqsgd": state.state_dict()}, path)
    dist.barrier()
    train(model, rank, range(15, 20))
    whole = fingerprint(model)
    state.close()
    checkpoint = torch.load(path, weights_only=True)
    again = mlp()
    again.load_state_dict(checkpoint["model"])
    resumed, state = wrapped({}, {"preset": "gqsgd_auto", "sample_every": 0}, again)
    state.load_state_dict(checkpoint["gqsgd"])
    begun, bits = state.step, state.config.num_bits
    train(resumed, rank, range(15, 20))
    early = carrier(resumed)
    now = fingerprint(resumed)
    train(resumed, rank, range(20, 26))
    facts = {"whole": whole, "resumed": now, "step": begun, "bits": bits, "carriers": (early, carrier(resumed))}
    state.load_state_dict(checkpoint["gqsgd"])  # plain DDP stays in place, and the decision is the same
    train(resumed, rank, range(26, 40))
    facts["loaded"] = (state.step, carrier(resumed))
    decided(state, 8)  # another decision: the hook is back after the next comparison
    train(resumed, rank, range(40, 52))
    facts["at 8 bits"] = (carrier(resumed), state.config.num_bits)
    facts["bits"] = fingerprint(resumed)
    state.close()
    assert facts["resumed"] == facts["whole"]
    assert (facts["step"], facts["carriers"]) == (15, ("gqsgd_hook", "plain"))
    assert facts["loaded"] == (15 + 14, "plain")
    assert facts["at 8 bits"] == ("gqsgd_hook", 8)
    return facts


@pytest.mark.slow
@on_ranks(2, timeout=60)
def test_a_state_of_one_rank_only_is_an_error_on_all_at_the_next_comparison(rank: int) -> None:
    model, state = on_plain(rank)
    if rank == 1:
        state.step = 400
    text = error_text(ConfigError, train, model, rank, range(20, 33))
    assert carrier(model) == "plain"
    state.close()
    assert "do not agree: step" in text


@pytest.mark.slow
@on_ranks(2)
def test_copies_forks_second_hooks_and_the_end_of_the_hook_are_the_same_while_plain_ddp_carries_gradients(
    rank: int,
) -> dict[str, Any]:
    model, state = on_plain(rank)
    again = copy.deepcopy(model)
    known = state.step
    train(again, rank, range(20, 23))
    facts: dict[str, Any] = {"copy counts": state.step - known, "copy": fingerprint(again)}
    facts["second hook"] = error_text(ConfigError, register_gqsgd, model, bits=8)
    x, y = batch(rank, 30)
    if rank == 1:
        model(x)  # a forward pass for a look at outputs, on one rank only
    train(model, rank, range(30, 45))
    facts["steps"] = state.step
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        try:
            nn.functional.cross_entropy(model(x), y).backward()
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    facts["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    state.close()
    with torch.no_grad():
        model(x)
    facts["closed"] = error_text(RuntimeError, nn.functional.cross_entropy(model(x), y).backward)
    module = model.module
    assert state._attachment.plain is not None
    facts["keeps"] = len(state._attachment.plain._parameters)
    del model
    gc.collect()
    nn.functional.cross_entropy(module(x), y).backward()  # without DDP
    assert facts["copy counts"] == 0
    assert "already has the communication hook 'gqsgd_hook'" in facts["second hook"]
    assert facts["steps"] == LEAVES_AFTER + 2 + 15
    assert facts["child"] == 7
    assert "the hook was closed" in facts["closed"]
    assert facts["keeps"] == 0
    return facts


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="this torch finalizes each backward pass itself"
)
@on_ranks(2)
def test_backward_passes_that_are_finalized_by_hand_stay_so_whoever_carries_the_gradients(rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"carriers": []}
    for name, (model, state) in {"mine": auto(SMALL_BUCKETS), "ddp": (DistributedDataParallel(mlp()), None)}.items():
        model.require_manual_backward_finalization = True
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(LEAVES_AFTER + 14):
            loss_of(model, rank, step).backward()
            model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
            if state is not None and step in (LEAVES_AFTER + 2, LEAVES_AFTER + 13):
                facts["carriers"].append(carrier(model))
                asks_for_a_trial(state)
        facts[name] = fingerprint(model)
        if state is not None:
            state.close()
    assert facts["carriers"] == ["plain", "gqsgd_hook"]
    assert facts["mine"] == facts["ddp"]
    return facts


@pytest.mark.slow
@on_ranks(2)
def test_the_hook_stays_where_plain_ddp_cannot_take_its_place_and_the_decision_says_why(
    rank: int,
) -> list[tuple[str, str, str]]:
    results = []
    for options, is_set_later in (({"static_graph": True}, False), ({}, True), ({}, False)):
        if not options and not is_set_later:
            plain_module._NEEDED = ("no_such_name",)
        model, state = auto(options)
        if is_set_later:
            model._set_static_graph()
        train(model, rank, range(LEAVES_AFTER + 4))
        assert state._steering is not None
        results.append((carrier(model), state._steering._plain.after_native(), fingerprint(model)))
        state.close()
    for (name, why, _), reason in zip(results, ("static_graph=True", "static_graph=True", "no_such_name"), strict=True):
        assert name == "gqsgd_hook"
        assert "the hook stays, because of " in why
        assert reason in why
    return results


@pytest.mark.slow
@on_ranks(2)
def test_plain_ddp_takes_over_where_parameters_are_unused(rank: int) -> dict[str, Any]:
    """Each rank uses other parameters in each step."""
    ddp = {"find_unused_parameters": True}
    results = []
    for model, state in (auto(ddp, Branches()), (DistributedDataParallel(Branches(), **ddp), None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(30):
            x, y = batch(rank, step)
            nn.functional.cross_entropy(model(x, (step // 2 + rank) % 2), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(fingerprint(model))
        if state is not None:
            results += [carrier(model), state.step]
            state.close()
    mine, carried_by, steps, ddps = results
    result = {"mine": mine, "ddp": ddps, "carrier": carried_by, "steps": steps}
    assert result["mine"] == result["ddp"]
    assert (result["carrier"], result["steps"]) == ("plain", 30)
    return result


def _failing(whole: Callable[..., None], *, is_built: bool) -> Callable[..., None]:
    """A method that builds DDP's Reducer, or not, and raises."""

    def fail(*arguments: Any) -> None:
        if is_built:
            whole(*arguments)
        raise MemoryError("no room for buckets")

    return fail


@pytest.mark.slow
@on_ranks(2)
def test_an_exception_while_the_reducer_is_built_leaves_the_hook_whole(rank: int) -> list[tuple[str, str, str]]:
    results = []
    for is_built in (False, True):
        model, state = auto({**SMALL_BUCKETS, "gradient_as_bucket_view": True})
        whole, said = model._ddp_init_helper, []
        for step in range(LEAVES_AFTER + 6):
            model._ddp_init_helper = _failing(whole, is_built=is_built) if step == LEAVES_AFTER else whole
            try:
                train(model, rank, range(step, step + 1))
            except MemoryError:
                said.append(carrier(model))
                model._ddp_init_helper = whole
                assert step == LEAVES_AFTER
                state._steering._plain = UNKNOWN._replace(obstacle="")  # the hook carries another step
                train(model, rank, range(step, step + 1))
                said.append(carrier(model))
        said.append(carrier(model))
        count = state.step
        state.close()
        theirs = DistributedDataParallel(mlp(), **SMALL_BUCKETS)
        train(theirs, rank, range(LEAVES_AFTER + 6))
        assert fingerprint(theirs) == fingerprint(model)
        results.append((" ".join(said), str(count), fingerprint(model)))
    for said, count, _ in results:
        assert said == "gqsgd_hook gqsgd_hook plain"
        assert count == str(LEAVES_AFTER + 6)
    return results


@pytest.mark.slow
@on_ranks(2)
def test_uneven_inputs_under_join_keep_ranks_equal_and_who_carries_the_gradients(rank: int) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for before in (LEAVES_AFTER - 1, LEAVES_AFTER + 3):
        model, state = auto({})
        train(model, rank, range(before))
        for first in (20, 60):  # the number of steps differs, and some ranks make no forward passes
            with Join([model]):
                train(model, rank, range(first, first + 6 + 8 * rank))
        train(model, rank, range(100, 115))
        facts[f"after {before} steps"] = (carrier(model), fingerprint(model), state.step)
        state.close()
    assert [name for name, _, _ in facts.values()] == ["gqsgd_hook", "plain"]
    return facts


@pytest.mark.slow
@on_ranks(2)
def test_a_new_wrapping_begins_with_the_hook_and_unfrozen_parameters_are_noticed(rank: int) -> dict[str, Any]:
    module = mlp()
    module[0].weight.requires_grad_(False)
    model, state = on_plain(rank, module)
    module[0].weight.requires_grad_(True)
    said = error_text(ConfigError, train, model, rank, range(20, 22))
    model = state.rewrap(DistributedDataParallel)
    steps, carriers = [state.step], [carrier(model)]
    train(model, rank, range(30, 42))
    steps.append(state.step)
    carriers.append(carrier(model))
    facts = {"said": said, "steps": steps, "carriers": carriers, "bits": fingerprint(model)}
    state.close()
    assert "requires a gradient, but did not when" in facts["said"]
    assert facts["carriers"] == ["gqsgd_hook", "plain"]
    assert facts["steps"][1] == facts["steps"][0] + 12
    return facts


@pytest.mark.slow
@on_ranks(2)
def test_the_hook_stays_where_steps_cannot_be_counted_without_it(rank: int) -> tuple[str, int, str]:
    """As Lightning's manual optimisation with two optimizers: one forward pass, and DDP is prepared twice."""
    model, state = auto({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        loss = loss_of(model, rank, step)
        for _ in range(2 if step else 1):  # DDP itself allows for one before it has built its buckets anew
            model.reducer.prepare_for_backward([])
            loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
    result = carrier(model), state.step, fingerprint(model)
    state.close()
    assert result[:2] == ("gqsgd_hook", 39)
    return result
