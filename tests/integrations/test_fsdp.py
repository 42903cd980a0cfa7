"""FSDP2 with quantised means over replicas and reduce-scatters, on real processes, against torch's own."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.frameworks.fsdp import GQSGDFSDPState, register_gqsgd_fsdp
from tests.bits import bits_of
from tests.distributed.models import batch, loss_of, mlp, train
from tests.distributed.ranks import logged, on_ranks, run, run_alike
from tests.integrations.fsdp_models import (
    gradients,
    mesh,
    needs_fsdp_hooks,
    once,
    padded,
    quantised,
    relative_errors,
    sharded,
    weight_bits,
)

pytestmark = needs_fsdp_hooks

EXAMPLES = Path(__file__).parents[2] / "examples"


def _trained(rank: int) -> dict[str, Any]:
    """2 replicas of 2 shards, against the same by torch."""
    on = mesh(2)
    plain = sharded(on)
    losses = {"torch": train(plain, rank, range(12))}
    found = {"torch": weight_bits(plain)}
    for name, hooks in {
        "native": {"reducer": "native"},
        "8": {},
        "both": {"reduce_scatter": True},
        "two_shot": {"reducer": "two_shot", "bits": 4},
        "warm": {"warmup_steps": 12},
    }.items():
        model, state = quantised(on, hooks)
        groups = [group.inner for group in state._groups]
        assert [group._all_reduce_hook.state for group in groups] == [state] * 3
        comms = {type(group._reduce_scatter_comm).__name__ for group in groups}
        assert comms == {"_ReduceScatter" if name == "both" else "DefaultReduceScatter"}
        losses[name], found[name] = train(model, rank, range(12)), weight_bits(model)
        totals = state.telemetry.totals()
        assert (state.step, totals["steps"]) == (12, 12)
        if name == "both":
            assert len(state.telemetry.buckets) == 6
            assert 0 < totals["rel_l2"] < 0.02
            assert 8 < totals["bits_per_coordinate"] < 9
        state.close()
    model = sharded(on)  # torch averages over replicas, only the reduce-scatter is ours
    state = register_gqsgd_fsdp(model, reduce_scatter=True)
    losses["scatter"], found["scatter"] = train(model, rank, range(12)), weight_bits(model)
    assert state.telemetry.totals()["bytes_sent"] > 0
    state.close()
    with pytest.raises(RuntimeError, match="the hook was closed"):
        loss_of(model, rank, 0).backward()
    return {"losses": losses, "bits": found}


@pytest.mark.slow
def test_hybrid_sharding_trains_like_torch(tmp_path: Path) -> None:
    ranks = run(_trained, 4, tmp_path)
    first = ranks[0]["bits"]
    assert all(other["bits"] == first for other in ranks)
    assert first["native"] == first["torch"]
    assert first["warm"] == first["torch"]  # sums of two have no order
    assert len(set(first.values())) == 5  # all others have bits of their own
    for one in ranks:
        exact = torch.tensor(one["losses"].pop("torch"))
        for name, losses in one["losses"].items():
            torch.testing.assert_close(torch.tensor(losses), exact, rtol=0, atol=0.03 if name == "two_shot" else 0.01)


Backward = Callable[[nn.Module, int], None]


def against_torch(
    rank: int, hooks: dict[str, Any], backward: Backward = once, make: Callable[[], nn.Module] = padded, **policy: Any
) -> tuple[GQSGDFSDPState, set[str]]:
    """Names of the gradients that are those of torch's hybrid sharding to the bit; all others have to be close."""
    on = mesh(2)
    ours, state = quantised(on, hooks, make(), **policy)
    theirs = sharded(on, make(), **policy)
    for model in (ours, theirs):
        backward(model, rank)
    errors = relative_errors(ours, gradients(theirs))
    assert max(errors.values()) < 0.05, errors
    return state, {name for name, error in errors.items() if error == 0}


EVERY = {f"{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}
NATIVE = {"reducer": "native"}
QUANTISED = {"min_numel": 0}
BOTH = {"min_numel": 0, "reduce_scatter": True}
BF16 = torch.bfloat16


@pytest.mark.slow
@on_ranks(4)
def test_policies(rank: int) -> None:
    for policy in (
        {},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        {"reshard_after_forward": False},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        _, equal = against_torch(rank, NATIVE, **policy)
        # In fp16, torch divides by some powers of two before summing and by others after, which underflow rounds.
        half = "mp_policy" in policy and policy["mp_policy"].reduce_dtype == torch.float16
        assert equal == EVERY or half
        for hooks in (QUANTISED, BOTH):
            assert not against_torch(rank, hooks, **policy)[1]


def in_one_group() -> nn.Sequential:
    """torch 2.15 puts gradients of one dtype together: here, weights before biases."""
    model = padded()
    for layer in (0, 2, 4):
        model[layer].weight.grad_dtype = BF16
    return nn.Sequential(model)


@pytest.mark.slow
@on_ranks(4)
def test_what_is_excluded_travels_as_it_is(rank: int) -> None:
    """Hence segments lie where FSDP puts the parameters."""
    for name in sorted(EVERY):
        for hooks in (QUANTISED, BOTH):
            assert against_torch(rank, {**hooks, "exclude": (name,)})[1] == {name}
    for name in ("0.2.weight", "0.4.bias"):
        for hooks in (QUANTISED, BOTH):
            _, equal = against_torch(rank, {**hooks, "exclude": (name,)}, make=in_one_group)
            assert equal == {name}


@pytest.mark.slow
@on_ranks(4)
def test_each_sharded_parameter_is_reduced_as_if_all_had_its_bits(rank: int) -> None:
    on = mesh(2)

    def reduced(bits: object, hooks: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = padded()
        fully_shard(model, mesh=on["shard"])  # all parameters in one flat tensor
        state = register_gqsgd_fsdp(model, replicate=on["replicate"], bits=bits, min_numel=50, **hooks)
        once(model, rank)
        assert isinstance(bits, int) or "'*': 4 bits" in state.report()
        state.close()
        return gradients(model)

    for hooks in ({}, {"reduce_scatter": True}, {"reduce_scatter": True, "warmup_steps": 1}):
        four, eight = reduced(4, hooks), reduced(8, hooks)
        mixed = reduced({"*": 4, "2.*": 8}, hooks)
        for name, gradient in mixed.items():
            assert torch.equal(gradient, (eight if name.startswith("2.") else four)[name]), (name, hooks)


def accumulate(method: str) -> Backward:
    """Three backward passes, of which the last communicates all."""

    def backward(model: nn.Module, rank: int) -> None:
        for micro in range(3):
            getattr(model, method)(micro == 2)
            loss_of(model, rank, micro).backward()

    return backward


@pytest.mark.slow
@on_ranks(4)
def test_sharding_over_two_dimensions_has_the_bits_of_one(rank: int) -> str:
    """Models that are sharded over both dimensions of a mesh have the bits of those that are sharded over one."""
    on = mesh(2)
    found = []
    for hooks, policy, backward in (
        (QUANTISED, {}, once),
        ({**BOTH, "all_gather_bits": 8}, {}, several),
        (QUANTISED, {"reshard_after_forward": False}, accumulate("set_requires_gradient_sync")),
        (QUANTISED, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, accumulate("set_requires_all_reduce")),
    ):
        bits = []
        for way in ("one dimension", "two dimensions"):
            if way == "one dimension":
                model, state = quantised(on, hooks, padded(), **policy)
            else:
                model = sharded(on, padded(), **policy)
                model.set_reshard_after_forward(policy.get("reshard_after_forward", True))
                state = register_gqsgd_fsdp(model, replicate=on["replicate"], **hooks)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                backward(model, rank)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, rank, 0)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # the evaluation has gathered weights
            bits.append(weight_bits(model))
            state.close()
        assert bits[0] == bits[1], (hooks, policy)
        found.append(bits[0])
    placements = [str(parameter.placements) for parameter in model.parameters()]
    assert set(placements) == {"(Replicate(), Shard(dim=0))"}
    return " ".join(found)


def divided(model: nn.Module, rank: int) -> None:
    """Gradients are the sum over all ranks, divided by 3."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
            module.set_gradient_divide_factor(3.0)
    once(model, rank)


def manual(model: nn.Module, rank: int) -> None:
    """Reductions outside of backward passes, two rounds of them."""
    model.set_manual_backward_finalization(True)
    for step in range(2):
        loss_of(model, rank, step).backward()
        model.finalize_backward()


def several(model: nn.Module, rank: int) -> None:
    """Backward passes of one step, which all communicate."""
    for step in range(3):
        loss_of(model, rank, step).backward()


@pytest.mark.slow
@on_ranks(4)
def test_codecs_and_operators(rank: int) -> None:
    """What replicas can average with, even where reduce-scatters cannot; the operator that Gloo does not have."""
    for hooks in (
        {"reducer": "sum", "scale": "global"},
        {"reducer": "gather", "dither": "stochastic", "coder": "elias"},
        {"reducer": "tree", "codec": "exponential", "bits": 8},
        {"preset": "dq_psgd", "bits": 8, "reduce_scatter": True},
        {"codec": "exponential", "mantissa": 3, "reduce_scatter": True},
    ):
        model, state = quantised(mesh(2), {**QUANTISED, **hooks}, padded())
        once(model, rank)
        assert state.telemetry.totals()["bytes_sent"] > 0
        state.close()
    model, state = quantised(mesh(2), BOTH, padded())
    once(model, rank)
    model.set_gradient_divide_factor(3.0)
    ones = torch.ones(2 * sum(p.share for p in state._groups[0].reduced()))
    for op, value in ((dist.ReduceOp.AVG, 1), (dist.ReduceOp.SUM, 2), (dist.ReduceOp.PREMUL_SUM(1 / 3), 2 / 3)):
        output = torch.empty(len(ones) // 2)
        state.scatter(state._groups[0], output, ones.clone(), op)
        torch.testing.assert_close(output, torch.full_like(output, value), rtol=0.01, atol=0)


@pytest.mark.slow
@on_ranks(4)
def test_accumulation_divisors_and_several_backward_passes(rank: int) -> None:
    for method in ("set_requires_gradient_sync", "set_requires_all_reduce"):
        state, equal = against_torch(rank, NATIVE, accumulate(method))
        assert (state.step, state.telemetry.steps, equal) == (1, 1, EVERY)
        state, equal = against_torch(rank, BOTH, accumulate(method))
        counts = {name.split(" of ")[0]: count for name, count in state.state_dict()["reductions"].items()}
        assert counts == {"all-reduce": 1, "reduce-scatter": 1 if "gradient" in method else 3}
        assert not equal
    assert against_torch(rank, NATIVE, divided)[1] == EVERY
    assert not against_torch(rank, BOTH, divided)[1]
    state, equal = against_torch(rank, QUANTISED, manual)
    assert (state.step, not equal) == (2, True)
    state, equal = against_torch(rank, QUANTISED, several)
    assert (state.step, state.telemetry.steps, not equal) == (3, 3, True)


def _three(rank: int) -> dict[str, str]:
    """Numbers of ranks that are no powers of two; a group of two modules; one shard, or one replica."""
    found = {}
    for replicas in (1, 3):
        on = mesh(replicas)

        def make(on: DeviceMesh = on["shard"]) -> nn.Module:
            model = padded()
            fully_shard([model[0], model[2]], mesh=on)
            return fully_shard(model, mesh=on)

        theirs = make(on)
        once(theirs, rank)
        exact = gradients(theirs)
        for name, hooks, limit in (
            ("native", {"reducer": "native"}, 1e-6),
            ("warm", {"reduce_scatter": True, "warmup_steps": 1}, 1e-6),
            ("ours", {"reduce_scatter": True, "min_numel": 0}, 0.03),
        ):
            model = make()
            state = register_gqsgd_fsdp(model, replicate=on["replicate"], **hooks)
            assert [group.name for group in state._groups] == ["the root", "0"]
            once(model, rank)
            errors = relative_errors(model, exact)
            assert max(errors.values()) < limit, errors
            if name == "warm":  # its second reduction is compressed
                model.zero_grad()
                once(model, rank)
                assert max(relative_errors(model, exact).values()) > limit
            silent = name == "native" and replicas == 1
            assert (max(errors.values()) == 0) == silent
            assert (state.telemetry.totals()["bytes_sent"] == 0) == silent
            assert ("nothing to reduce" in state.report()) == silent
            found[f"{name} {replicas}"] = bits_of(gradients(model).values())
    return found


@pytest.mark.slow
def test_three_ranks_and_grouped_modules(tmp_path: Path) -> None:
    first, *others = run(_three, 3, tmp_path)
    assert others == [first, first]


def _repeated(rank: int) -> tuple[str, str]:
    """The same gradients again and again: every reduction draws new dither, whose mean is zero."""
    on = mesh(2)
    theirs = sharded(on, padded())
    once(theirs, rank)
    exact = weights_of(gradients(theirs))
    for hooks in ({**QUANTISED, "bits": 4}, {**BOTH, "bits": 4, "dither": "subtractive", "seed": 5}):
        ours, state = quantised(on, hooks, padded())
        errors = []
        for _ in range(64):
            ours.zero_grad()
            once(ours, rank)
            errors.append(weights_of(gradients(ours)) - exact)
        of_one = float(torch.stack(errors).square().sum(1).mean().sqrt())
        assert float(torch.stack(errors).mean(0).norm()) < 1.3 * of_one / 8
        assert state.step == 64

    # Where gradients are equal, shards draw apart all the same, and replicas do in reduce-scatters.
    group, equal = state._groups[0], torch.linspace(-1, 1, sum(p.share for p in state._groups[0].reduced()))
    mean, part = equal.clone(), torch.empty_like(equal)
    state.average(group, mean)
    state.scatter(group, part, equal.repeat(2), dist.ReduceOp.AVG)
    return bits_of([mean]), bits_of([part])


def weights_of(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.flatten() for one in named.values()])


@pytest.mark.slow
def test_gradients_are_unbiased(tmp_path: Path) -> None:
    means, parts = zip(*run(_repeated, 4, tmp_path), strict=True)
    assert (means[0], means[1]) == (means[2], means[3])
    assert means[0] != means[1]
    assert len(set(parts)) == 4


def poison(value: float, victim: int) -> Backward:
    """One rank's gradient of the first output of the middle layer is not finite; the first shard has it."""

    def backward(model: nn.Module, rank: int) -> None:
        x, y = batch(rank, 0)
        hidden = model(x)
        if rank == victim:
            hidden.register_hook(lambda gradient: gradient * torch.tensor([value] + [1.0] * 10))
        nn.functional.cross_entropy(hidden, y).backward()

    return backward


def _poisoned(rank: int) -> list[dict[str, list[bool]]]:
    found = []
    for hooks in (QUANTISED, BOTH, {"reducer": "sum", "min_numel": 0}):
        model, _ = quantised(mesh(2), {**hooks, "block_size": 64}, padded())
        poison(torch.nan, victim=3)(model, rank)
        whole = gradients(model)
        found.append({name: whole[name].isfinite().flatten().tolist() for name in ("4.weight", "4.bias")})
    return found


def test_non_finite_values_of_one_rank_reach_all(tmp_path: Path) -> None:
    ranks = run(_poisoned, 4, tmp_path)
    assert all(one == ranks[0] for one in ranks)
    for found in ranks[0]:
        weight, bias = found["4.weight"], found["4.bias"]
        assert not any(weight[:65])  # the poisoned output's row
        assert all(weight[128:])  # all blocks but the first two
        assert not bias[0]
        assert all(bias[6:])  # the other shard's


def _through_a_file(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.slow
@on_ranks(4)
def test_an_interrupted_run_resumes_to_the_same_bits(rank: int) -> None:
    on = mesh(2)
    for hooks in ({"warmup_steps": 2}, {"reduce_scatter": True, "bits": 4, "seed": 3}):
        whole, _ = quantised(on, hooks)
        train(whole, rank, range(8))
        first, saving = quantised(on, hooks)
        train(first, rank, range(5))
        saved = saving.state_dict()
        assert (saved["schema"], saved["seed"], saved["step"]) == (1, hooks.get("seed", 0), 5)
        second, state = quantised(on, {**hooks, "seed": 77})
        second.load_state_dict(first.state_dict())
        state.load_state_dict(torch.load(_through_a_file(saved), weights_only=True))
        train(second, rank, range(5, 8))
        assert weight_bits(second) == weight_bits(whole)
        assert state.state_dict() == {**saved, "step": 8, "reductions": dict.fromkeys(saved["reductions"], 8)}
        with pytest.raises(ConfigError, match="entry 'reductions' is None; load what state_dict has written"):
            state.load_state_dict({"schema": 1, "seed": 0, "step": 3, "config": saved["config"]})


def wide() -> nn.Sequential:
    """A model that takes longer to send than to begin to send; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 2049), nn.ReLU(), nn.Linear(2049, 1024), nn.ReLU(), nn.Linear(1024, 11))


@pytest.mark.slow
@on_ranks(4)
def test_reduce_scatters_have_levels_on_nodes_of_several_ranks(rank: int) -> str:
    """Four shards on two nodes."""
    os.environ["GROUP_RANK"] = str(rank // 2)
    on = init_device_mesh("cpu", (4,))
    plain = sharded(on, wide())
    once(plain, rank)
    exact = gradients(plain)
    found = {}
    for name, hooks in {
        "auto": {},
        "hierarchical": {"reducer": "hierarchical"},
        "two_shot": {"reducer": "two_shot"},
        "weights": {"reducer": "hierarchical", "node_size": 2, "all_gather_bits": 8},
        "warm": {"warmup_steps": 5},
        "by name": {"bits": {"*": 8, "2.*": 4}},
    }.items():
        model = sharded(on, wide())
        state = register_gqsgd_fsdp(model, **{"bits": 8, **BOTH, **hooks, "sample_every": 1})
        once(model, rank)
        errors = relative_errors(model, exact)
        assert max(errors.values()) < (1e-6 if name == "warm" else 0.1), (name, errors)
        found[name] = bits_of(gradients(model).values())
        has_levels = state._scatter.configs[0].reducer == "hierarchical"
        assert has_levels == (name != "two_shot"), state.report()
        assert ("2 ranks share the link of a node" in state.report()) == ("reducer" not in hooks)
        assert 0 <= state.telemetry.totals()["rel_l2"] < 0.1
        state.close()
    assert found["auto"] == found["hierarchical"] != found["two_shot"]

    bits = []
    saved: io.BytesIO | None = None
    for steps in (range(3), range(2, 3)):
        model = sharded(on, wide())
        state = register_gqsgd_fsdp(model, bits=2, **BOTH)
        if saved is not None:
            state.load_state_dict(torch.load(saved, weights_only=True))
        for step in steps:
            saved = _through_a_file(state.state_dict())
            model.zero_grad()
            loss_of(model, rank, step).backward()
        bits.append(bits_of(gradients(model).values()))
        state.close()
    assert bits[0] == bits[1]

    with pytest.raises(ConfigError, match="4 ranks do not make nodes of 3"):
        register_gqsgd_fsdp(sharded(on), reduce_scatter=True, reducer="hierarchical", node_size=3)
    os.environ["GROUP_RANK"] = "0"
    with pytest.raises(ConfigError, match="the model is divided among the 4 ranks of one node"):
        register_gqsgd_fsdp(sharded(on), reduce_scatter=True, reducer="hierarchical")
    return found["auto"] + bits[0]


@pytest.mark.slow
@on_ranks(8)
def test_each_group_has_the_levels_that_fit_its_nodes(rank: int) -> str:
    """The ranks of one replica, or of one place in all replicas, are on nodes of equal size, and others are not."""
    found = []
    for nodes, replicas in (("00011122", 2), ("00011111", 4)):
        os.environ["GROUP_RANK"] = nodes[rank]
        on = mesh(replicas)
        plain = sharded(on, wide())
        once(plain, rank)
        exact = gradients(plain)
        model, state = quantised(on, BOTH, wide())
        once(model, rank)
        assert max(relative_errors(model, exact).values()) < 0.05
        found.append(bits_of(gradients(model).values()))
        places = (on["replicate"].get_local_rank(), on["shard"].get_local_rank())
        of_scatter, of_mean = (one.configs[0].reducer for one in (state._scatter, state._average))
        assert (of_scatter == "hierarchical") == (replicas == 2 and places[0] == 1)
        assert (of_mean == "hierarchical") == (replicas == 4 and places[1] == 0)
        state.close()
    return "".join(found)


class Partly(nn.Module):
    """Uses one of the root's two layers, which have equal sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = mlp()
        torch.manual_seed(1)
        self.last = nn.ModuleDict({"used": nn.Linear(10, 10), "other": nn.Linear(10, 10)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last["used"](self.first(x))


@pytest.mark.slow
@on_ranks(4)
def test_parameters_without_a_gradient(rank: int) -> None:
    on = mesh(2)
    records = logged()
    model, _ = quantised(on, QUANTISED, Partly())
    theirs = sharded(on, Partly())
    for one in (model, theirs):
        once(one, rank)
    exact = torch.equal(model.last.used.weight.grad.full_tensor(), theirs.last.used.weight.grad.full_tensor())
    assert model.last.other.weight.grad is None
    assert not torch.equal(model.first[2].weight.grad.full_tensor(), theirs.first[2].weight.grad.full_tensor())
    once(model, rank)  # which is not warned of again
    model, _ = quantised(on, QUANTISED, Partly())
    model.set_reduce_scatter_unused_params(True)
    once(model, rank)
    assert not model.last.other.weight.grad.full_tensor().any()  # zeros stay zeros
    alone = sharded(on["shard"], nn.Sequential(mlp(), nn.Linear(10, 10)))
    register_gqsgd_fsdp(alone[0], replicate=on["replicate"])
    outside = nn.Sequential(sharded(on["shard"]), nn.Linear(10, 10))
    register_gqsgd_fsdp(outside, replicate=on["replicate"])
    log = "\n".join(records)
    assert exact
    assert log.count("some parameters of the root got no gradient") == 1
    assert "does not reduce the gradients of 2 parameters, so they are not averaged here either: 1.weight" in log


class Chunked(nn.Module):
    """A norm and a head that are sharded together; the loss is computed in chunks, as torchtitan does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(32, 64)
        self.norm = nn.RMSNorm(64)
        self.head = nn.Linear(64, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def _chunked(rank: int) -> str:
    on = mesh(1)["shard"]
    records = logged()

    def after_a_step(hooks: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], Any]:
        model = Chunked()
        fully_shard(model.body, mesh=on)
        fully_shard([model.norm, model.head], mesh=on)
        fully_shard(model, mesh=on)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no other sum with a divisor
        state = None if hooks is None else register_gqsgd_fsdp(model, reduce_scatter=True, sample_every=0, **hooks)
        hidden = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(rank)))
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(4)]
        for chunk in chunks:
            model.head(chunk).square().sum().backward()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
        return gradients(model), state

    exact, _ = after_a_step(None)
    found, state = after_a_step({"bits": 8, "min_numel": 0})
    assert all(float((found[name] - exact[name]).norm()) < 0.02 * float(exact[name].norm()) for name in exact)
    assert not torch.equal(found["head.weight"], exact["head.weight"])
    assert state.summary()["bits_per_coordinate"] < 9
    assert not any("got no gradient" in record for record in records)
    return bits_of(found.values())


@pytest.mark.slow
def test_a_part_of_a_group_of_modules_is_compressed(tmp_path: Path) -> None:
    first, second = run(_chunked, 2, tmp_path)
    assert first == second


def _with_tensor_parallelism(rank: int) -> str:
    """Layers that two ranks compute together are sharded over, or replicated on, two such pairs. The last layer is on
    both ranks of a pair, which have to keep it equal."""
    bits = []
    for replicas, shards, hooks, most in (
        (1, 2, {"reduce_scatter": True}, 0.02),
        (1, 2, {"reduce_scatter": True, "all_gather_bits": 8}, 0.1),
        (2, 1, {}, 0.02),
    ):
        on = init_device_mesh("cpu", (replicas, shards, 2), mesh_dim_names=("replicate", "shard", "tensor"))
        data = on["replicate", "shard"] if replicas > 1 else on["shard"]

        def parallel(data: DeviceMesh = data, on: DeviceMesh = on) -> nn.Module:
            model = mlp()
            parallelize_module(model, on["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return sharded(data, model)

        plain = parallel()
        model = parallel()
        if replicas > 1:
            hooks = {"replicate": on["replicate"]}
        state = register_gqsgd_fsdp(model, **hooks)
        for one in (plain, model):
            loss_of(one, rank // 2, 0).backward()
        errors = relative_errors(model, gradients(plain))
        assert all(0 < error < most for name, error in errors.items() if name.endswith("weight")), errors
        train(model, rank // 2, range(1, 4))
        assert state.summary()["bits_per_coordinate"] < 12
        bits.append(weight_bits(model))
        state.close()
    return " ".join(bits)


@pytest.mark.slow
def test_tensor_parallelism_within_what_is_sharded(tmp_path: Path) -> None:
    first, *others = run(_with_tensor_parallelism, 4, tmp_path)
    assert others == [first] * 3


def _by_modules(model: nn.Sequential, data: DeviceMesh, experts: DeviceMesh) -> nn.Module:
    fully_shard(model[2], mesh=experts)
    return fully_shard(model, mesh=data)


def _by_parameters(model: nn.Sequential, data: DeviceMesh, experts: DeviceMesh) -> nn.Module:
    """As torchtitan shards a mixture of experts: FSDP reduces the parameters of one module in two groups."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    of_experts = set(model[2].parameters())
    info = FSDPMeshInfo(experts, shard_mesh_dim=0)

    def placement(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(placement=None, mesh_info=info) if parameter in of_experts else None

    return fully_shard(model, mesh=data, shard_placement_fn=placement)


def _mixture(rank: int) -> list[str]:
    """The layer in the middle is sharded over two of four ranks. So ranks 0 and 2 have another one than 1 and 3."""
    data = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "of_one_rank"))["experts"]
    ways = [_by_modules]
    if hasattr(torch.distributed.fsdp._fully_shard._fsdp_common, "ShardPlacementResult"):
        ways.append(_by_parameters)
    found = []
    for shard in ways:
        plain = shard(mlp(), data, experts)
        model = shard(mlp(), data, experts)
        hooks = {"reduce_scatter": True, "all_gather_bits": 8}
        states = [register_gqsgd_fsdp(model, mesh=mesh, **hooks) for mesh in (data, experts)]
        for one in (plain, model):
            loss_of(one, rank, 0).backward()
        errors = relative_errors(model, gradients(plain))
        assert all(0 < error < 0.1 for name, error in errors.items() if name.endswith("weight")), errors
        train(model, rank, range(1, 4))
        assert [len(state._places) for state in states] == [4, 2]
        assert all(state.step == 4 for state in states)
        assert all(state.summary()["bits_per_coordinate"] < 12 for state in states)
        found.append(weight_bits(model))
        for state in states:
            state.close()
    return found


@pytest.mark.slow
def test_parameters_on_two_meshes(tmp_path: Path) -> None:
    bits = run(_mixture, 4, tmp_path)
    assert bits[0] == bits[2] != bits[1] == bits[3]


@pytest.mark.slow
@on_ranks(2, initialise=False)
def test_lightnings_model_parallel_strategy(rank: int, tmp_path: Path) -> None:
    """The example's model, in one go and with an interruption."""
    sys.path.insert(0, str(EXAMPLES))
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning_model_parallel import Digits

    class Seeded(Digits):
        def configure_model(self) -> None:
            torch.manual_seed(0)
            super().configure_model()

        def training_step(self, _: Any) -> torch.Tensor:
            generator = torch.Generator().manual_seed(2 * self.global_step + self.global_rank)
            x = torch.randn(16, 64, generator=generator)
            return super().training_step([x, (x.sum(1) > 0).long()])

    def fit(steps: int, ckpt_path: Path | None = None) -> Any:
        model, options = Seeded(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, **options)
        trainer.fit(model, torch.utils.data.DataLoader(torch.zeros(32)), ckpt_path=ckpt_path)
        return trainer, model

    whole = fit(12)[1]
    trainer, _ = fit(8)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    _, resumed = fit(12, tmp_path / "last.ckpt")
    (group,) = whole.net._get_fsdp_state()._fsdp_param_groups
    one = {
        "comm": type(group._reduce_scatter_comm).__name__,
        "steps": (whole.gqsgd.step, resumed.gqsgd.step, whole.gqsgd.telemetry.steps, resumed.gqsgd.telemetry.steps),
        "equal": weight_bits(whole) == weight_bits(resumed),
        "rel_l2": whole.gqsgd.telemetry.last_rel_l2,
    }
    assert (one["comm"], one["steps"], one["equal"]) == ("_ReduceScatter", (12, 12, 12, 4), True)
    assert 0 < one["rel_l2"] < 0.2


def _fabric(rank: int, folder: Path) -> list[str]:
    """A loop of Fabric, and the same from its checkpoint on."""
    import lightning.fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def shard(model: nn.Module, on: DeviceMesh) -> nn.Module:
        return sharded(on["data_parallel"], model)

    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(padded())
    state = register_gqsgd_fsdp(model, **{**BOTH, "all_gather_bits": 8, "bits": 4})
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))

    def train_from(first: int) -> str:
        for step in range(first, 6):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                fabric.backward(loss_of(model, rank, step))
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            if step == 3 > first:
                fabric.save(folder / "saved", {"model": model, "optimizer": optimizer, "gqsgd": state.state_dict()})
        return weight_bits(model)

    whole = train_from(0)
    saved = fabric.load(folder / "saved", {"model": model, "optimizer": optimizer})
    state.load_state_dict(saved["gqsgd"])
    resumed = train_from(4)
    assert state.step == 3
    return [whole, resumed]


@pytest.mark.slow
def test_a_loop_of_fabric_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, resumed = run_alike(_fabric, 2, tmp_path, tmp_path, initialise=False)
    assert whole == resumed
