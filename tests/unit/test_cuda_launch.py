"""Kernels for GPUs that were compiled once are launched again without Triton's looking at them, if nothing changed that
they are compiled for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.kernels.cuda import launch
from lightning_gqsgd.kernels.cuda.constants import Constants, number_of, shape_of

C = Constants(number_of(torch.float32), shape_of(64), None)
X = torch.zeros(64)


class Kernel:
    """Stands in for a kernel, and for what Triton compiles it to."""

    arg_names = ("table", "count", "x", "ranks", "KIND", "c")
    params = tuple(SimpleNamespace(do_not_specialize=name == "count") for name in arg_names)

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append(arguments)
            return self

        def again(*arguments: Any) -> None:
            self.launched.append(arguments)

        return again if len(grid) == 3 else first


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "_bound", {})
    return Kernel()


def _start(
    kernel: Kernel, x: Tensor | None = X, count: int = 5, ranks: int = 3, kind: int = 1, c: Constants = C
) -> None:
    launch.start(kernel, c, 7, X, count, x, ranks, KIND=kind)


def test_a_second_launch_has_all_arguments_in_order(kernel: Kernel) -> None:
    _start(kernel)
    _start(kernel, count=9)
    assert len(kernel.compiled) == 1
    assert kernel.launched == [(X, 9, X, 3, 1, C)]


@pytest.mark.parametrize(
    "changed",
    [
        {"x": X[1:]},  # not at a multiple of 16 bytes
        {"x": X.half()},
        {"x": X.to("meta")},
        {"x": None},
        {"ranks": 1},
        {"ranks": 16},
        {"kind": 0},
        {"c": Constants(number_of(torch.float32), shape_of(128), None)},
    ],
    ids=str,
)
def test_what_triton_compiles_for_is_looked_at_again(kernel: Kernel, changed: dict[str, Any]) -> None:
    _start(kernel)
    _start(kernel, **changed)
    assert (len(kernel.compiled), len(kernel.launched)) == (2, 0)


def test_one_and_multiples_of_16_are_told_apart(kernel: Kernel) -> None:
    for ranks in (1, 16, 32, 1, 3, 5):
        _start(kernel, ranks=ranks)
    assert [arguments[3] for arguments in kernel.compiled] == [1, 16, 3]
    assert [arguments[3] for arguments in kernel.launched] == [32, 1, 5]
