"""Local steps between processes: what goes wrong. NaN, skipped steps, refusals, and errors of one rank."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import LocalSteps
from lightning_gqsgd.errors import CollectiveError, ConfigError
from lightning_gqsgd.local_steps import checkpoint
from lightning_gqsgd.local_steps.checkpoint import gathered_state, load_gathered
from tests.bits import bits_of
from tests.distributed.local_models import bits_of_model, local_steps, trained
from tests.distributed.models import fingerprint, loss_of, mlp, train_with
from tests.distributed.ranks import logged, on_ranks, run
from tests.errors import error_text


def _not_finite(rank: int) -> list[Any]:
    results = []
    for way in ({"every": 3}, {"every": 4, "fragments": 2, "delay": 1}):
        texts = logged()
        model, optimizer = trained(rank, way, 0)
        for step in range(15):
            if (rank, step) == (1, 4):
                with torch.no_grad():
                    model.layers[3].weight[3, 4] = torch.nan
            train_with(model, optimizer, rank, range(step, step + 1))
        optimizer.finish()
        finite = all(bool(tensor.isfinite().all()) for tensor in (*model.parameters(), *model.buffers()))
        averages = optimizer.averages
        results.append([bits_of_model(model), finite, averages.skipped, averages.averages, list(texts)])
        optimizer.close()
    return results


def test_where_a_ranks_change_is_not_finite_all_ranks_go_back_to_the_anchor(tmp_path: Path) -> None:
    first, second = run(_not_finite, 2, tmp_path)
    for mine, other in zip(first, second, strict=True):
        assert mine[:4] == other[:4]
        _, finite, skipped, averages, texts = mine
        assert finite
        assert 1 <= skipped <= 2 < averages
        assert len(texts) == skipped
        assert "went back to the anchor" in texts[0]
        assert "cleared" in other[4][0]


def _left_out_beside_another(rank: int) -> list[Any]:
    """At the end, an average that is not finite is under way, and one that is finite after it."""
    said = logged()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = local_steps(model, {"every": 4, "fragments": 2, "delay": 3, "outer": "sgd", "bits": 32})
    for step in range(4):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, torch.nan if (rank, step, number) == (0, 1, 0) else 0.1 * step)
        optimizer.step()
    optimizer.finish()
    averages = optimizer.averages
    at_anchor = [torch.equal(entry.tensor, anchor) for part in averages.fragments for entry, anchor in part.entries()]
    optimizer.close()
    return [averages.skipped, at_anchor, said]


def test_the_last_average_is_made_of_what_moves_after_ranks_have_gone_back_to_the_anchor(tmp_path: Path) -> None:
    for skipped, at_anchor, said in run(_left_out_beside_another, 2, tmp_path):
        assert skipped == 1
        assert at_anchor == [True] * 4
        assert "fragment 0 is not finite after step 4 ('0.weight'), because some rank's is not" in said[0]


@on_ranks(2)
def test_an_average_that_is_left_out_takes_nothing_from_the_errors_that_ranks_remember(rank: int) -> None:
    model, optimizer = trained(rank, {"every": 3, "outer_after": 0, "preset": "signsgd_ef"}, 6)
    averages = optimizer.averages
    before = averages.store.errors(averages.compressed_numbers)
    train_with(model, optimizer, rank, range(6, 8))
    optimizer.zero_grad()
    loss_of(model, rank, 8).backward()
    if rank:
        model.layers[3].bias.grad[0] = torch.nan  # sent uncompressed, so that all codes are finite
    optimizer.step()
    after = averages.store.errors(averages.compressed_numbers)
    same = [torch.equal(before[kind], after[kind]) for kind in before]
    train_with(model, optimizer, rank, range(9, 12))
    later = averages.store.errors(averages.compressed_numbers)
    optimizer.close()
    is_kept = any(bool(error.any()) for error in before.values())
    assert averages.skipped == 1
    assert is_kept
    assert all(same)
    assert not all(torch.equal(after[kind], later[kind]) for kind in after)


def _amp(rank: int) -> list[Any]:
    """A scaler that skips a step on one rank; a scheduler; clipping."""
    model = mlp()
    optimizer = local_steps(model, {"every": 4})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped = []
    for step in range(12):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, rank, step)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if (rank, step) == (1, 6):
            model[0].weight.grad[0, 0] = torch.inf
        before = fingerprint(model)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        skipped.append(fingerprint(model) == before)
    result = [optimizer.averages.step, bits_of_model(model), skipped, scheduler.get_last_lr()]
    optimizer.close()
    return result


def test_a_grad_scaler_that_skips_a_step_on_one_rank_leaves_ranks_in_step(tmp_path: Path) -> None:
    first, second = run(_amp, 2, tmp_path)
    assert first[:2] == second[:2]
    assert first[0] == 12
    assert first[2] == [False] * 12
    assert second[2] == [step == 6 for step in range(12)]


def _refused_under_a_scaler(rank: int) -> list[Any]:
    """An average is refused, because a parameter is unfrozen for a step."""
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=4, outer="sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    moved, averages = [], []
    for step in range(8):
        model.bias.requires_grad_(step == 3)
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if step == 3:
            with pytest.raises(ConfigError, match="has found frozen"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(bool(((model.weight - before + 0.2).abs() < 1e-5).all()))
        averages.append(optimizer.averages.averages)
    optimizer.close()
    return [moved, averages]


def test_after_a_refused_average_steps_under_a_scaler_and_rounds_are_as_before(tmp_path: Path) -> None:
    for moved, averages in run(_refused_under_a_scaler, 2, tmp_path):
        assert moved == [True] * 8
        assert averages == [0] * 7 + [1]


@on_ranks(2)
def test_a_grad_scaler_without_overflow_changes_nothing(rank: int) -> None:
    """A scaler whose scale is a power of two changes nothing; fused inner optimizers scale by themselves."""
    same = []
    for make in (torch.optim.SGD, partial(torch.optim.AdamW, fused=True)):
        bits = []
        for enabled in (False, True):
            model = mlp()
            optimizer = LocalSteps(model, make(model.parameters(), lr=0.01), every=2)
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
            for step in range(4):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, rank, step)).backward()
                scaler.step(optimizer)
                scaler.update()
            bits.append(fingerprint(model))
            optimizer.close()
        same.append(bits[0] == bits[1])
    assert same == [True, True]


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _fields(**fields: Any) -> Callable[[], LocalSteps]:
    return lambda: LocalSteps(*_model_and_optimizer(), **fields)


def _wrapped_in_ddp() -> LocalSteps:
    model, optimizer = _model_and_optimizer()
    other = DistributedDataParallel(model) if dist.get_world_size() == 1 else _FakeDDP(model)
    return LocalSteps(other, optimizer)


class _FakeDDP(DistributedDataParallel):
    """What one rank may build alone: the real constructor is a collective."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def _strangers() -> LocalSteps:
    return LocalSteps(mlp(), _model_and_optimizer()[1])


def _frozen() -> LocalSteps:
    model, optimizer = _model_and_optimizer()
    model.requires_grad_(False)
    return LocalSteps(model, optimizer)


def _with_counter() -> LocalSteps:
    model, optimizer = _model_and_optimizer()
    model.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    return LocalSteps(model, optimizer)


def _with_teacher() -> LocalSteps:
    model, optimizer = _model_and_optimizer()
    model.add_module("teacher", nn.Linear(3, 3).requires_grad_(False))
    return LocalSteps(model, optimizer)


def _in_bf16() -> LocalSteps:
    model, optimizer = _model_and_optimizer()
    return LocalSteps(model.bfloat16(), optimizer)


#: What one rank does, and what all ranks hear.
REFUSED: dict[str, tuple[Callable[[], LocalSteps], str]] = {
    "every": (_fields(every=0), "every=0 is out of range: 1 to"),
    "every of a round": (_fields(every=lambda number: 2 - 2 * number), "every(1)=0 is out of range"),
    "delay": (_fields(every=4, delay=4), "delay=4 must be less than every=4"),
    "fragments": (_fields(fragments=7), "fragments=7 is more than the 6 trained parameters"),
    "outer": (_fields(outer="adam"), "outer='adam' is not one of 'nesterov', 'sgd'"),
    "field": (_fields(fragment=2), "unknown field 'fragment'; did you mean 'fragments'?"),
    "preset": (_fields(preset="diloco"), "unknown preset 'diloco'; did you mean 'gqsgd_diloco'?"),
    "inner state": (_fields(every=4, delay=1, inner_state="average"), "inner_state='average' with delay=1"),
    "DDP": (_wrapped_in_ddp, "give LocalSteps the module itself"),
    "strangers": (_strangers, "6 of its 6 parameters from another model"),
    "frozen": (_frozen, "no parameter of the optimizer requires a gradient"),
    "differs": (_fields(every=5), "ranks 0 and 1 do not agree: every: 32 != 5"),
    "counter": (_with_counter, "ranks 0 and 1 do not agree: dtypes: "),
    "teacher": (_with_teacher, 'ranks 0 and 1 do not agree: parameters and buffers: "6 (digest '),
    "dtype": (_in_bf16, 'ranks 0 and 1 do not agree: dtypes: "torch.float32" != "torch.bfloat16"'),
    "outer differs": (_fields(outer="sgd"), 'outer: "SGD(lr=0.7, momentum=0.9, nesterov=True)" != "SGD(lr=1.0)"'),
}


def _refused(rank: int) -> dict[str, str]:
    return {name: error_text(ConfigError, make if rank == 1 else _fields()) for name, (make, _) in REFUSED.items()}


def test_what_one_rank_refuses_all_refuse(tmp_path: Path) -> None:
    first, second = run(_refused, 2, tmp_path)
    for name, (_, text) in REFUSED.items():
        assert text in first[name], name
        assert text in second[name], name


@on_ranks(2)
def test_what_is_refused_later(rank: int) -> None:
    model, inner = _model_and_optimizer()
    optimizer = LocalSteps(model, inner, every=2)
    with pytest.raises(ConfigError, match="LocalSteps averages the parameters that it was made with"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    with pytest.raises(ConfigError, match="the state was written without local steps"):
        optimizer.load_state_dict(inner.state_dict())
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        with pytest.raises(RuntimeError, match="this is a copy of a LocalSteps"):
            copied.step()
    train_with(model, optimizer, rank, range(3))
    uneven = error_text(ConfigError, optimizer.finish if rank == 0 else optimizer.step)
    optimizer.close()
    with pytest.raises(RuntimeError, match="this LocalSteps was closed"):
        optimizer.step()
    assert "do not agree: step" in uneven
    assert "different numbers of optimizer steps" in uneven


def _changed(state: dict[str, Any], *keys: Any, to: Any) -> dict[str, Any]:
    """A copy of a state in which one nested entry is another one."""
    state = copy.deepcopy(state)
    entry: Any = state
    for key in keys[:-1]:
        entry = entry[key]
    entry[keys[-1]] = to
    return state


@on_ranks(3)
def test_states_of_all_ranks_are_gathered_in_parts(rank: int) -> None:
    checkpoint.BYTES_AT_ONCE = 3000
    longest = []
    gather = dist.gather

    def noted(tensor: Any, *args: Any, **options: Any) -> Any:
        longest.append(tensor.numel())
        return gather(tensor, *args, **options)

    dist.gather = noted
    values = [{"rank": number, "values": torch.arange(1000.0 * (number + 1))} for number in range(3)]
    found = checkpoint.gathered(values[rank], dist.group.WORLD, torch.device("cpu"))
    assert (found is None) == (rank > 0)
    for x, y in zip(found or values, values, strict=True):
        assert x["rank"] == y["rank"]
        assert torch.equal(x["values"], y["values"])
    assert len(longest) > 10
    assert max(longest) <= 1000


@on_ranks(1)
def test_two_optimizers_of_one_model_both_start_from_their_anchors_with_another_number_of_ranks(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].bias.requires_grad_(False)
    heads = [LocalSteps(model, torch.optim.SGD(part.parameters(), 0.1), every=4) for part in model]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    states = [gathered_state(head.averages, [head.inner]) for head in heads]
    nn.init.zeros_(model[0].bias)
    frozen = states[0]["ranks"][0]["model"]["0.bias"].clone()
    for head, state in zip(heads, states, strict=True):
        of_two_ranks = {**state, "ranks": state["ranks"] * 2, "world_size": 2}
        load_gathered(head.averages, of_two_ranks, [head.inner])
    entries = [pair for head in heads for fragment in head.averages.fragments for pair in fragment.entries()]
    found = [torch.equal(entry.tensor, anchor) for entry, anchor in entries]
    for head in heads:
        head.close()
    assert found == [True] * 3
    assert torch.equal(model[0].bias, frozen)


class _Masked(nn.Linear):
    """Makes one buffer in its first forward pass, and gives another one its shape."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("ones", torch.empty(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(x.shape[1], dtype=torch.bool), persistent=False)
            self.ones = torch.ones(x.shape[1])
        return super().forward(x * self.mask * self.ones)


@on_ranks(1)
def test_a_model_that_makes_buffers_in_its_first_forward_pass_resumes_before_that_pass_and_after_it(rank: int) -> None:
    weights = []
    state: dict[str, Any] = {}
    for saves in (True, False):
        model = _Masked()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = LocalSteps(model, inner, every=2)
        if not saves:
            load_gathered(optimizer.averages, state, [inner])
            weights.append(fingerprint(model))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if saves:
            state = gathered_state(optimizer.averages, [inner]) or {}
            weights.append(fingerprint(model))
        load_gathered(optimizer.averages, state, [inner])
        weights.append(fingerprint(model))
        optimizer.close()
    assert len(set(weights)) == 1


@on_ranks(2)
def test_local_steps_begin_anew_where_one_rank_has_made_buffers_in_a_forward_pass(rank: int) -> str:
    model = _Masked()
    optimizer = LocalSteps(model, torch.optim.SGD(model.parameters(), 0.1), every=2)
    if rank == 0:
        model(torch.ones(2, 4))
    optimizer.averages.start_anew()
    optimizer.close()
    return fingerprint(model)


@on_ranks(1)
def test_a_state_of_a_model_with_other_parameters_frozen_is_refused_with_what_to_do(rank: int) -> None:
    model, inner = _model_and_optimizer()
    optimizer = LocalSteps(model, inner, every=3)
    state = optimizer.state_dict()
    optimizer.close()
    model[0].requires_grad_(False)
    optimizer = LocalSteps(model, inner, every=3)
    text = error_text(ConfigError, optimizer.load_state_dict, state)
    assert "('0.bias' is on one side only)" in text
    assert "with the same parameters frozen, or load the weights without the state" in text
    optimizer.close()


@on_ranks(1)
def test_a_state_goes_from_a_compiled_model_to_the_module_itself_and_back(rank: int) -> None:
    """Also one of an earlier version, in which the tensors of a compiled model had other names."""

    def made(compiles: bool) -> tuple[nn.Module, LocalSteps]:
        model, inner = _model_and_optimizer()
        wrapped: Any = torch.compile(model) if compiles else model
        return model, LocalSteps(wrapped, inner, every=3, delay=1, outer_after=0)

    ends = []
    for compiles in (True, False):
        model, optimizer = made(compiles)
        train_with(model, optimizer, rank, range(3))
        weights = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        assert len(state["local_steps"]["under_way"]) == 1
        everyone: Any = gathered_state(optimizer.averages, [optimizer.inner])
        train_with(model, optimizer, rank, range(3, 7))
        ends.append(bits_of_model(model))
        optimizer.close()
        anchors = state["local_steps"]["anchors"]
        earlier = _changed(state, "local_steps", "anchors", to={f"_orig_mod.{name}": anchors[name] for name in anchors})
        for saved in (state, earlier, everyone):
            model, optimizer = made(not compiles)
            if saved is everyone:
                load_gathered(optimizer.averages, saved, [optimizer.inner])
            else:
                model.load_state_dict(weights)
                optimizer.load_state_dict(saved)
            train_with(model, optimizer, rank, range(3, 7))
            ends.append(bits_of_model(model))
            optimizer.close()
    assert len(set(ends)) == 1


@on_ranks(2)
def test_a_state_with_a_wrong_entry_is_refused_before_anything_is_loaded(rank: int) -> None:
    """Refuse states with one wrong entry, and change nothing; then take the right one."""
    model, inner = _model_and_optimizer()
    way: dict[str, Any] = {"every": 3, "delay": 2, "preset": "signsgd_ef"}
    optimizer = LocalSteps(model, inner, **way)
    train_with(model, optimizer, rank, range(4))  # an average is under way
    right = {"own": optimizer.state_dict()["local_steps"]}
    everyone = gathered_state(optimizer.averages, [inner])
    shared = [everyone]
    dist.broadcast_object_list(shared)
    name = next(iter(right["own"]["anchors"]))
    wrong = [
        (("anchors", name), torch.zeros(1)),
        (("anchors", name), "nothing"),
        (("anchors", name), right["own"]["anchors"][name].double() * 1e300),
        (("settled_after",), []),
        (("settled_after",), ["never"]),
        (("rounds",), {}),
        (("rounds", "number"), -1),
        (("under_way",), [{"fragment": 7}]),
        (("under_way",), [3]),
        (("under_way", 0, "means", name), torch.zeros(1)),
        (("under_way", 0, "integers"), None),
        (("under_way", 0, "frozen"), [1]),
        (("outer",), {}),
        (("memory",), {"no such memory": {0: torch.zeros(3)}}),
        (("memory",), {"up": 3}),
    ]
    texts, before = [], bits_of_model(model)
    for keys, value in wrong:
        state = {**optimizer.state_dict(), "local_steps": _changed(right["own"], *keys, to=value)}
        texts.append(error_text(ConfigError, optimizer.load_state_dict, state))
    for keys, value in [(("model", name), torch.zeros(1)), (("optimizers",), [])]:
        wrong = _changed(shared[0], "ranks", rank, *keys, to=value)
        texts.append(error_text(ConfigError, load_gathered, optimizer.averages, wrong, [inner]))
    assert bits_of_model(model) == before
    load_gathered(optimizer.averages, shared[0], [inner])
    optimizer.load_state_dict(optimizer.state_dict())
    assert bits_of_model(model) == before
    optimizer.finish()
    optimizer.close()
    assert len(texts) == 17
    assert all("state of local steps" in text or "the checkpoint" in text for text in texts)


@on_ranks(2)
def test_a_state_of_which_a_part_does_not_fit_changes_nothing(rank: int) -> str:
    """A state whose last part does not fit is refused by rank 1, and all go on as if it had never been there."""
    model, inner = _model_and_optimizer()
    optimizer = LocalSteps(model, inner, every=2, outer_after=0)
    train_with(model, optimizer, rank, range(4))
    state = copy.deepcopy(optimizer.state_dict())
    train_with(model, optimizer, rank, range(4, 8))
    if rank:
        with pytest.raises(ConfigError, match=r"not that of this run's optimizers \(ValueError: .* nothing of it"):
            optimizer.load_state_dict({**state, "param_groups": []})
        with pytest.raises(ConfigError, match="not a mapping"):
            optimizer.load_state_dict(None)  # type: ignore[arg-type]
    train_with(model, optimizer, rank, range(8, 12))
    optimizer.finish()
    optimizer.close()
    return bits_of_model(model)


@on_ranks(2)
def test_no_step_is_made_at_the_anchor(rank: int) -> str:
    model, inner = _model_and_optimizer()
    optimizer = LocalSteps(model, inner, every=2)
    train_with(model, optimizer, rank, range(3))
    before = bits_of_model(model)
    with optimizer.averages.at_anchor():
        for method in (optimizer.averages.advance, optimizer.finish):
            with pytest.raises(ConfigError, match="leave the context first"):
                method()
    assert bits_of_model(model) == before
    optimizer.finish()
    optimizer.close()
    return bits_of_model(model)


@on_ranks(2)
def test_outer_optimizers_of_other_tensors_and_of_other_checkpoints(rank: int) -> None:
    """Outer optimizers of other tensors, and numbers that a checkpoint replaces."""
    model, inner = _model_and_optimizer()
    texts = []
    own = partial(torch.optim.SGD, list(model.parameters()), lr=1.0)
    for outer in (lambda anchors: own(), lambda anchors: torch.optim.SGD(anchors[:1], lr=1.0)):
        texts.append(error_text(ConfigError, LocalSteps, model, inner, every=2, outer=outer))
    optimizer = LocalSteps(model, inner, every=2)
    train_with(model, optimizer, rank, range(2))
    saved = optimizer.state_dict()
    optimizer.close()
    for outer in (partial(torch.optim.SGD, lr=0.1), torch.optim.Adam):
        model, inner = _model_and_optimizer()
        optimizer = LocalSteps(model, inner, every=2, outer=outer)
        if outer is torch.optim.Adam:
            texts.append(error_text(ConfigError, optimizer.load_state_dict, saved))
        else:
            said = logged()
            optimizer.load_state_dict(saved)
            texts += [" ".join(said), optimizer.report()]
        optimizer.close()
    elsewhere, some, warned, report, kind = texts
    assert "anchors that it is called with" in elsewhere
    assert "SGD of 1 tensor, not of" in some
    assert "goes on with its own numbers" in warned
    assert 'lr: "0.7" != "0.1"' in warned
    assert "outer SGD(lr=0.7, momentum=0.9, nesterov=True)" in report
    assert "another outer optimizer than Adam" in kind


class _WithMaskAndMean(nn.Module):
    """A mask of infinities, a running mean that is assigned anew in each forward pass, and one that has no value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("last", torch.tensor([torch.nan, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.layer(x)


@on_ranks(2)
def test_buffers_may_hold_infinities_and_nan_and_be_assigned_anew(rank: int) -> list[Any]:
    results = []
    for way in ({"every": 3}, {"every": 4, "delay": 2, "mixing": 0.5}):
        model = _WithMaskAndMean()
        start = bits_of_model(model.layer)
        optimizer = local_steps(model, way)
        train_with(model, optimizer, rank, range(8))
        optimizer.finish()
        whole = bool((model.mask == torch.full((4, 4), -torch.inf).triu(1)).all())
        whole = whole and model.last.isnan().tolist() == [True, False]
        results.append([bits_of_model(model), whole, optimizer.averages.skipped, bits_of_model(model.layer) != start])
        optimizer.close()
    for _, whole, skipped, moved in results:
        assert whole
        assert skipped == 0
        assert moved
    return results


@pytest.mark.parametrize("every", [4, "1h"])
@on_ranks(1)
def test_a_buffer_that_is_assigned_anew_at_the_anchor_gets_its_value_back(rank: int, every: int | str) -> None:
    model = _WithMaskAndMean()
    optimizer = local_steps(model, {"every": every})
    train_with(model, optimizer, rank, range(2))
    before = bits_of_model(model)
    with optimizer.averages.at_anchor():
        model(torch.ones(2, 32, requires_grad=True))
    result = [bits_of_model(model) == before, not model.mean.requires_grad]
    optimizer.close()
    assert result == [True, True]


class _WithTurnedMask(nn.Module):
    """A buffer of integers that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 10)
        self.register_buffer("mask", torch.zeros(3, 4, dtype=torch.bool).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@on_ranks(2)
def test_integer_buffers_may_have_any_strides(rank: int) -> None:
    model = _WithTurnedMask()
    optimizer = local_steps(model, {"every": 2})
    with torch.no_grad():
        model.get_buffer("mask")[1, 2] = rank == 0
    train_with(model, optimizer, rank, range(2))
    optimizer.close()
    assert bool(model.get_buffer("mask")[1, 2])
    assert int(model.get_buffer("mask").sum()) == 1


def _dying(rank: int) -> list[Any]:
    model = mlp()
    optimizer = local_steps(model, {"every": 3, "delay": 1, "preset": "signsgd_ef"})
    train_with(model, optimizer, rank, range(5))
    before = _common(optimizer.state_dict())
    if rank == 1:
        os._exit(3)
    text = error_text(CollectiveError, train_with, model, optimizer, rank, range(4))
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    said = logged()
    state = optimizer.state_dict()
    saved = [_common(state) == before, state["local_steps"]["under_way"], state["local_steps"]["step"], list(said)]
    optimizer.close()
    return [text, finite, saved]


def _common(state: dict[str, Any]) -> str:
    """A hash of the bits of a state's anchors and error memories."""
    own = state["local_steps"]
    return bits_of([*own["anchors"].values(), *(row for kind in own["memory"].values() for row in kind.values())])


def test_a_rank_that_dies_is_an_error_on_the_others_whose_parameters_and_state_stay(tmp_path: Path) -> None:
    (text, finite, (is_same, under_way, step, said)), _ = run(_dying, 2, tmp_path, dies=(1,), collective_timeout=20)
    assert "average 1 (fragment 0, after step 6)" in text
    assert "rank 0 of 2" in text
    assert finite
    assert is_same
    assert under_way == []
    assert step == 7
    assert len(said) == 1
    assert "does not include an average that has failed: gqsgd: average 1" in said[0]


def test_without_a_process_group_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match="torch.distributed is not initialised"):
        LocalSteps(*_model_and_optimizer())


@on_ranks(2)
def test_steps_that_were_never_counted_are_averaged_at_the_end(rank: int) -> list[Any]:
    """A loop that calls the inner optimizer's step; and one that makes no step."""
    model, inner = _model_and_optimizer()
    optimizer = LocalSteps(model, inner, every=4)
    start = bits_of_model(model)
    optimizer.finish()
    averages = optimizer.averages.averages
    unchanged = bits_of_model(model) == start
    said = logged()
    train_with(model, inner, rank, range(5))
    optimizer.finish()
    texts = list(said)
    moved = bits_of_model(model) != start
    optimizer.close()
    result = [bits_of_model(model), moved, unchanged, averages, texts]
    assert result[1:4] == [True, True, 0]
    assert "no optimizer step was counted" in result[4][0]
    return result
