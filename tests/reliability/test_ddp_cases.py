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


def data(rank: int, step: int, *shape: int) -> Tensor:
    """Another input on each rank and in each step."""
    return torch.randn(*(shape or (8, 32)), generator=torch.Generator().manual_seed(100 * step + rank))


def simple(make: Callable[[], nn.Module], *shape: int, **options: Any) -> Case:
    """Three steps of a model that takes one tensor of a shape and gives one, in DDP with these options."""

    def steps(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
        ddp = wrap(make(), **options)
        for step in range(STEPS):
            outputs = ddp(data(rank, step, *shape))
            (outputs**3 + outputs**2).mean().backward()
            yield ddp
            ddp.zero_grad()

    return steps


def looped(backward: Callable[[nn.Module, Tensor], None]) -> Case:
    """Enter three steps of a usual model into `CASES`: what runs in each of them, up to its gradients."""

    def steps(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
        ddp = wrap(mlp())
        for step in range(STEPS):
            backward(ddp, data(rank, step))
            yield ddp
            ddp.zero_grad()

    CASES[backward.__name__] = steps
    return steps


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


def without_output_features() -> nn.Module:
    model = two_layers(lambda self, x: self.a(x).sum() + self.empty(x).sum())
    model.empty = nn.Linear(32, 0)
    return model


def scaled() -> nn.Module:
    model = two_layers(lambda self, x: self.b(self.a(x)) * self.scale)
    model.scale = nn.Parameter(torch.tensor(2.0))
    return model


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = two_layers(lambda self, x: self.b(torch.tanh(self.a(x))))
    model.b.weight = model.a.weight
    return model


def changing() -> nn.Module:
    steps = iter(range(STEPS))
    return two_layers(lambda self, x: self.a(x) if next(steps) % 2 else self.b(x))


def recomputed_twice() -> nn.Module:
    model = two_layers(
        lambda self, x: checkpoint(self.a, checkpoint(self.a, x, use_reentrant=False), use_reentrant=False)
    )
    del model.b
    return model


def hooked() -> nn.Module:
    model = mlp()
    model[0].register_forward_hook(lambda _m, _i, output: output * 2)
    model[2].register_full_backward_hook(lambda _m, inputs, _o: tuple(2 * g for g in inputs if g is not None))
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).to(memory_format=torch.channels_last)


CASES: dict[str, Case] = {
    # Models.
    "layers": simple(mlp),
    "frozen parameters": simple(frozen),
    "no output features": simple(without_output_features, find_unused_parameters=True),
    "a parameter without dimensions": simple(scaled),
    "fp64": simple(lambda: two_layers(lambda self, x: self.b(self.a(x.double()))).double()),
    "batch norm and its buffers": simple(
        lambda: seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)))
    ),
    "convolutions in channels last": simple(lambda: seeded(convolutions), 2, 4, 9, 9),
    "a recurrent network": simple(
        lambda: seeded(lambda: Function(lambda self, x: self.a(x)[0], a=nn.LSTM(16, 24, num_layers=2))), 5, 2, 16
    ),
    "attention": simple(
        lambda: seeded(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)), 2, 6, 32
    ),
    "tied weights": simple(tied),
    "hooks of modules": simple(hooked),
    # Options of DDP.
    "gradients as views of buckets": simple(mlp, gradient_as_bucket_view=True),
    "tiny buckets": simple(mlp, bucket_cap_mb=0.001),
    "a static graph": simple(mlp, static_graph=True),
    "buffers are not broadcast": simple(
        lambda: seeded(lambda: nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64))), broadcast_buffers=False
    ),
    "states are not compared at the start": simple(mlp, init_sync=False),
    # Graphs.
    "an unused layer": simple(lambda: two_layers(lambda self, x: self.a(x)), find_unused_parameters=True),
    "ranks use other layers": simple(
        lambda: two_layers(lambda self, x: self.a(x) if dist.get_rank() == 0 else self.b(x)),
        find_unused_parameters=True,
    ),
    "steps use other layers": simple(changing, find_unused_parameters=True),
    "a shared layer is computed again twice": simple(recomputed_twice, static_graph=True),
}


def case(function: Case) -> Case:
    """Enter a function into `CASES`."""
    CASES[function.__name__] = function
    return function


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
    yield from simple(mlp, device_mesh=mesh)(rank, wrap)


@case
def a_profiler(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        yield from simple(mlp)(rank, wrap)


@case
def another_number_of_samples_on_each_rank(rank: int, wrap: Wrap) -> Iterator[nn.Module]:
    yield from simple(mlp, 3 + 4 * rank, 32)(rank, wrap)


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


# --- around the passes -----------------------------------------------------------------------------------------------


@looped
def two_forward_passes_and_one_backward_pass(ddp: nn.Module, x: Tensor) -> None:
    (ddp(x).square().mean() + ddp(x.flip(0) + 1).square().mean()).backward()


@looped
def inference_between_steps(ddp: nn.Module, x: Tensor) -> None:
    ddp.eval()
    with torch.no_grad():
        ddp(x)
    ddp.train()
    ddp(x).square().mean().backward()


@looped
def a_backward_pass_that_never_comes(ddp: nn.Module, x: Tensor) -> None:
    ddp(x)  # its output is dropped
    ddp(x).square().mean().backward()


@looped
def autocast(ddp: nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = ddp(x).float().square().mean()
    loss.backward()


@looped
def parameters_from_elsewhere(ddp: nn.Module, x: Tensor) -> None:
    torch.func.functional_call(ddp, dict(ddp.named_parameters()), (x,)).square().mean().backward()


@looped
def parameters_that_are_computed_from_the_models(ddp: nn.Module, x: Tensor) -> None:
    computed = {name: p * 0.5 for name, p in ddp.named_parameters()}
    torch.func.functional_call(ddp, computed, (x,)).square().mean().backward()


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
