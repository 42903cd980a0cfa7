"""FSDP2 with all-gathers of weights at few bits, on real processes, against torch's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from lightning_gqsgd.wire import plan
from lightning_gqsgd.wire.communicator import CollectiveError
from lightning_gqsgd.wire.engine import Engine, Request
from tests.bits import bits_of
from tests.distributed.models import loss_of, mlp, train
from tests.distributed.ranks import on_ranks, run, run_alike
from tests.errors import error_text
from tests.integrations.fsdp_models import (
    gradients,
    mesh,
    needs_fsdp_hooks,
    once,
    padded,
    relative_errors,
    sharded,
    weight_bits,
)

pytestmark = needs_fsdp_hooks

GATHERED = {"reduce_scatter": True, "all_gather_bits": 8, "min_numel": 0}


class _Seen(torch.autograd.Function):
    """The identity, which notes the weight of a layer in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.seen.append(ctx.layer.weight.detach().clone())
        return *gradients, None


class Layer(nn.Linear):
    """Notes the weight that its forward and backward passes compute with."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.weight.detach().clone())
        return _Seen.apply(super().forward(x), self)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(32, 33), nn.ReLU(), Layer(33, 65), nn.ReLU(), nn.Linear(65, 10))


def gathered(
    model: nn.Module | None = None, hooks: dict[str, Any] | None = None, **policy: Any
) -> tuple[nn.Module, GQSGDFSDPState]:
    """A model that all ranks share, with rounded weights."""
    model = sharded(mesh(1)["shard"], model, **policy)
    return model, register_gqsgd_fsdp(model, **(GATHERED if hooks is None else hooks))


def _rounded(rank: int) -> tuple[str, str]:
    """The weights that passes compute with, and the exact ones in the end."""
    model, state = gathered(layers(), {**GATHERED, "exclude": ("2.*",)})
    assert "; 1,749 weights in 4 sharded tensors, gathered at 8 bits" in state.report()
    model[0].weight.requires_grad_(False)  # its weights are gathered, and it has no gradients
    assert "gqsgd: 693 gradient values in 3 sharded tensors" in state.report()
    model[0].weight.requires_grad_(True)
    first, second = model[0], model[2]
    exact = [first.weight.full_tensor().clone()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        exact.append(first.weight.full_tensor().clone())
    with torch.no_grad():
        for _ in range(2):
            loss_of(model, rank, 0)
    forward, backward, forward_again, backward_again, *evaluated = first.seen
    assert torch.equal(forward, backward)
    assert torch.equal(forward_again, backward_again)
    assert torch.equal(*evaluated)
    for seen, whole in ((forward, exact[0]), (forward_again, exact[1]), (evaluated[0], exact[2])):
        error = float((seen - whole).norm() / whole.norm())
        assert 0 < error < 0.02
    assert torch.equal(second.seen[-1], second.weight.full_tensor())  # excluded
    assert len(state.telemetry.buckets) == 6
    model.reshard()  # after an evaluation, FSDP keeps the weights of the root
    found = bits_of(first.seen), weight_bits(model)
    state.close()
    with torch.no_grad():
        loss_of(model, rank, 0)
    assert torch.equal(first.seen[-1], first.weight.full_tensor())
    with pytest.raises(RuntimeError, match="the hook was closed"):
        loss_of(model, rank, 0).backward()
    return found


def test_passes_of_a_step_compute_with_the_same_rounded_weights_on_all_ranks(tmp_path: Path) -> None:
    first, second = run(_rounded, 2, tmp_path)
    assert first == second


def _trained(rank: int) -> dict[str, Any]:
    plain = sharded(mesh(1)["shard"])
    losses = {"torch": train(plain, rank, range(12))}
    found = {}
    sent = {}
    for name, hooks in {
        "gradients": {"reduce_scatter": True},
        "both": {"reduce_scatter": True, "all_gather_bits": 8},
        "few": {"reduce_scatter": True, "all_gather_bits": 6, "bits": 4},
    }.items():
        model, state = gathered(None, hooks)
        losses[name] = train(model, rank, range(12))
        found[name] = weight_bits(model)
        sent[name] = state.telemetry.totals()["bytes_sent"]
        state.close()
    return {"losses": losses, "bits": found, "sent": sent}


@pytest.mark.slow
def test_training_like_torch(tmp_path: Path) -> None:
    ranks = run(_trained, 4, tmp_path)
    assert all(other["bits"] == ranks[0]["bits"] for other in ranks)
    for one in ranks:
        exact = torch.tensor(one["losses"].pop("torch"))
        for name, losses in one["losses"].items():
            torch.testing.assert_close(torch.tensor(losses), exact, rtol=0, atol=0.04 if name == "few" else 0.02)
    # A module's weights travel twice in a step, those of the root once.
    assert 2.4 < ranks[0]["sent"]["both"] / ranks[0]["sent"]["gradients"] <= 3


@pytest.mark.slow
@on_ranks(4)
def test_policies_and_accumulation(rank: int) -> None:
    on = mesh(1)["shard"]
    halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for policy in (
        {"mp_policy": halves},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)},
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        theirs = sharded(on, padded(), **policy)
        once(theirs, rank)
        ours, state = gathered(padded(), **policy)
        once(ours, rank)
        errors = relative_errors(ours, gradients(theirs))
        assert 0 < max(errors.values()) < 0.15, (policy, errors)
        state.close()

    # In a step whose gradients wait, the weights are the same in all of its passes.
    model, state = gathered(layers())
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss_of(model, rank, micro).backward()
    assert all(torch.equal(one, model[0].seen[0]) for one in model[0].seen)
    assert state.step == 1
    state.close()


@pytest.mark.slow
@on_ranks(4)
def test_replicas_have_the_same_weights(rank: int) -> str:
    """Two replicas of two shards, without reduce-scatters at few bits."""
    on = mesh(2)
    model = sharded(on["shard"], padded())
    state = register_gqsgd_fsdp(model, replicate=on["replicate"], all_gather_bits=8, min_numel=0)
    train(model, rank, range(3))
    state.close()
    return weight_bits(model)


@on_ranks(2)
def test_a_step_makes_no_plan_that_the_step_before_has_made(rank: int) -> list[int]:
    """The number of plans that each step makes, where the tables of one module are as many as are kept."""
    made = []
    planned = Engine._planned

    def counted(engine: Engine, x: torch.Tensor, request: Request) -> plan.Plan:
        made.append(request.name)
        return planned(engine, x, request)

    Engine._planned = counted
    plan.MAX_PLAN_BYTES = 0
    model = sharded(mesh(1)["shard"], padded())
    state = register_gqsgd_fsdp(model, **GATHERED)
    counts = []
    for _ in range(3):
        before = len(made)
        once(model, rank)
        counts.append(len(made) - before)
    state.close()
    first, *later = counts
    assert first > 2
    assert later == [0, 0]
    return counts


@on_ranks(2)
def test_kernels_of_uncompressed_gradients_are_compiled_before_they_are_needed(rank: int) -> None:
    """A module may be reduced uncompressed in any step, and weights are always compressed."""
    found = set()
    compile_all = Engine.compile

    def noted(
        engine: Engine, configs: Sequence[GQSGDConfig], dtypes: Sequence[torch.dtype], of: type[plan.Plan] = plan.Plan
    ) -> None:
        found.update((of.__name__, config.warmup_steps) for config in configs)
        compile_all(engine, configs, dtypes, of)

    Engine.compile = noted
    model = sharded(mesh(1)["shard"], padded())
    state = register_gqsgd_fsdp(model, **GATHERED)
    once(model, rank)
    state.close()
    assert found == {("ScatterPlan", 1), ("GatherPlan", 0)}


def _held(rank: int) -> set[tuple[str, bool]]:
    found = set()
    reduce = Engine.reduce

    def noted(engine: Engine, x: torch.Tensor, request: Request) -> Any:
        found.add((request.name.partition(" of ")[0], request.is_held))
        return reduce(engine, x, request)

    Engine.reduce = noted
    on = mesh(2)
    model = sharded(on["shard"], padded())
    state = register_gqsgd_fsdp(model, replicate=on["replicate"], **GATHERED)
    once(model, rank)
    state.close()
    return found


def test_tensors_that_fsdp_keeps_are_held(tmp_path: Path) -> None:
    """They are of whole modules. FSDP frees them in the order of its own streams, so that it needs little memory."""
    expected = {("all-gather", True), ("reduce-scatter", True), ("all-reduce", False)}
    assert run_alike(_held, 4, tmp_path) == expected


@on_ranks(2)
def test_a_rank_that_has_a_whole_replica_is_not_said_to_gather_weights(rank: int) -> None:
    on = mesh(2)
    model = sharded(on["shard"], padded())
    state = register_gqsgd_fsdp(model, replicate=on["replicate"], all_gather_bits=2, min_numel=0)
    found = state.report()
    state.close()
    assert "averaged over 2 replicas" in found
    assert "gathered" not in found


@pytest.mark.slow
@on_ranks(2)
def test_a_resumed_run_has_the_same_bits(rank: int) -> None:
    whole, _ = gathered(padded())
    train(whole, rank, range(6))
    first, saving = gathered(padded())
    train(first, rank, range(3))
    second, state = gathered(padded(), {**GATHERED, "seed": 5})
    second.load_state_dict(first.state_dict())
    state.load_state_dict(saving.state_dict())
    train(second, rank, range(3, 6))
    assert weight_bits(second) == weight_bits(whole)


@pytest.mark.slow
@on_ranks(2)
def test_a_state_that_one_rank_has_loaded_is_noticed(rank: int) -> None:
    model, state = gathered(padded())
    train(model, rank, range(1))
    if rank == 1:
        state.load_state_dict({**state.state_dict(), "step": 7, "reductions": {}})
    text = error_text(ConfigError, lambda: once(model, rank))
    assert "step" in text


def _dies(rank: int) -> tuple[str, bool]:
    model, _ = gathered(padded())
    train(model, rank, range(1))
    exact = [p.to_local().clone() for p in model.parameters()]
    if rank == 1:
        os._exit(7)
    text = error_text(CollectiveError, lambda: once(model, rank))
    model.reshard()
    unchanged = all(torch.equal(p.to_local(), own) for p, own in zip(model.parameters(), exact, strict=True))
    return text, unchanged


@pytest.mark.slow
def test_a_rank_that_dies_before_a_forward_pass_is_an_error(tmp_path: Path) -> None:
    (text, unchanged), _ = run(_dies, 2, tmp_path, dies=(1,), collective_timeout=10)
    assert "all-gather of" in text
    assert "failed on rank 0 of 2" in text
    assert unchanged  # the shards


@on_ranks(2)
def test_refusals(rank: int) -> None:
    texts = []
    on = mesh(1)["shard"]

    def fails(hooks: dict[str, Any], model: nn.Module) -> None:
        texts.append(error_text(ConfigError, lambda: register_gqsgd_fsdp(model, **hooks)))

    model = sharded(on)
    fails({"all_gather_bits": 8}, model)
    for bits in (1, 16, True, "8"):
        fails({**GATHERED, "all_gather_bits": bits}, model)
    fails({**GATHERED, "all_gather_bits": 8 if rank else None}, model)

    class Own:
        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

    model.set_custom_all_gather(Own())
    fails(GATHERED, model)
    assert "reduce-scattered" in register_gqsgd_fsdp(model, reduce_scatter=True).report()  # not ours to replace

    model = fully_shard(mlp(), mesh=on)
    register_gqsgd_fsdp(model, **GATHERED)
    assert isinstance(model, FSDPModule)
    model.set_custom_all_gather(Own())
    texts.append(error_text(ConfigError, lambda: once(model, rank)))
    alone, one, sixteen, flag, word, differing, taken, lost = texts
    assert "nothing would be compressed" in alone
    assert "all_gather_bits=1 is out of range: 2 to 8" in one
    assert "all_gather_bits=16" in sixteen
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in sixteen
    assert "all_gather_bits=True must be an integer" in flag
    assert "all_gather_bits='8' must be an integer" in word
    assert "all_gather_bits: null != 8" in differing
    assert "already has an all-gather of its own" in taken
    assert "no longer has the custom all-gather" in lost
