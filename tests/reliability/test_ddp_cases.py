"""What torch tests of DistributedDataParallel, over the hook: what works with torch's bf16 hook works with ours.

The cases follow the subjects of torch's own tests (torch/testing/_internal/distributed/distributed_test.py). Each one
gives gradients of three steps at the same weights. The reducer "native" gives those of plain DDP to the bit; 8 bits
give the same bits on every rank, within the codec's error of plain DDP's. Left out is what plain DDP does not get right
itself on CPUs: ``delay_all_reduce_named_params``, for whose all-reduce nobody waits there.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_gqsgd import register_gqsgd
from tests.bits import bits_of
from tests.distributed.models import mlp
from tests.distributed.ranks import run

STEPS = 3
#: Relative L2 error of 8 bits that a gradient of one step may have. Theory says 0.8 % (docs/presets.md).
MOST_ERROR = 0.02
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "bf16": None,
    "native": {"reducer": "native"},
    "8 bit": {"bits": 8, "min_numel": 64},
}

Wrap = Callable[..., DistributedDataParallel]
#: A case makes its model, and yields after each backward pass.
Case = Callable[[int, Wrap], Iterator[nn.Module]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Enter a function into `CASES`."""
    CASES[function.__name__] = function
    return function


def data(rank: int, step: int, *shape: int) -> Tensor:
    """Another input on each rank and in each step."""
    return torch.randn(*(shape or (8, 32)), generator=torch.Generator().manual_seed(100 * step + rank))


def simple(model: nn.Module, rank: int, wrap: Wrap, *shape: int, **options: Any) -> Iterator[nn.Module]:
    """Three steps of a model that takes one tensor and gives one."""
    ddp = wrap(model, **options)
    for step in range(STEPS):
        outputs = ddp(data(rank, step, *shape))
        (outputs**3 + outputs**2).mean().backward()
        yield ddp
        ddp.zero_grad()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return make()


class Function(nn.Module):
    """A model of layers and of any forward pass over them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def two_layers(forward: Callable[..., Any]) -> nn.Module:
    """Layers ``a`` and ``b``, 32 to 32, under any forward pass."""
    return seeded(lambda: Function(forward, a=nn.Linear(32, 32), b=nn.Linear(32, 32)))


# --- models ----------------------------------------------------------------------------------------------------------


@case
def layers(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap)


@case
def frozen_parameters(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = mlp()
    model[0].requires_grad_(False)
    yield from simple(model, rank, wrap)


@case
def no_output_features(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.a(x).sum() + self.empty(x).sum())
    model.empty = nn.Linear(32, 0)
    yield from simple(model, rank, wrap, find_unused_parameters=True)


@case
def a_parameter_without_dimensions(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.b(self.a(x)) * self.scale)
    model.scale = nn.Parameter(torch.tensor(2.0))
    yield from simple(model, rank, wrap)


@case
def fp64(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.b(self.a(x.double()))).double()
    yield from simple(model, rank, wrap)


@case
def batch_norm_and_its_buffers(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))
    yield from simple(model, rank, wrap)


@case
def convolutions_in_channels_last(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = seeded(lambda: nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)))
    yield from simple(model.to(memory_format=torch.channels_last), rank, wrap, 2, 4, 9, 9)


@case
def a_recurrent_network(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = seeded(lambda: Function(lambda self, x: self.a(x)[0], a=nn.LSTM(16, 24, num_layers=2)))
    yield from simple(model, rank, wrap, 5, 2, 16)


@case
def attention(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = seeded(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
    yield from simple(model, rank, wrap, 2, 6, 32)


@case
def tied_weights(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.b(torch.tanh(self.a(x))))
    model.b.weight = model.a.weight
    yield from simple(model, rank, wrap)


# --- options of DDP --------------------------------------------------------------------------------------------------


@case
def gradients_as_views_of_buckets(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap, gradient_as_bucket_view=True)


@case
def tiny_buckets(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap, bucket_cap_mb=0.001)


@case
def a_static_graph(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap, static_graph=True)


@case
def buffers_are_not_broadcast(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64)))
    yield from simple(model, rank, wrap, broadcast_buffers=False)


@case
def states_are_not_compared_at_the_start(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap, init_sync=False)


@case
def ignored_parameters(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.b(self.a(x)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["a.weight"])
    ddp = wrap(model)
    for step in range(STEPS):
        ddp(data(rank, step)).square().mean().backward()
        model.a.weight.grad = None  # each rank's own
        yield ddp
        ddp.zero_grad()


@case
def a_device_mesh_in_the_groups_place(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    yield from simple(mlp(), rank, wrap, device_mesh=mesh)


# --- graphs ----------------------------------------------------------------------------------------------------------


@case
def an_unused_layer(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.a(x))
    yield from simple(model, rank, wrap, find_unused_parameters=True)


@case
def ranks_use_other_layers(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: self.a(x) if rank == 0 else self.b(x))
    yield from simple(model, rank, wrap, find_unused_parameters=True)


@case
def steps_use_other_layers(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    steps = iter(range(STEPS))
    model = two_layers(lambda self, x: self.a(x) if next(steps) % 2 else self.b(x))
    yield from simple(model, rank, wrap, find_unused_parameters=True)


@case
def two_forward_passes_and_one_backward_pass(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        loss = ddp(data(rank, step)).square().mean() + ddp(data(rank, step + 50)).square().mean()
        loss.backward()
        yield ddp
        ddp.zero_grad()


@case
def outputs_of_other_kinds(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    pair = namedtuple("pair", "a b")
    for make in (list, tuple, pair._make, lambda outputs: dict(enumerate(outputs))):
        ddp = wrap(two_layers(lambda self, x, make=make: make([self.a(x), self.b(x)])), find_unused_parameters=True)
        ddp(data(rank, 0))[0].square().mean().backward()
        yield ddp


@case
def outputs_without_gradients(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(lambda self, x: (self.b(self.a(x)), torch.zeros(3), None, "text"))
    ddp = wrap(model)
    for step in range(STEPS):
        ddp(data(rank, step))[0].square().mean().backward()
        yield ddp
        ddp.zero_grad()


@case
def activations_are_computed_again(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    for reentrant in (False, True):
        model = two_layers(lambda self, x, r=reentrant: self.b(checkpoint(self.a, x, use_reentrant=r)))
        ddp = wrap(model)
        for step in range(STEPS):
            ddp(data(rank, step).requires_grad_()).square().mean().backward()
            yield ddp
            ddp.zero_grad()


@case
def a_shared_layer_is_computed_again_twice(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = two_layers(
        lambda self, x: checkpoint(self.a, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)
    )
    del model.b
    yield from simple(model, rank, wrap, static_graph=True)


# --- around the passes -----------------------------------------------------------------------------------------------


@case
def inference_between_steps(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        ddp.eval()
        with torch.no_grad():
            ddp(data(rank, step))
        ddp.train()
        ddp(data(rank, step)).square().mean().backward()
        yield ddp
        ddp.zero_grad()


@case
def a_backward_pass_that_never_comes(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        ddp(data(rank, step))  # its output is dropped
        ddp(data(rank, step)).square().mean().backward()
        yield ddp
        ddp.zero_grad()


@case
def gradients_that_are_zeroed_in_place(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        ddp(data(rank, step)).square().mean().backward()
        yield ddp
        ddp.zero_grad(set_to_none=False)


@case
def gradients_that_are_not_zeroed(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    with ddp.no_sync():
        ddp(data(rank, 7)).square().mean().backward()
    ddp(data(rank, 0)).square().mean().backward()
    yield ddp


@case
def autocast(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = ddp(data(rank, step)).float().square().mean()
        loss.backward()
        yield ddp
        ddp.zero_grad()


@case
def hooks_of_modules(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    model = mlp()
    model[0].register_forward_hook(lambda _m, _i, output: output * 2)
    model[2].register_full_backward_hook(lambda _m, inputs, _o: tuple(2 * g for g in inputs if g is not None))
    yield from simple(model, rank, wrap)


@case
def parameters_from_elsewhere(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    ddp = wrap(mlp())
    for step in range(STEPS):
        parameters = dict(ddp.named_parameters())
        torch.func.functional_call(ddp, parameters, (data(rank, step),)).square().mean().backward()
        yield ddp
        ddp.zero_grad()


@case
def a_profiler(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield from simple(mlp(), rank, wrap)


@case
def another_number_of_samples_on_each_rank(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp(), rank, wrap, 3 + 4 * rank, 32)


# --- the test --------------------------------------------------------------------------------------------------------


def _steps(rank: int, make: Case, method: str) -> list[dict[str, Tensor]] | str:
    """The gradients of each step by the parameter's name; the name of the exception, if there is one."""
    states = []

    def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **options)
        fields = METHODS[method]
        if method == "bf16":
            ddp.register_comm_hook(None, bf16_compress_hook)
        elif fields is not None:
            states.append(register_gqsgd(ddp, **fields))
        return ddp

    torch.manual_seed(0)
    try:
        return [
            {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
            for model in make(rank, wrap)
        ]
    except Exception as error:  # it is the result
        return f"{type(error).__name__}: {error}"
    finally:
        for state in states:
            state.close()


def _all(rank: int) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, make in CASES.items():
        steps = {method: _steps(rank, make, method) for method in METHODS}
        plain = steps["plain"]
        found[name] = {method: made if isinstance(made, str) else "" for method, made in steps.items()}
        if any(isinstance(steps[method], str) for method in ("plain", "native", "8 bit")):
            continue
        found[name]["alike"] = all(
            one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
            for one, other in zip(plain, steps["native"], strict=True)
        )
        found[name]["errors"] = [_error(one, other) for one, other in zip(plain, steps["8 bit"], strict=True)]
        found[name]["bits"] = bits_of(gradient for step in steps["8 bit"] for gradient in step.values())
        found[name]["same names"] = all(a.keys() == b.keys() for a, b in zip(plain, steps["8 bit"], strict=True))
    return found


def _error(exact: dict[str, Tensor], approximate: dict[str, Tensor]) -> float:
    """Relative L2 error of all gradients together."""
    size = sum(float(exact[name].double().square().sum()) for name in exact)
    wrong = sum(float((exact[name].double() - approximate[name].double()).square().sum()) for name in exact)
    return (wrong / size) ** 0.5 if size else 0.0


@pytest.mark.reliability
def test_what_works_with_torchs_bf16_hook_works_with_ours(tmp_path: Path) -> None:
    first, second = run(_all, 2, tmp_path, timeout=280)
    wrong = {}
    for name, mine in first.items():
        refused = {method: mine[method] for method in METHODS if mine[method]}
        if mine["bf16"] and refused:
            print(f"{name}: not under the bf16 hook either: {refused}")
            continue
        checks = {
            "works": not refused,
            "native is plain DDP": mine.get("alike"),
            "gradients are there for the same parameters": mine.get("same names"),
            "the codec's error": max(mine.get("errors", [1.0])) < MOST_ERROR,
            "ranks are equal": mine.get("bits") == second[name].get("bits"),
        }
        if not all(checks.values()):
            wrong[name] = {"refused": refused, **{check: ok for check, ok in checks.items() if not ok}, **mine}
        print(f"{name}: errors {[f'{error:.4f}' for error in mine.get('errors', [])]}")
    assert not wrong
