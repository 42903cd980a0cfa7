"""The smallest experiments of DeMo, lossless averages, PULSE, Dion, QSDP and MuLoCo."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from lightning_gqsgd.config.resolving import setting_of
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.lossless import pack, unpack
from lightning_gqsgd.research.experiments.rows import Row, normal, virtual
from lightning_gqsgd.research.optim.dion import Dion
from lightning_gqsgd.research.optim.muon import MuonAdamW
from lightning_gqsgd.research.patches import Receiver, Sender, digest
from lightning_gqsgd.research.simulation import relative_error, simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP
from lightning_gqsgd.research.simulation.record import Record
from lightning_gqsgd.research.simulation.shapes import Shaped
from lightning_gqsgd.research.systems import SYSTEMS
from lightning_gqsgd.wire.plan import GatherPlan


def demo() -> Iterator[Row]:
    """DeMo's code: few coordinates of the cosine transform, and their error on a smooth vector."""
    numel = 8192
    fields = {**SYSTEMS["demo"].fields, "memory": "none"}
    smooth = torch.cos(torch.arange(numel) * 0.02) + 0.5 * torch.sin(torch.arange(numel) * 0.05)
    coded = virtual(1, numel, **fields)
    plain = virtual(1, numel, **{**fields, "codec": "top_k", "block_size": 4096})
    errors = [relative_error(ranks.mean([smooth], 0), [smooth]) for ranks in (coded, plain)]
    yield Row("1/128 of the coordinates at 48 bits: 0.375 bits", f"{coded.wire_bits:.3f}", coded.wire_bits < 0.4)
    yield Row(
        "of smooth numbers, the transform's largest leave less out than the largest themselves",
        f"{errors[0]:.3f}, {errors[1]:.3f}",
        errors[0] < 0.7 * errors[1],
    )


def lossless() -> Iterator[Row]:
    """Entropy-coded exponents: the same bits, in fewer."""
    for dtype, most in ((torch.bfloat16, 11.5), (torch.float32, 27.5)):
        x = normal(0, 1 << 16).to(dtype)
        message = pack(x)
        bits = 8 * len(message) / len(x)
        name = str(dtype).removeprefix("torch.")
        yield Row(f"{name}: at most {most} bits for a normal number", f"{bits:.2f}", bits <= most)
        same = bool((unpack(message, len(x), dtype).view(torch.uint8) == x.view(torch.uint8)).all())
        yield Row(f"{name}: the same bits", "the same" if same else "others", same)


def pulse() -> Iterator[Row]:
    """PULSE's patches after a step of Adam with a small learning rate."""
    weights = 0.02 * normal(0, 1 << 16)
    followed = weights.to(torch.bfloat16)
    sender = Sender([weights])
    receiver = Receiver([followed])
    everything = sender.message()
    receiver.apply(everything)
    before = followed.clone()
    weights -= 1e-6 * normal(1, len(weights)).sign()
    patch = sender.message()
    receiver.apply(patch)
    share = float((followed != before).double().mean())
    yield Row("a step of 1e-6 changes the bits of at most 5 % of bf16 weights", f"{share:.2%}", share < 0.05)
    times = len(everything) / len(patch)
    yield Row("a patch is at least 10 times shorter than all weights", f"{times:.0f} times", times > 10)
    same = digest(followed) == digest(weights.to(torch.bfloat16))
    yield Row("SHA-256 is equal at both ends", "equal" if same else "different", same)


def dion() -> Iterator[Row]:
    """Dion's step: orthonormal, and of few numbers."""
    rows, columns, rank = 48, 32, 8
    matrix = normal(0, rows * columns).view(rows, columns)
    optimizer = Dion([matrix], lr=1.0, rank_fraction=rank / columns, weight_decay=0.0)
    before = matrix.clone()
    matrix.grad = normal(1, rows * columns).view(rows, columns)
    optimizer.step()
    step = (before - matrix) / math.sqrt(rows / columns)
    sent = optimizer.averaged_numel
    yield Row(f"averages (m + n) r = {(rows + columns) * rank} numbers", f"{sent}", sent == (rows + columns) * rank)
    norms = torch.linalg.svdvals(step)
    found = int((norms > 0.1).sum())
    yield Row(f"a step has rank {rank}", f"{found}", found == rank)
    size = float(step.norm())
    most = math.sqrt(rank)
    yield Row(f"its norm is √r = {most:.3f}, as that of P Qᵀ", f"{size:.3f}", abs(size - most) < 1e-3)


def qsdp() -> Iterator[Row]:
    """QSDP's all-gather of weights: the same rounded weights on all ranks, without bias."""
    ranks, share, repeats = 4, 4096, 64
    weights = 0.02 * normal(0, ranks * share)
    config = make_config(None, **SYSTEMS["qsdp"].fields, reducer="two_shot")
    setting = setting_of(config, ranks, torch.float32)
    plan = GatherPlan([Segment(rank, share, raw=False) for rank in range(ranks)], setting)
    stores = [new_store(setting, {}, weights.device) for _ in range(ranks)]

    def gathered(step: int) -> list[torch.Tensor]:
        everyone = [weights.clone() for _ in range(ranks)]
        plan.average(everyone, step, stores)
        return everyone

    first, *others = gathered(0)
    same = all(torch.equal(first, other) for other in others)
    yield Row("all ranks have the same weights", "the same" if same else "others", same)
    bits = 8 * plan.message_bytes / weights.numel()
    yield Row("a weight takes at most 8.2 bits", f"{bits:.3f}", bits < 8.2)
    of_one = relative_error(first, [weights])
    yield Row("8 bits leave an error of at most 1 %", f"{of_one:.2%}", of_one < 0.01)
    mean = torch.stack([gathered(step)[0] for step in range(repeats)]).mean(0)
    times = of_one / relative_error(mean, [weights])
    yield Row(f"the mean of {repeats} roundings is about 8 times closer", f"{times:.1f} times", 6 < times < 10)


def muloco() -> Iterator[Row]:
    """MuLoCo on the digits: 2 bits with errors fed back, beside 32."""
    problem = DigitsMLP(hidden=64)
    problem.segments = [segment._replace(raw=False) for segment in problem.segments]
    shapes = [(64, 64), (64,), (64, 10), (10,)]

    def run(**fields: Any) -> Record:
        return simulate(
            "gqsgd_muloco",
            problem,
            workers=4,
            steps=90,
            optimizer=lambda flat: Shaped(flat, shapes, lambda parts: MuonAdamW(parts[:1], parts[1:], 0.01, 0.0)),
            record_every=90,
            progress=False,
            outer_after=0,
            **fields,
        )

    few = run()
    whole = run(bits=32, codec="auto", memory="none", memory_down="none")
    yield Row("ends where 32 bits do", f"{few.last():.3g}, {whole.last():.3g}", few.last() < 1.1 * whole.last())
    times = float(whole.bytes_sent[-1] / few.bytes_sent[-1])
    yield Row("sends less than a tenth of it", f"1/{times:.1f}", times > 10)
