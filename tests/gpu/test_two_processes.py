"""Two processes that share one card, over Gloo: the hook and `all_reduce` on CUDA tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_gqsgd import all_reduce
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.research.simulation import average
from tests.distributed.models import batch, mlp, wrapped
from tests.distributed.ranks import SPAWN, run
from tests.gpu.card import DEVICE, STANDS_IN, difference, marks

pytestmark = marks

ON_GPUS = [name for name, preset in FIXED.items() if preset.config.coder == "fixed"]
STATELESS = [name for name in ON_GPUS if not FIXED[name].config.remembers]
SHAPES = [(300, 40), (17,), (5000,), (64, 65)]


def _run(function: Any, *args: Any, tmp_path: Path, device: str = str(DEVICE), **options: Any) -> list[Any]:
    """On two ranks that each come to a card for the first time: a process forked from one that has cannot use it."""
    options = {"timeout": 270, "context": None if STANDS_IN else SPAWN, **options}
    return run(function, 2, tmp_path, device, *args, **options)


def _sent(x: Tensor) -> np.ndarray:
    """Numbers as they can be handed to the test's process: a tensor's memory would end with the rank's."""
    return x.detach().cpu().float().numpy()


def _wrong(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, str]:
    assert found.keys() == expected.keys()
    pairs = {name: (torch.from_numpy(found[name]), torch.from_numpy(expected[name])) for name in expected}
    return {name: text for name, pair in pairs.items() if (text := difference(*pair))}


# --- all_reduce -------------------------------------------------------------------------------------------------------


def _gradient(rank: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(9000, generator=torch.Generator().manual_seed(rank)) * torch.logspace(-3, 0, 9000)
    return x.to(dtype)


def _reduced(rank: int, device: str) -> dict[str, np.ndarray]:
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = _gradient(rank, dtype).to(device)
        for name in STATELESS:
            found[f"{name}, {dtype}"] = _sent(all_reduce(x, preset=name, step=3))
        assert torch.equal(x.cpu(), _gradient(rank, dtype)), "all_reduce changed its input"
        found[f"async, {dtype}"] = _sent(all_reduce(x, step=3, async_op=True).wait())
    return found


def test_all_reduce_gives_the_bits_of_the_cpu(tmp_path: Path) -> None:
    expected = {}
    for dtype in (torch.float32, torch.bfloat16):
        gradients = [_gradient(rank, dtype) for rank in range(2)]
        expected |= {f"{name}, {dtype}": _sent(average(gradients, preset=name, step=3)[0]) for name in STATELESS}
        expected[f"async, {dtype}"] = _sent(average(gradients, step=3)[0])
    for rank, found in enumerate(_run(_reduced, tmp_path=tmp_path)):
        assert _wrong(found, expected) == {}, f"rank {rank}"


# --- the hook ---------------------------------------------------------------------------------------------------------


class _Given(nn.Module):
    """Its gradient is what its input says, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.tensors, gradients, strict=True)]).sum()


def _given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def _hooked(rank: int, device: str, names: list[str]) -> dict[str, np.ndarray]:
    """All gradients after each step, by preset; buckets are rebuilt after the first."""
    found = {}
    for name in names:
        model, state = wrapped({"bucket_cap_mb": 0.03}, {"preset": name}, _Given().to(device))
        for step in range(3):
            model.zero_grad()
            model([one.to(device) for one in _given(rank, step)]).backward()
            found[f"{name}, step {step}"] = _sent(torch.cat([p.grad.flatten() for p in model.parameters()]))
        state.close()
    return found


@pytest.mark.filterwarnings("ignore::lightning_gqsgd.reducers.memory.StabilityWarning")
@pytest.mark.slow
def test_the_hook_gives_the_bits_of_the_cpu_on_both_ranks(tmp_path: Path) -> None:
    """What is remembered is nearly the same only: a GPU contracts the products and sums of `torch.add`."""
    expected = run(_hooked, 2, tmp_path, "cpu", ON_GPUS)[0]
    first, second = _run(_hooked, ON_GPUS, tmp_path=tmp_path)
    assert _wrong(second, first) == {}, "ranks differ"
    exact = [f"{name}, step {step}" for name in ON_GPUS for step in range(3) if name in STATELESS or not step]
    assert _wrong({key: first[key] for key in exact}, {key: expected[key] for key in exact}) == {}
    for key in expected.keys() - set(exact):
        distance = np.linalg.norm(first[key] - expected[key]) / np.linalg.norm(expected[key])
        assert distance < 1e-2, f"{key}: {distance} of the norm apart"


def _trained(rank: int, device: str, precision: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        model, state = wrapped({"gradient_as_bucket_view": True}, {"preset": name}, mlp().to(device))
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(20):
            x, y = (one.to(device) for one in batch(rank, step))
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        totals = state.telemetry.totals()
        state.close()
        parameters = _sent(torch.cat([p.flatten() for p in model.parameters()]))
        found[name] = {"parameters": parameters, "losses": losses, "totals": totals}
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_keeps_both_ranks_alike_and_lowers_the_loss(precision: str, tmp_path: Path) -> None:
    names = ["gqsgd", "gqsgd_4bit", "gqsgd_sum", "gqsgd_exponential", "signsgd_ef", "dq_psgd"]
    first, second = _run(_trained, precision, names, tmp_path=tmp_path)
    for name in names:
        assert _wrong({name: second[name]["parameters"]}, {name: first[name]["parameters"]}) == {}, "ranks differ"
        losses, totals = first[name]["losses"], first[name]["totals"]
        assert sum(losses[-5:]) < sum(losses[:5]), f"{name}: losses {losses}"
        assert totals["steps"] == 20, name
        assert totals["nonfinite_blocks"] == 0, name
        assert totals["rel_l2"] > 0, name


def _with_nan(rank: int, device: str, names: list[str]) -> dict[str, np.ndarray]:
    found = {}
    for name in names:
        model, state = wrapped({}, {"preset": name}, _Given().to(device))
        gradients = [one.to(device) for one in _given(rank, 0)]
        if rank == 1:
            gradients[2][700] = torch.nan
        model(gradients).backward()
        found[name] = _sent(torch.cat([p.grad.isnan().flatten() for p in model.parameters()]))
        assert state.telemetry.totals()["nonfinite_blocks"] >= 1, name
        state.close()
    return found


def test_nan_on_one_rank_is_nan_in_that_block_on_both(tmp_path: Path) -> None:
    names = ["gqsgd", "gqsgd_4bit", "gqsgd_sum", "gqsgd_exponential", "signsgd_ef"]
    expected = {}
    for name in names:
        block = resolve(FIXED[name].config, 2).block_size
        start = 300 * 40 + 17 + 700 // block * block  # of the block of the third tensor that has the coordinate
        expected[name] = np.zeros(300 * 40 + 17 + 5000 + 64 * 65, dtype=np.float32)
        expected[name][start : start + block] = 1  # where it is NaN
    for rank, found in enumerate(_run(_with_nan, names, tmp_path=tmp_path)):
        assert _wrong(found, expected) == {}, f"rank {rank}"


def _killed(rank: int, device: str) -> str:
    model, _ = wrapped({"bucket_cap_mb": 0.03}, {}, mlp(width=600).to(device))
    try:
        for step in range(5):
            if rank == 1 and step == 3:  # within a backward pass, once the first bucket has been submitted
                next(iter(model.parameters())).register_post_accumulate_grad_hook(lambda _: os._exit(7))
            x, y = (one.to(device) for one in batch(rank, step))
            nn.functional.cross_entropy(model(x), y).backward()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_killed_rank_is_an_error_within_the_timeout(tmp_path: Path) -> None:
    text, _ = _run(_killed, tmp_path=tmp_path, dies=(1,), collective_timeout=20, timeout=120)
    assert "failed on rank 0 of 2" in text, text
    assert "Look for the first error among all ranks' logs" in text, text


def _in_a_subgroup(rank: int, device: str) -> dict[str, np.ndarray]:
    group = dist.new_group([0, 1], backend="gloo")
    return {"mean": _sent(all_reduce(_gradient(rank, torch.float32).to(device), group=group, step=1))}


def test_a_subgroup_over_gloo(tmp_path: Path) -> None:
    expected = {"mean": _sent(average([_gradient(rank, torch.float32) for rank in range(2)], step=1)[0])}
    for rank, found in enumerate(_run(_in_a_subgroup, tmp_path=tmp_path)):
        assert _wrong(found, expected) == {}, f"rank {rank}"
