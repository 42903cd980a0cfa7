"""What training loops do with a bare DDP model: freezing, uneven inputs, accumulation, compilation, local steps."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.hook import GQSGDState, register_gqsgd
from lightning_gqsgd.reducers.memory import Keeps
from tests.distributed.models import fingerprint, loss_of, mlp, train, wrapped
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.errors import error_text

#: One of each reducer, and two that remember: of what a rank sends, and of what it sends back as well.
HOOKS: list[dict[str, Any]] = [
    {"reducer": "native"},
    {"reducer": "sum"},
    {"reducer": "two_shot", "bits": 4},
    {"reducer": "gather"},
    {"preset": "signsgd_ef"},
    {"preset": "dore"},
]
QUANTISING = HOOKS[1:]


def _installed(model: DistributedDataParallel) -> None:
    assert model._get_ddp_logging_data()["comm_hook"] == "gqsgd_hook"


# --- parameters that are frozen or unfrozen late ---------------------------------------------------------------------


def _set_trained(model: nn.Module, *layers: int) -> None:
    for number, layer in enumerate(model):
        layer.requires_grad_(number in layers)


def _drifting(rank: int) -> tuple[str, str]:
    module = mlp()
    _set_trained(module, 4)
    model = DistributedDataParallel(module)
    train(model, rank, range(2))
    together = fingerprint(model)
    _set_trained(module, 0, 2, 4)
    train(model, rank, range(2, 4))
    return together, fingerprint(model)


def test_plain_ddp_lets_ranks_drift_apart_after_unfreezing(tmp_path: Path) -> None:
    """Why the hook looks. If this fails, DDP does so by itself."""
    (first, drifted), (same, other) = run(_drifting, 2, tmp_path)
    assert first == same
    assert drifted != other


#: Layers that are trained, by step.
SCHEDULE = [(4,), (4,), (2, 4), (2, 4), (0, 2, 4), (0, 2), (0, 2)]


def _scheduled(rank: int) -> list[list[Any]]:
    results = []
    for hook in HOOKS:
        reference = mlp()
        plain, state = wrapped({"find_unused_parameters": True}, hook, reference)
        for step, layers in enumerate(SCHEDULE):
            _set_trained(reference, *layers)
            train(plain, rank, range(step, step + 1))
        state.close()

        module = mlp()
        _set_trained(module, *SCHEDULE[0])
        model, state = wrapped({"bucket_cap_mb": 0.03}, hook, module)
        # The reference has compressed zeros for what was frozen: with the same memory as having sent nothing.
        for step, layers in enumerate(SCHEDULE):
            _set_trained(module, *layers)
            if state.changes() != ([], []):
                old = weakref.ref(model)
                model = state.rewrap(DistributedDataParallel)
                assert old() is None
                _installed(model)
            train(model, rank, range(step, step + 1))
        assert (state.step, state.telemetry.steps) == (len(SCHEDULE), len(SCHEDULE))
        assert state.changes() == ([], [])
        report = state.report()
        state.close()
        results.append([fingerprint(reference), fingerprint(module), report])
    return results


def test_wrapping_anew_goes_on_as_if_all_had_been_known_from_the_start(tmp_path: Path) -> None:
    first, second = run(_scheduled, 2, tmp_path)
    for hook, (expected, found, report), other in zip(HOOKS, first, second, strict=True):
        assert found == other[1], hook
        assert found == expected, hook
        if hook != {"reducer": "native"}:
            assert "20,480 gradient values in 2 tensors" in report


def _disagreeing(rank: int) -> tuple[str, str]:
    texts = []
    for alone in (False, True):
        module = mlp()
        _set_trained(module, 4)
        model, state = wrapped({}, {}, module)
        train(model, rank, range(2))
        _set_trained(module, 4, 2 * rank)
        if alone and rank == 0:
            _set_trained(module, 4)
        try:
            if state.changes() != ([], []):
                model = state.rewrap(DistributedDataParallel)
            train(model, rank, range(2, 3))
        except (ConfigError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        state.close()
    return tuple(texts)  # type: ignore[return-value]


def test_ranks_that_unfreeze_differently_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for rank, (both, alone) in enumerate(run(_disagreeing, 2, tmp_path, collective_timeout=4)):
        assert both.startswith("ConfigError: ranks 0 and 1 do not agree: parameters that require a gradient")
        assert "CollectiveError: gqsgd: " in alone
        assert ("rewrap on rank 1 of 2 waited 4 s for rank 0. Every rank" in alone) == (rank == 1)


def _frozen_checkpoint(rank: int) -> list[Any]:
    hook: dict[str, Any] = {"preset": "dore"}
    module = mlp()
    _set_trained(module, 4)
    model, state = wrapped({}, hook, module)
    train(model, rank, range(3))
    early = state.state_dict()
    _set_trained(module, 0, 2, 4)
    model = state.rewrap(DistributedDataParallel)
    train(model, rank, range(3, 5))
    late = state.state_dict()
    weights = copy.deepcopy(module.state_dict())
    train(model, rank, range(5, 7))
    whole = fingerprint(module)
    state.close()

    # A callback freezes the start again when the run is resumed, and unfreezes after the memory has been loaded.
    module = mlp()
    module.load_state_dict(weights)
    _set_trained(module, 4)
    model, state = wrapped({}, hook, module)
    shared = [late]
    dist.broadcast_object_list(shared, src=0)
    state.load_state_dict(shared[0])
    _set_trained(module, 0, 2, 4)
    model = state.rewrap(DistributedDataParallel)
    train(model, rank, range(5, 7))
    state.close()
    numbers = [sorted(one["memory"]["up_reference"]) for one in (early, late)] if rank == 0 else []
    return [numbers, whole, fingerprint(module)]


def test_memory_of_what_was_ever_trained_is_saved_and_resumed(tmp_path: Path) -> None:
    (numbers, whole, resumed), other = run(_frozen_checkpoint, 2, tmp_path)
    assert numbers == [[4], [0, 2, 4]]
    assert whole == resumed == other[1] == other[2]


# --- uneven inputs ---------------------------------------------------------------------------------------------------


def _uneven(rank: int, unused: bool) -> list[list[Any]]:
    results = []
    hooks: list[dict[str, Any] | None] = [None, *HOOKS]
    for hook in hooks:
        model = DistributedDataParallel(mlp(), find_unused_parameters=unused, bucket_cap_mb=0.03)
        state = None if hook is None else register_gqsgd(model, **hook)
        with Join([model]):
            train(model, rank, range(3 + 2 * rank))
        results.append([fingerprint(model), 0 if state is None else state.step])
        if state is not None:
            _installed(model)
            state.close()
    return results


@pytest.mark.parametrize(
    "unused",
    [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="find_unused_parameters")],
)
def test_join_takes_ranks_without_inputs_as_zeros(unused: bool, tmp_path: Path) -> None:
    (plain, _), (native, step), *quantised = run_alike(_uneven, 3, tmp_path, unused)
    assert native == plain
    assert [step, *(steps for _, steps in quantised)] == [7] * 6
    assert plain not in [bits for bits, _ in quantised]


@on_ranks(2)
def test_join_with_another_divisor_is_an_error(rank: int) -> None:
    model, state = wrapped({}, {})
    with (
        pytest.raises(ConfigError) as error,
        Join([model], divide_by_initial_world_size=False),
    ):
        train(model, rank, range(2))
    state.close()
    text = str(error.value)
    assert "gqsgd divides by the number of all ranks" in text


# --- forward and backward in other orders ----------------------------------------------------------------------------


def _accumulated(rank: int) -> list[list[Any]]:
    results = []
    for hook in (None, *HOOKS):
        model = DistributedDataParallel(mlp())
        state = None if hook is None else register_gqsgd(model, **hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for window in range(3):
            optimizer.zero_grad()
            for step in range(4 * window, 4 * window + 3):
                with model.no_sync():
                    loss_of(model, rank, step).backward()
            loss_of(model, rank, 4 * window + 3).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            optimizer.step()
        results.append([fingerprint(model), state and state.step, gradient.norm().item()])
        if state is not None:
            state.close()
    return results


def test_no_sync_reduces_the_accumulated_gradient_once(tmp_path: Path) -> None:
    first, second = run(_accumulated, 2, tmp_path)
    (plain, _, norm), (native, *_), *quantised = first
    assert native == plain
    for hook, mine, other in zip(QUANTISING, quantised, second[2:], strict=True):
        assert mine[:2] == other[:2], hook
        assert mine[1] == 3
        if "preset" not in hook:
            assert mine[2] == pytest.approx(norm, rel=0.1)


class _Tied(nn.Module):
    """One matrix embeds and classifies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 32)
        self.inner = nn.Linear(32, 32)
        self.out = nn.Linear(32, 64, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.inner(self.embed(tokens))))


def _train_tied(rank: int, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()


def _under_every_hook(
    last: dict[str, Any], make: Callable[[], nn.Module], options: dict[str, Any], fit: Callable[[nn.Module], None]
) -> list[str]:
    """Bits after four steps without a hook, with native and quantised reduction, and with one more."""
    bits = []
    for hook in (None, {"reducer": "native"}, {"reducer": "two_shot"}, last):
        model = DistributedDataParallel(make(), **options)
        state = None if hook is None else register_gqsgd(model, **hook)
        fit(model)
        bits.append(fingerprint(model))
        if state is not None:
            assert state.step == 4
            _installed(model)
            state.close()
    return bits


@on_ranks(2)
def test_tied_weights_under_every_ddp_option(rank: int) -> list[list[str]]:
    results = []
    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        results.append(_under_every_hook({"preset": "signsgd_ef"}, _Tied, options, partial(_train_tied, rank)))
    for plain, native, *_ in results:
        assert native == plain
    assert all(bits[2:] == results[0][2:] for bits in results)
    return results


def _two_dtypes() -> nn.Module:
    model = mlp(depth=5)
    model[2].double()
    model[2].register_forward_pre_hook(lambda _, inputs: inputs[0].double())
    model[2].register_forward_hook(lambda *call: call[-1].float())
    return model


@on_ranks(2)
def test_a_static_graph_of_two_dtypes_under_every_hook(rank: int) -> list[list[str]]:
    fit = partial(train, rank=rank, steps=range(4))
    options = ({}, {"static_graph": True}, {"static_graph": True, "bucket_cap_mb": 0.03})
    # In its first step, DDP hands over a bucket of each dtype, all of them as the first bucket.
    result = [_under_every_hook({"bits": 4, "memory": "ef"}, _two_dtypes, each, fit) for each in options]
    for plain, native, *others in result:
        assert native == plain
        assert others == result[0][2:]
    return result


def _train_compiled(rank: int, model: nn.Module) -> None:
    torch._dynamo.reset()
    train(torch.compile(model, backend="aot_eager"), rank, range(4))  # type: ignore[arg-type]


@pytest.mark.slow
@on_ranks(2)
def test_a_compiled_ddp_model(rank: int) -> list[list[str]]:
    results = []
    for options in ({}, {"static_graph": True}):
        results.append(_under_every_hook({"preset": "dore"}, mlp, options, partial(_train_compiled, rank)))
    for plain, native, *_ in results:
        assert native == plain
    return results


# --- errors late in the run ------------------------------------------------------------------------------------------


def _late_error(rank: int, stage: int) -> tuple[str, str, bool]:
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"reducer": "two_shot"}, mlp(depth=5))
    train(model, rank, range(3))
    start, calls = state._engine.communicator.start, []

    def failing(exchange: Any, number: int, turn: int = 0) -> Any:
        calls.append(number)
        # On rank 0 only: how far the other rank comes before it learns of this, differs from run to run.
        if rank == 0 and number == stage and calls.count(stage) == 2:
            raise OSError("the wire was cut")
        return start(exchange, number, turn)

    state._engine.communicator.start = failing  # type: ignore[method-assign]
    texts = [error_text(RuntimeError, train, model, rank, range(step, step + 1)) for step in (3, 4)]
    finite = all(p.isfinite().all() for p in model.parameters())
    state.close()
    return *texts, finite


@pytest.mark.parametrize("stage", [1, 2])
def test_an_error_in_a_later_step_reaches_backward_and_stays(stage: int, tmp_path: Path) -> None:
    causes = ["the wire was cut", "Connection closed by global rank 0, which has ended or failed"]
    by_rank = run(_late_error, 2, tmp_path, stage, collective_timeout=10)
    for rank, (cause, (first, second, finite)) in enumerate(zip(causes, by_rank, strict=True)):
        for text in (first, second):
            assert cause in text
            assert f"on rank {rank} of 2" in text
        assert "after an earlier failure" in second
        assert finite  # no optimizer step was made with what came of it


@on_ranks(2)
def test_a_rank_that_cannot_wrap_anew_tells_the_others_before_they_wait_in_ddps_exchange(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    state = register_gqsgd(model, exclude=["2.weight"])
    train(model, rank, range(2))
    if rank:
        model.module[2] = nn.Identity()  # the pattern matches nothing
    text = error_text(ConfigError, state.rewrap, DistributedDataParallel)
    state.close()
    assert "2.weight" in text
    assert "still waits" not in text


def _an_exception_in_backward(rank: int) -> list[Any]:
    def stop(*_: Any) -> None:
        raise ArithmeticError

    model, state = wrapped({}, {"bits": 4}, mlp())
    train(model, rank, range(3))
    stops = model.module[2].register_full_backward_hook(stop)
    with pytest.raises(ArithmeticError):
        train(model, rank, range(3, 4))
    stops.remove()
    text = error_text(ConfigError, train, model, rank, range(3, 4))
    # What the error says.
    old = model  # it may live on, for example in a traceback
    model = state.rewrap(DistributedDataParallel)
    assert all(parameter.grad is None for parameter in old.parameters())
    train(model, rank, range(3, 6))
    return [text, state.step, fingerprint(model)]


def test_training_goes_on_as_the_error_after_an_interrupted_backward_pass_says(tmp_path: Path) -> None:
    text, step, _ = run_alike(_an_exception_in_backward, 2, tmp_path)
    assert text.endswith("state.rewrap drops the pass's gradients, and training goes on")
    assert step == 6


@on_ranks(2, collective_timeout=10)
def test_buckets_that_one_rank_has_sent_before_an_exception_are_never_paired_with_later_ones(rank: int) -> str:
    def stop(*_: Any) -> None:
        raise ArithmeticError

    options = {"find_unused_parameters": True, "bucket_cap_mb": 0.005}
    model, state = wrapped(options, {"bits": 4}, mlp())
    train(model, rank, range(2))
    layers = list(model.module)
    # The first rank has sent a bucket, and the other one none.
    layers[-1 if rank else 0].register_full_backward_hook(stop)
    with pytest.raises(ArithmeticError):
        train(model, rank, range(2, 3))
    text = error_text(ConfigError, state.rewrap, partial(DistributedDataParallel, **options))
    state.close()
    assert "stopped in step 2 after" in text
    assert "register it on a new DistributedDataParallel model" in text
    return text


def _destroyed_group(rank: int) -> list[str]:
    _, state = wrapped({}, {"bits": 2, "memory": "ef"})
    dist.destroy_process_group()
    calls: list[Callable[[], Any]] = [state.state_dict, partial(state.rewrap, DistributedDataParallel)]
    return [error_text(ConfigError, call) for call in calls]


def test_what_needs_a_destroyed_group_says_so(tmp_path: Path) -> None:
    for text in run_alike(_destroyed_group, 2, tmp_path):
        assert text.startswith("the process group was destroyed (destroy_process_group); make a new one")


@on_ranks(2)
def test_ranks_that_have_loaded_different_memories_raise_an_error_after_a_rewrap_as_well(rank: int) -> None:
    model = DistributedDataParallel(mlp())
    state = register_gqsgd(model, "diana", timeout=timedelta(seconds=20))
    train(model, rank, range(2))
    saved: list[Any] = [state.state_dict()]
    dist.broadcast_object_list(saved)
    for rows in saved[0]["memory"]["up_reference"].values():
        rows += rank
    state.load_state_dict(saved[0])
    model.module.register_parameter("new", nn.Parameter(torch.zeros(300)))
    model = state.rewrap(partial(DistributedDataParallel, find_unused_parameters=True))
    with pytest.raises((ConfigError, RuntimeError), match="do not agree"):
        train(model, rank, range(2, 3))


def _whole_means(state: GQSGDState) -> dict[str, Tensor]:
    """The mean of all ranks' references of each parameter, which its owners keep in parts."""
    memory = state.state_dict()["memory"]
    if memory is None:  # not rank 0
        return {}
    names = {entry.number: entry.name for entry in state._parameters.numbered}
    store = state._store
    return {names[number]: store.whole(number, rows) for number, rows in memory["up_mean"].items()}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks()
def test_owners_of_parameters_with_other_numbers_get_their_part_of_the_memory(rank: int, ranks: int) -> None:
    module = mlp()
    model = DistributedDataParallel(module)
    state = register_gqsgd(model, bits=4, memory="diana", reducer="two_shot")
    train(model, rank, range(2))
    before = _whole_means(state)
    # In front of all others: their numbers change, and with the numbers the ranks that keep a part.
    module.insert(0, nn.Linear(40, 40, bias=False))
    state.rewrap(DistributedDataParallel)
    after = _whole_means(state)
    assert bool(before) == (rank == 0)
    for name, mean in before.items():
        layer, rest = name.split(".", 1)
        assert mean.any()
        assert torch.equal(after[f"{int(layer) + 1}.{rest}"], mean)


@on_ranks(2)
def test_the_memory_goes_with_layers_that_change_places(rank: int) -> None:
    module = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
    model = DistributedDataParallel(module)
    state = register_gqsgd(model, bits=2, memory="ef", reducer="gather")
    model(torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    first, second = (state._store.row(Keeps.UP_ERROR, number).clone() for number in (0, 1))
    assert not torch.equal(first, second)
    module[0], module[1] = module[1], module[0]
    state.rewrap(DistributedDataParallel)
    assert torch.equal(state._store.row(Keeps.UP_ERROR, 0), second)
    assert torch.equal(state._store.row(Keeps.UP_ERROR, 1), first)


@on_ranks(2)
def test_layers_that_change_places_on_one_rank_are_an_error_of_all(rank: int) -> str:
    module = nn.Sequential(nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False))
    model = DistributedDataParallel(module)
    state = register_gqsgd(model, bits=4, memory="diana", reducer="two_shot", timeout=timedelta(seconds=20))
    model(torch.randn(8, 40)).square().sum().backward()
    if rank:
        module[0], module[1] = module[1], module[0]
    text = error_text(ConfigError, state.rewrap, DistributedDataParallel)
    assert "do not agree: places of parameters that were there before" in text
    return text


# --- post-local SGD --------------------------------------------------------------------------------------------------


def _post_local(rank: int) -> list[list[Any]]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results = []
    for subgroup in (None, groups[rank // 2]):
        for hook in (None, {"reducer": "native"}, {"reducer": "two_shot"}, {"preset": "signsgd_ef"}):
            local = PostLocalSGDState(
                None, subgroup, start_localSGD_iter=3, post_local_gradient_allreduce=bool(subgroup)
            )
            model = DistributedDataParallel(mlp())
            state = None
            if hook is None:
                model.register_comm_hook(local, post_localSGD_hook)
            else:
                state = register_gqsgd(model, post_local_sgd=local, **hook)
                _installed(model)
            averager = PeriodicModelAverager(period=2, warmup_steps=3)
            bits = []
            for step in range(6):
                train(model, rank, range(step, step + 1))
                averager.average_parameters(model.parameters())
                bits.append(fingerprint(model))
            results.append([bits, state and (state.step, state.telemetry.steps, local.iter)])
            if state is not None:
                assert state.state_dict()["post_local_iter"] == 3
                state.close()
    return results


@pytest.mark.slow
def test_post_local_sgd_quantises_first_and_then_takes_torchs_way(tmp_path: Path) -> None:
    by_rank = run(_post_local, 4, tmp_path)
    for one in by_rank:
        for plain, native, *quantised in (one[:4], one[4:]):
            assert native[0] == plain[0]
            assert native[1] == (3, 3, 3)
            assert all(steps == (3, 3, 3) for _, steps in quantised)
    for number in range(8):
        by_step = [{one[number][0][step] for one in by_rank} for step in range(6)]
        alone = 4 if number < 4 else 2
        assert [len(bits) for bits in by_step] == [1, 1, 1, 1, alone, 1]


def _post_local_that_differs(rank: int) -> list[list[float]]:
    with pytest.raises(ConfigError, match=r"do not agree: post_local_sgd: .*start_localSGD_iter=3"):
        register_gqsgd(DistributedDataParallel(mlp()), post_local_sgd=PostLocalSGDState(None, None, 3 + rank))
    weights = []
    for reducer in ("native", "two_shot"):
        local = PostLocalSGDState(None, None, start_localSGD_iter=3, post_local_gradient_allreduce=False)
        model = DistributedDataParallel(mlp())
        state = register_gqsgd(model, post_local_sgd=local, reducer=reducer, timeout=timedelta(seconds=20))
        train(model, rank, range(2))
        loaded = {**state.state_dict(), "step": 3, "post_local_iter": 3}
        # All ranks: each of them trains on its own from there.
        state.load_state_dict(loaded)
        train(model, rank, range(2, 3))
        weights.append([float(parameter.detach().sum()) for parameter in model.parameters()])
        # A state from before steps of post-local SGD were counted.
        state.load_state_dict({name: value for name, value in loaded.items() if name != "post_local_iter"})
        assert local.iter == 3
        # One rank, while the others are in steps that are averaged.
        state.load_state_dict({**loaded, "step": 2, "post_local_iter": 2 + (rank == 0)})
        with pytest.raises((ConfigError, RuntimeError), match="do not agree"):
            train(model, rank, range(2, 3))
        state.close()
    return weights


def test_ranks_whose_post_local_sgd_differs_raise_an_error_before_one_trains_alone(tmp_path: Path) -> None:
    one, other = run(_post_local_that_differs, 2, tmp_path)
    assert all(mine != theirs for mine, theirs in zip(one, other, strict=True))


@on_ranks(2)
def test_post_local_sgd_that_could_not_count_or_average_as_ddp_does_is_an_error(rank: int) -> None:
    group = dist.new_group([0, 1])
    model = DistributedDataParallel(mlp())
    with pytest.raises(ConfigError, match="another process group than DistributedDataParallel"):
        register_gqsgd(model, post_local_sgd=PostLocalSGDState(group, None, 3))
    if "skip_all_reduce_unused_params" in inspect.signature(DistributedDataParallel).parameters:
        model = DistributedDataParallel(mlp(), find_unused_parameters=True, skip_all_reduce_unused_params=True)
        with pytest.raises(ConfigError, match="leave it False with post_local_sgd"):
            register_gqsgd(model, post_local_sgd=PostLocalSGDState(None, None, 3))
