"""Systems that are one another under other names: the same numbers from the product's own objects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import Memory
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import VirtualRanks

STEPS = 20
NUMEL = 1000


def sequence(ranks: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Gradients of all ranks, step by step: a common part that drifts, and each rank's own."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(NUMEL, generator=generator, dtype=dtype)

    shared, own = normal(), [normal() for _ in range(ranks)]
    return [[shared + 0.3 * step * one + 0.1 * normal() for one in own] for step in range(STEPS)]


def virtual(
    ranks: int, preset: str | None = None, dtype: torch.dtype = torch.float32, **fields: object
) -> VirtualRanks:
    return VirtualRanks(ranks, [Segment(0, NUMEL, raw=False)], dtype, preset, **fields)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_terngrad_with_a_shared_scale_is_global_qsgd_with_one_level(ranks: int) -> None:
    """ALGORITHMS: TernGrad == linear dithering, l_inf, s = 1, codes summed. The same keys give the same codes: their
    sum is an integer in both, but TernGrad's scale travels with 8 bits of mantissa, rounded up, where the sum's does
    not; maxima that 8 bits hold make them one."""
    ternary = {"dither": "stochastic", "levels": 1, "block_size": 64}
    gathered = virtual(ranks, "terngrad", clip=0.0, scale_per="block", **{**ternary, "bits": 2})
    summed = virtual(ranks, reducer="sum", bits=6, **ternary)
    for step, gradients in enumerate(sequence(ranks)):
        for one in gradients:
            one.clamp_(-4, 4)
            one[::64] = 4.0
        found, expected = gathered.mean(gradients, step), summed.mean(gradients, step)
        codes = found * ranks / 4
        assert torch.equal(codes.round().abs() <= ranks, torch.ones(NUMEL, dtype=torch.bool))
        torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("reducer", ["gather", "two_shot", "sum"])
@pytest.mark.filterwarnings("ignore::lightning_gqsgd.reducers.memory.StabilityWarning")
def test_error_feedback_is_ecq_with_both_weights_one(reducer: str) -> None:
    """And no memory is ECQ with α = 0, bit for bit."""
    fields = {"bits": 6, "dither": "stochastic", "reducer": reducer, "block_size": 64}
    pairs = [
        (virtual(3, memory="ef", **fields), virtual(3, memory=Memory(1.0, 1.0, 0.0), **fields)),
        (virtual(3, memory="none", **fields), virtual(3, memory=Memory(0.0, 0.7, 0.0), **fields)),
    ]
    for step, gradients in enumerate(sequence(3)):
        for one, other in pairs:
            assert torch.equal(one.mean(gradients, step), other.mean(gradients, step))


@pytest.mark.parametrize("beta", [0.5, 0.9, 1.0])
def test_equal_weights_are_a_residual_memory(beta: float) -> None:
    """ECQ(β, β) against grace's ResidualMemory(beta), written out: u = β r + γ g, γ = 1; r <- u - Q(u).

    With r the residual, ECQ's error e obeys e' = β e + g - Q(u) = u - Q(u) = r'.
    """
    ranks, dtype = 3, torch.float64
    product = virtual(
        ranks, dtype=dtype, codec="sign", bits=1, block_size=1024, reducer="gather", memory=Memory(beta, beta, 0.0)
    )
    residual = torch.zeros(ranks, NUMEL, dtype=dtype)
    for step, gradients in enumerate(sequence(ranks, dtype)):
        u = beta * residual + torch.stack(gradients)
        sent = u.sign() * u.abs().mean(1, keepdim=True)
        residual = u - sent
        # A scale travels with 20 bits of mantissa; e remembers what that leaves out.
        torch.testing.assert_close(product.mean(gradients, step), sent.mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("codec", ["sign", "top_k"])
def test_diana_with_rate_one_is_ef21_is_markov_compression(codec: str) -> None:
    """Both ways, as CD-Adam has it (jinghuichen/CD-Adam), written out: h_i += C(g_i - h_i); t += C(mean h_i - t)."""
    ranks, dtype, kept = 5, torch.float64, 50

    def compressed(v: Tensor) -> Tensor:
        if codec == "sign":
            mantissa, exponent = torch.frexp(v.abs().mean(-1, keepdim=True))
            # As it travels; a coordinate that is zero but for that takes any sign.
            return torch.ldexp((mantissa * 2.0**21).ceil() / 2.0**21, exponent) * v.sign()
        largest = v.abs().topk(kept, -1).indices
        return torch.zeros_like(v).scatter(-1, largest, v.gather(-1, largest))

    # Half a coordinate less, because densities are rounded up, and then the number of coordinates.
    fields = {"codec": codec, "block_size": 1000, **({"density": (kept - 0.5) / NUMEL} if codec == "top_k" else {})}
    named = virtual(ranks, "cd_adam", dtype, **fields)
    rate_one = Memory(0.0, 0.3, 1.0)
    diana = virtual(
        ranks, "diana", dtype, dither="adaptive", norm="max", levels=None, bits=None, memory=rate_one, **fields
    )
    ef21 = virtual(ranks, "comp_ams", dtype, memory="ef21", **fields)
    references, estimate = torch.zeros(ranks, NUMEL, dtype=dtype), torch.zeros(NUMEL, dtype=dtype)
    for step, gradients in enumerate(sequence(ranks, dtype)):
        references += compressed(torch.stack(gradients) - references)
        estimate += compressed(references.mean(0) - estimate)
        one_way = diana.mean(gradients, step)
        assert torch.equal(one_way, ef21.mean(gradients, step))
        torch.testing.assert_close(one_way, references.mean(0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(named.mean(gradients, step), estimate, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reducer", ["sum", "gather"])
@pytest.mark.parametrize("rho", [None, 0.1])
def test_sums_under_memory_need_no_server(reducer: str, rho: float | None) -> None:
    """Sum of Q(u_i) + h_i = all-reduce(Q(u_i)) + n h̄: the result is the mean of every rank's own reconstruction, which
    its store gives as h_i + (h_i' - h_i)/ρ, and h̄ is the mean of all h_i, the same on all ranks."""
    ranks, dtype = 4, torch.float64
    memory = Memory(0.0, 0.0, rho)
    ranks_of = virtual(ranks, dtype=dtype, bits=8, dither="stochastic", reducer=reducer, block_size=64, memory=memory)
    rate = ranks_of.config.up.rho
    for step, gradients in enumerate(sequence(ranks, dtype)):
        before = [store.row("up_reference", 0).clone() for store in ranks_of.stores]
        results = ranks_of.average(gradients, step)
        after = [store.row("up_reference", 0) for store in ranks_of.stores]
        rebuilt = torch.stack([old + (new - old) / rate for old, new in zip(before, after, strict=True)])
        for result, store in zip(results, ranks_of.stores, strict=True):
            assert torch.equal(result, results[0])
            torch.testing.assert_close(result, rebuilt.mean(0), rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(store.row("up_mean", 0), torch.stack(after).mean(0), rtol=1e-9, atol=1e-9)
