"""Models under FSDP2 that change after hooks were registered: equal bits on all ranks, or an error on all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.frameworks.fsdp import register_gqsgd_fsdp
from tests.bits import bits_of
from tests.distributed.models import loss_of, mlp
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.errors import error_text
from tests.integrations.fsdp_models import gradients, mesh, needs_fsdp_hooks, quantised, relative_errors, sharded

pytestmark = needs_fsdp_hooks

Change = Callable[[nn.Module], Any]


class _OtherReduceScatter:
    """One that somebody else sets."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):  # type: ignore[no-untyped-def]
        return torch.distributed.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group)


def _set_on_all(model: nn.Module) -> None:
    for layer in (model[0], model[2], model):
        layer.set_all_reduce_hook(lambda gradients: None)


def _replace_head(model: nn.Module) -> None:
    model[4] = nn.Linear(128, 10)


def _add_adapter(model: nn.Module) -> None:
    model[2].register_module("adapter", nn.Linear(4, 4))
    model[2].register_forward_hook(lambda _, inputs, output: output + model[2].adapter.weight.sum())


def _add_parameter(model: nn.Module) -> None:
    model[2].scale = nn.Parameter(torch.ones(128))
    model[2].register_forward_hook(lambda _, inputs, output: output * model[2].scale)


#: Changes with which ranks would train apart, and what the error says.
APART: dict[str, tuple[Change, str]] = {
    "a hook on one module": (lambda model: model[2].set_all_reduce_hook(lambda _: None), "module '2' no longer has"),
    "a hook on all modules": (_set_on_all, "no longer has the all-reduce hook of register_gqsgd_fsdp"),
    "the hook removed": (lambda model: model.set_all_reduce_hook(None), "module 'the root' no longer has"),
    "another reduce-scatter": (
        lambda model: model[0].set_custom_reduce_scatter(_OtherReduceScatter()),
        "module '0' no longer has the custom reduce-scatter",
    ),
    "another head": (_replace_head, r"2 parameters \('4.weight', '4.bias'\) would be trained by each rank on its own"),
    "an adapter": (_add_adapter, r"2 parameters \('2.adapter.weight', '2.adapter.bias'\) would be trained"),
    "a parameter": (_add_parameter, r"1 parameter \('2.scale'\) would be trained"),
    "an ignored parameter unfrozen": (
        lambda model: model[3].bias.requires_grad_(True),
        r"1 parameter \('3.bias'\) would be trained",
    ),
    "a module sharded": (
        lambda model: model.append(fully_shard(nn.Linear(10, 10), mesh=mesh(2)["shard"])),
        r"1 module \('5'\) became sharded after register_gqsgd_fsdp",
    ),
}

#: Changes that FSDP takes in.
TOGETHER: dict[str, Change] = {
    "nothing": lambda model: None,
    "frozen": lambda model: model[2].requires_grad_(False),
    "unfrozen": lambda model: model[0].requires_grad_(True),
    "cast and back": lambda model: model.double().float(),
    "a module without parameters": lambda model: model.append(nn.ReLU()),
    "a frozen module": lambda model: model.append(nn.Linear(10, 10).requires_grad_(False)),
    "a module removed": lambda model: model.pop(3),
    "loaded": lambda model: model.load_state_dict(model.state_dict(), assign=True),
    "a parameter replaced, which FSDP puts back": lambda model: setattr(
        model[2], "weight", nn.Parameter(torch.ones(128, 128))
    ),
}


class _Biased(nn.Module):
    """Adds a frozen parameter that FSDP does not manage."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(128), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.bias).relu()


def _model(hooks: dict[str, Any]) -> tuple[nn.Module, Any]:
    """Three sharded modules, of which the first is frozen, and a frozen parameter that is not sharded."""
    on, model = mesh(2), mlp()
    model[3] = _Biased()
    model[0].requires_grad_(False)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=on["shard"])
    fully_shard(model, mesh=on["shard"], ignored_params={model[3].bias})
    return model, register_gqsgd_fsdp(model, replicate=on["replicate"], bits=4, **hooks)


def _steps(model: nn.Module, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("names", [list(APART)[:4], list(APART)[4:]], ids=["hooks", "parameters"])
@on_ranks(2)
def test_what_would_be_trained_apart_is_an_error_on_all_ranks(rank: int, names: list[str]) -> None:
    for name in names:
        change, text = APART[name]
        model, state = _model({"reduce_scatter": True})
        _steps(model, rank, range(2))
        change(model)
        with torch.no_grad():
            if name != "a module sharded":  # whose first forward pass has to be the root's
                loss_of(model, rank, 2)  # inference goes on
        with pytest.raises(ConfigError, match=text):
            loss_of(model, rank, 2).backward()
        state.close()


def _together(rank: int) -> list[str]:
    ends = []
    for change in TOGETHER.values():
        model, state = _model({})
        _steps(model, rank, range(2))
        change(model)
        _steps(model, rank, range(2, 4))
        ends.append(bits_of(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()))
        state.close()
    return ends


def test_what_fsdp_takes_in_is_trained_together(tmp_path: Path) -> None:
    first, second = run(_together, 2, tmp_path)
    assert dict(zip(TOGETHER, first, strict=True)) == dict(zip(TOGETHER, second, strict=True))


def _on_one_rank(rank: int) -> str:
    model, _ = quantised(mesh(2), {"bits": 4})
    _steps(model, rank, range(2))
    if rank == 1:
        model[2].set_all_reduce_hook(lambda _: None)
    try:
        _steps(model, rank, range(2, 4))
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_hook_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    waits, has = run(_on_one_rank, 2, tmp_path, collective_timeout=10)
    assert "module '2' no longer has the all-reduce hook" in has
    assert "failed on rank 0 of 2" in waits


@on_ranks(2)
def test_ranks_that_freeze_other_layers_all_raise(rank: int) -> None:
    texts = []
    for frozen, steps in (((4, 2), 2), ((2, 4), 2), ((2, None), 2), ((4, 2), 0)):
        model, _ = quantised(mesh(2), {"bits": 4, "sample_every": 0})
        _steps(model, rank, range(steps))
        if frozen[rank] is not None:
            model[frozen[rank]].requires_grad_(False)
        texts.append(error_text(ConfigError, loss_of(model, rank, 2).backward))
    assert all(
        "parameters were frozen, unfrozen or left without a gradient, on some ranks only" in text for text in texts
    )


@on_ranks(2)
def test_ranks_that_cast_weights_or_set_a_divisor_alone_all_raise(rank: int) -> None:
    changes: list[Change] = [lambda model: model.bfloat16(), lambda model: model.set_gradient_divide_factor(4.0)]
    for change in changes:
        model, _ = quantised(mesh(2), {"bits": 4})
        _steps(model, rank, range(2))
        if rank:
            change(model)
        text = error_text(ConfigError, _steps, model, rank, range(2, 3))
        assert "weights were cast or set_gradient_divide_factor was called there" in text


@pytest.mark.parametrize("on_root", [False, True])
@on_ranks(2)
def test_modules_around_a_part_that_has_hooks_are_named(rank: int, on_root: bool) -> None:
    said = logged(level=logging.WARNING)
    model = sharded(mesh(2)["shard"])
    register_gqsgd_fsdp(model if on_root else model[2], replicate=mesh(2)["replicate"], bits=4)
    _steps(model, rank, range(2))
    apart = [text for text in said if "nobody averages the gradients of 2 modules" in text]
    assert len(apart) == (0 if on_root else 1)
    model = sharded(mesh(2))  # torch averages over its replicas
    register_gqsgd_fsdp(model[2], replicate=mesh(2)["replicate"], bits=4)
    said.clear()
    _steps(model, rank, range(2))
    assert not any("nobody averages" in text for text in said)


class _TwoHeads(nn.Module):
    """Two heads of equal size, of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.heads = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.head = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.heads[self.head](self.body(x))
        return output


@on_ranks(2)
def test_gradients_of_other_parameters_are_not_taken_for_each_other(rank: int) -> None:
    texts = []
    torch.manual_seed(0)
    model, _ = quantised(mesh(2), {"bits": 4}, _TwoHeads())
    model.head = rank  # on each replica another one
    loss_of(model, rank, 0).backward()
    texts.append(error_text(ConfigError, loss_of(model, rank, 1).backward))
    for heads in ((0, 1), (0, None, 0)):
        torch.manual_seed(0)
        model, _ = quantised(mesh(2), {"bits": 4}, _TwoHeads())
        model.set_requires_all_reduce(False)
        for step, head in enumerate(heads):
            if step:
                model.set_requires_all_reduce(True)
            model.head = head or 0
            try:
                # Nothing of the heads' module is used without a head, which the next forward pass finds.
                loss_of(model if head is not None else model.body, rank, step).backward()
            except ConfigError as error:
                texts.append(str(error))
                break
    model, _ = quantised(mesh(2), {"bits": 4})
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 0).backward()
    model[2].bias.requires_grad_(False)
    apart, *accumulated = [*texts, error_text(ConfigError, loss_of(model, rank, 1).backward)]
    assert "left without a gradient, on some ranks only" in apart
    assert len(accumulated) == 3
    assert all("had parameters without a gradient in one of the backward passes" in text for text in accumulated)


class _SeveralHeads(nn.Module):
    """Layers whose forward passes may be computed again, in graphs of their own within the backward pass, and heads."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first = nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(64, 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x)).relu()
        return [head(x) for head in self.heads]


def _several_graphs(rank: int, separate: bool) -> list[Any]:
    torch.manual_seed(0)
    model = _SeveralHeads(checkpoints=not separate)
    on = mesh(2)
    for part in (*model.layers, *(model.heads if separate else ()), model):
        fully_shard(part, mesh=on["shard"])
    state = register_gqsgd_fsdp(model, replicate=on["replicate"], bits=4)
    for step in range(3):
        for part in range(2):
            model.set_requires_all_reduce(part == 1)
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + 2 * part + rank))
            losses = [output.square().mean() for output in model(x)]
            if separate:
                losses[0].backward(retain_graph=True)
                losses[1].backward()
            else:
                torch.stack(losses).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return [state.telemetry.steps, bits_of(p.full_tensor() for p in model.parameters())]


@pytest.mark.parametrize("separate", [False, True])
def test_gradients_accumulate_over_several_graphs(separate: bool, tmp_path: Path) -> None:
    """Reentrant checkpoints make graphs within a backward pass, and each loss may have a backward pass of its own."""
    steps, _ = run_alike(_several_graphs, 2, tmp_path, separate)
    assert separate or steps == 3


@on_ranks(2)
def test_fsdp_s_silence_after_an_interrupted_backward_pass_is_an_error(rank: int) -> str:
    """The error of the next forward pass, and gradients as torch has them after its own remedy."""
    model, _ = quantised(mesh(2), {"reducer": "native"})
    model.set_requires_all_reduce(False)
    loss_of(model, rank, 0).backward()
    stops = model[2].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, rank, 1).backward()
    stops.remove()
    text = error_text(ConfigError, loss_of, model, rank, 2)
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
        model.set_requires_all_reduce(True)
        theirs = sharded(mesh(2))
        for one in (model, theirs):
            loss_of(one, rank, 2).backward()
        assert max(relative_errors(model, gradients(theirs)).values()) == 0
    assert "an exception has ended an earlier backward pass" in text
    assert "reset_iter_state() on all ranks, where torch has it, or shard a new model" in text
    return text


@on_ranks(2)
def test_other_hooks_after_close_and_beside_reduce_scatters_are_no_error(rank: int) -> None:
    """A hook of somebody else after `close`, and one that takes nothing from ours."""
    model, state = quantised(mesh(2), {"bits": 4})
    _steps(model, rank, range(1))
    state.close()
    calls = []
    for layer in (model[0], model[2], model):
        layer.set_all_reduce_hook(calls.append)
    _steps(model, rank, range(1, 2))

    model = sharded(mesh(2)["shard"])
    register_gqsgd_fsdp(model, reduce_scatter=True, bits=4)
    model.set_all_reduce_hook(lambda gradients: torch.distributed.all_reduce(gradients))
    _steps(model, rank, range(1))
    assert len(calls) == 3


@on_ranks(2)
def test_what_fsdp_reduces_or_the_user_averages_is_no_error(rank: int) -> None:
    """What is logged by trainings in which nothing is wrong."""
    outside = nn.Sequential(sharded(mesh(2)["shard"]), nn.Linear(10, 10))
    register_gqsgd_fsdp(outside, replicate=mesh(2)["replicate"], bits=4)  # which warns of the linear layer
    model = sharded(mesh(1)["shard"])
    register_gqsgd_fsdp(model, reduce_scatter=True, bits=4)
    said = logged(level=logging.WARNING)
    _steps(outside, rank, range(2))
    _steps(model, rank, range(2))
    loss_of(lambda x: checkpoint(model, x, use_reentrant=False), rank, 2).backward()
    model.append(fully_shard(nn.Linear(10, 10), mesh=mesh(1)["shard"]))  # whose gradients torch reduces
    _steps(model, rank, range(3, 5))
    assert said == []


def _loaded(rank: int) -> list[str]:
    """The errors after one rank has loaded another state."""
    texts = []
    on = mesh(1)
    for loaded in ({"reduce-scatter of 2": 3, "reduce-scatter of 0": 7}, {}):
        model = sharded(on["shard"])
        state = register_gqsgd_fsdp(model, reduce_scatter=True, bits=4)
        _steps(model, rank, range(2))
        saved = state.state_dict()
        state.load_state_dict({**saved, "reductions": {}})  # modules that a state does not name go on from its step
        _steps(model, rank, range(2, 3))
        assert state.state_dict()["reductions"] == dict.fromkeys(saved["reductions"], 3)
        if rank:
            state.load_state_dict({**saved, "reductions": loaded})
        texts.append(error_text(ConfigError, loss_of(model, rank, 3).backward))
        state.close()
    return texts


def test_a_state_that_one_rank_has_loaded_is_an_error_on_all(tmp_path: Path) -> None:
    assert all("A state was loaded" in text for text in run_alike(_loaded, 2, tmp_path))


def _one_replica_differs(rank: int) -> list[str]:
    """What is logged after a rounding, and after a change of the weights of the first replica alone."""
    texts = []
    model, state = quantised(mesh(2), {"bits": 4, "reduce_scatter": True})
    said = logged(level=logging.WARNING)
    _steps(model, rank, range(2))
    for factor in (1 + 1e-3, 2):
        with torch.no_grad():
            model[2].weight.mul_(1 if rank else factor)
        _steps(model, rank, range(2, 9))  # more steps than parameters
        texts.append(" ".join(said))
    state.close()
    return texts


def test_weights_that_one_replica_has_changed_are_logged_once(tmp_path: Path) -> None:
    (rounded, text), theirs = run(_one_replica_differs, 2, tmp_path)
    assert rounded == ""
    assert text.count("ranks have different weights") == 1
    assert "parameter '2.weight (shard 0)' has " in text
    assert theirs == ["", ""]
