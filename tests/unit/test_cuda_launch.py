"""Kernels for GPUs that were launched on a block table once are launched again without Triton's looking at them, if
nothing changed that they are compiled for."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels import cuda as cuda_kernels
from lightning_gqsgd.kernels.cuda import launch, tiles
from lightning_gqsgd.kernels.cuda.constants import Constants, number_of, shape_of
from lightning_gqsgd.kernels.layout import PieceSize, Segment, cut
from lightning_gqsgd.kernels.wire import NO_ORIGIN, Origin
from lightning_gqsgd.reducers import new_store, setting_for
from lightning_gqsgd.wire import compiling
from lightning_gqsgd.wire.compiling import settings_of
from lightning_gqsgd.wire.plan import Plan, ScatterPlan
from tests.simulated_cuda import DEVICE, GpuTensor, SimulatedCuda, simulated

__all__ = ["simulated"]

C = Constants(number_of(torch.float32), shape_of(64), None)
CPU = torch.device("cpu")
X = torch.zeros(256)
START = launch.start


class Kernel:
    """Stands in for a kernel, and for what Triton compiles it to."""

    arg_names = ("table", "count", "origin", "x", "scales", "wire", "key", "KIND", "c")

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []
        self.streams: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def first(*arguments: Any, **constants: Any) -> Any:
            self.compiled.append((*grid, *arguments))
            return self

        def again(*arguments: Any, stream: int) -> None:
            self.streams.append(stream)
            self.launched.append((grid[0], *arguments))

        return again if len(grid) == 3 else first


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "options", lambda c, kind: {})
    monkeypatch.setattr(launch, "_kept", {})
    return Kernel()


@pytest.fixture
def blocks() -> Tensor:
    """Three full blocks of 64, and a short one."""
    return torch.from_numpy(cut([Segment(0, 200, raw=False)], 64))


WIRE = torch.zeros(64, dtype=torch.uint8)
SCALES = torch.zeros(4, dtype=torch.int32)


def _run(
    kernel: Kernel,
    blocks: Tensor,
    x: Tensor = X,
    scales: Tensor | None = SCALES,
    wire: Tensor = WIRE,
    key: int = 3,
    c: Constants = C,
    origin: Origin = NO_ORIGIN,
) -> None:
    launch.run(kernel, c, blocks, x, scales, wire, key, origin=origin)


def test_a_second_launch_has_all_arguments_in_order(kernel: Kernel, blocks: Tensor) -> None:
    _run(kernel, blocks)
    assert [one[2] for one in kernel.compiled] == [3, 1], "full blocks, and the last one"
    other = torch.ones(256)
    _run(kernel, blocks, x=other, key=16, origin=Origin(5, 7))
    assert len(kernel.compiled) == 2
    for first, again, kind in zip(kernel.compiled, kernel.launched, (tiles.ALIGNED, tiles.RAGGED), strict=True):
        assert again[:3] == first[:3], "programs, table and number of blocks"
        assert again[3:] == (5 + 7 * 2**32, other, SCALES, WIRE, 16, kind.value, C)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": X.half()},
        {"x": X[1:]},  # another table: blocks begin elsewhere
        {"scales": None},
        {"wire": WIRE[1:]},  # not at a multiple of 16 bytes
        {"c": Constants(number_of(torch.float32), shape_of(128), None)},
    ],
    ids=str,
)
def test_what_triton_compiles_for_is_looked_at_again(kernel: Kernel, blocks: Tensor, changed: dict[str, Any]) -> None:
    _run(kernel, blocks)
    before = len(kernel.compiled)
    _run(kernel, blocks, **changed)
    assert len(kernel.compiled) > before
    assert not kernel.launched
    _run(kernel, blocks, **changed)
    _run(kernel, blocks)
    assert len(kernel.launched) == len(kernel.compiled)


def test_a_kernel_gets_its_tensor_from_a_multiple_of_16_bytes_on(kernel: Kernel, blocks: Tensor) -> None:
    for _ in range(2):
        _run(kernel, blocks, x=X[3:])
    for arguments in (*kernel.compiled, *kernel.launched):
        assert arguments[4].data_ptr() == X.data_ptr()
    assert len(kernel.launched) == len(kernel.compiled)


def test_what_is_kept_goes_with_its_block_table(kernel: Kernel, blocks: Tensor) -> None:
    """Another block table may get the same identity."""
    for _ in range(3):
        table = blocks.clone()
        _run(kernel, table)
        assert len(launch._kept) == 1
        del table
        gc.collect()
        assert not launch._kept
    assert not kernel.launched


def test_streams_that_use_tables_are_named_once(
    kernel: Kernel, blocks: Tensor, simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[tuple[int, str]] = []
    monkeypatch.setattr(launch, "start", START)
    monkeypatch.setattr(GpuTensor, "record_stream", lambda tensor, stream: named.append((id(tensor), stream.name)))
    x = torch.zeros(256, device=DEVICE)
    here, there = simulated.new_stream(), simulated.new_stream()
    for stream in (here, there, here, there):
        with simulated.stream(stream):
            _run(kernel, blocks, x=x)
    assert named == [(id(columns), stream.name) for stream in (here, there) for _, columns, *_ in kernel.compiled]
    again = [id(stream) for stream in (there, here, there) for _ in kernel.compiled]
    assert kernel.streams == again, "each launch is on the stream of its time"


def test_counters_are_at_zero_and_used_once() -> None:
    counters = [launch.counter(X.device) for _ in range(200)]
    assert len({one.data_ptr() for one in counters}) == 200
    assert all(int(one) == 0 and one.data_ptr() % 16 == 0 for one in counters)
    counters[0] += 1
    assert int(sum(counters[1:])) == 0


#: Configurations, ranks, and plans whose uncompressed steps need no kernel that compressed ones do not need.
STARTS: list[tuple[dict[str, Any], int, type[Plan]]] = [
    *[({"bits": bits, "reducer": "two_shot"}, 3, plan) for bits in (8, 4, 2) for plan in (Plan, ScatterPlan)],
    ({"bits": 4, "reducer": "gather", "warmup_steps": 1}, 2, Plan),
    ({"bits": 4, "reducer": "sum"}, 3, Plan),
    ({"bits": 4, "reducer": "hierarchical", "node_size": 2}, 4, Plan),
]


@pytest.mark.parametrize(("fields", "ranks", "plan"), STARTS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_whatever_a_step_launches_was_compiled_at_the_start(
    fields: dict[str, Any], ranks: int, plan: type[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are compiled for constants, kinds of tiles, dtypes, alignments, and which arguments are None."""
    launched: set[tuple[Any, ...]] = set()

    def start(kernel: Any, c: Constants, programs: int, *arguments: Any, **constants: Any) -> None:
        forms = [(one.dtype, one.data_ptr() % 16 == 0) if isinstance(one, Tensor) else one is None for one in arguments]
        launched.add((kernel, c, constants.get("KIND"), *forms))

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setitem(sys.modules, cpu.__name__, cuda_kernels)
    config = resolve(GQSGDConfig(**fields), ranks)
    for setting in settings_of(config, torch.float32, DEVICE, ranks):
        part = compiling.every_tile(setting.block_size, setting.ranks // plan.parts(setting.ranks))
        monkeypatch.setattr(compiling, "_SEGMENTS", part)
        compiling.run_once(setting, CPU, plan)
    compiled = set(launched)
    assert compiled
    setting = setting_of(config, ranks, torch.float32, PieceSize(1500, 1500))
    for compressed in (True, False):
        for numels in ((4096,), (1000, 7, 513), (9,), (4096, 3, 8192), (1,)):
            part = tuple(Segment(number, numel, numel < 10 or not compressed) for number, numel in enumerate(numels))
            segments = part * plan.parts(ranks)
            of_step = setting_for(setting, compressed=compressed)
            for offset in (0, 1):
                total = sum(one.numel for one in segments)
                gradients = [torch.zeros(total + offset)[offset:] for _ in range(ranks)]
                plan(segments, of_step).average(gradients, 0, [new_store(of_step, {}, CPU)] * ranks)
    assert not launched - compiled
