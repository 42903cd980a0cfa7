"""Bits by name on real processes: each parameter is reduced as if all had its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd import all_reduce
from lightning_gqsgd.config import ConfigError
from lightning_gqsgd.ddp.hook import register_gqsgd
from tests.distributed.models import finish, loss_of, mlp, resume, save, train, wrapped
from tests.distributed.ranks import on_ranks

PATTERNS = {"*": 4, "0.*": 8, "*.bias": 2, "4.*": 3}


def _gradients(rank: int, bits: object, ddp: dict[str, Any] | None = None, **fields: Any) -> dict[str, Tensor]:
    model, state = wrapped(ddp or {}, {"bits": bits, "min_numel": 50, **fields}, mlp(depth=4))
    for step in range(2):  # DDP makes its buckets anew after the first
        model.zero_grad()
        loss_of(model, rank, step).backward()
    state.close()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


def _equal(rank: int) -> None:
    alone = {bits: _gradients(rank, bits, sample_every=0) for bits in (2, 3, 4, 8)}
    expected = {"0.weight": 8, "2.weight": 4, "4.weight": 3, "6.weight": 4}
    expected |= {"0.bias": 2, "2.bias": 2, "4.bias": 3, "6.bias": 2}
    for ddp in ({}, {"bucket_cap_mb": 0.03}):
        mixed = _gradients(rank, PATTERNS, ddp)
        for name, bits in expected.items():
            assert torch.equal(mixed[name], alone[bits][name]), (name, bits)


def _trained(rank: int, path: Path) -> None:
    options, hook = {"bucket_cap_mb": 0.03}, {"bits": PATTERNS, "warmup_steps": 3, "seed": 5}
    whole, state = wrapped(options, hook, mlp(depth=4))
    assert "gradient values in 1 tensor at 3 bits (companded, adaptive dither, blocks of 128)" in state.report()
    losses = train(whole, rank, range(14))
    assert losses[-1] < losses[0]
    expected = finish(state, whole)["bits"]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, expected)
    assert len(set(everywhere)) == 1

    first, state = wrapped(options, hook, mlp(depth=4))
    train(first, rank, range(6))
    save(first, state, rank, path)
    state.close()
    second, state = resume(path, options, hook, mlp(depth=4))
    train(second, rank, range(6, 10))
    again = state.rewrap(lambda module: DistributedDataParallel(module, **options))
    train(again, rank, range(10, 14))
    assert finish(state, again)["bits"] == expected


def _of_all_kinds(rank: int) -> None:
    alone = {bits: _gradients(rank, bits) for bits in (8, 16, 32)}
    mixed = _gradients(rank, {"*": 32, "0.*": 16, "2.weight": 8})
    for name, bits in {"0.weight": 16, "0.bias": 16, "2.weight": 8, "2.bias": 32, "6.weight": 32}.items():
        assert torch.equal(mixed[name], alone[bits][name]), (name, bits)
    model, state = wrapped({}, {"bits": {"*": 32, "0.*": 16, "2.weight": 8}})
    assert "gradient values in 2 tensors at 16 bits (bf16, stochastic rounding) by bf16" in state.report()
    state.close()
    native = _gradients(rank, {"*": 32})
    assert all(torch.equal(native[name], gradient) for name, gradient in alone[32].items())


def _tables(rank: int) -> None:
    def gradient(bits: object) -> Tensor:
        torch.manual_seed(0)
        tables = nn.ModuleDict({name: nn.Embedding(64, 32, sparse=True) for name in "ab"})
        model = DistributedDataParallel(Tables(tables))
        state = register_gqsgd(model, bits=bits, sparse="gather")
        model(torch.arange(8) + rank).backward()
        state.close()
        return torch.stack([tables[name].weight.grad.to_dense() for name in "ab"])

    mixed, four, eight = gradient({"*": 4, "*.a.*": 8}), gradient(4), gradient(8)
    assert torch.equal(mixed[0], eight[0])
    assert torch.equal(mixed[1], four[1])
    assert not torch.equal(four[0], eight[0])


class Tables(nn.Module):
    """Two tables that are used alike."""

    def __init__(self, tables: nn.ModuleDict) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, x: Tensor) -> Tensor:
        return sum(table(x).square().sum() for table in self.tables.values())  # type: ignore[return-value]


def _refused(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"'haed\.\*'.* match no parameter; names look like"):
        register_gqsgd(DistributedDataParallel(mlp()), bits={"*": 4, "haed.*": 8})
    patterns = [{"*": 4, "0.*": 8, "0.weight": 2}, {"*": 4, "0.weight": 2, "0.*": 8}][:: 1 - 2 * rank][0]
    with pytest.raises(ConfigError):  # on one rank, a pattern decides for nothing
        register_gqsgd(DistributedDataParallel(mlp()), bits=patterns)
    with pytest.raises(ConfigError, match="do not agree: bits: "):
        register_gqsgd(DistributedDataParallel(mlp()), bits={"*": 4, "0.*": 8 - rank})
    with pytest.raises(ConfigError, match="here, give bits as a number"):
        all_reduce(torch.ones(2000), bits={"*": 4})


@pytest.mark.slow
@on_ranks(3)
def test_each_parameter_is_reduced_as_if_all_had_its_bits_and_runs_resume(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    _equal(rank)
    _trained(rank, path)


@on_ranks(2)
def test_numbers_that_are_no_codes_and_tables_have_bits_by_name_and_ranks_agree_on_them(rank: int) -> None:
    _of_all_kinds(rank)
    _tables(rank)
    _refused(rank)
