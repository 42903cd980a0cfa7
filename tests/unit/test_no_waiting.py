"""No step reads a number from the tensors' device: on a GPU, the host would wait for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gqsgd.codecs import scales
from lightning_gqsgd.config import ConfigError, GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.reducers import REDUCERS, new_store, run_virtual
from lightning_gqsgd.wire.plan import GatherPlan, Plan, ScatterPlan
from lightning_gqsgd.wire.telemetry import BucketCounters, Telemetry

RANKS = 4
SEGMENTS = [Segment(0, 3000, False), Segment(1, 10, True), Segment(2, 700, False)]
KERNELS = ["block_maxima", "block_moments", "rotate", "encode", "reduce", "combine", "decode", "decode_sum"]

#: Operations that wait for a GPU.
WAITING = {
    *("_local_scalar_dense", "nonzero", "nonzero_static", "masked_select", "equal", "is_nonzero"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"),
}


class Host(TorchDispatchMode):
    """Raises where the host would wait for a GPU, except inside kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_kernel:
            assert func.overloadpacket.__name__ not in WAITING, f"{func} waits"
            if func.overloadpacket.__name__.startswith("index"):
                masks = [one for one in args[1] if isinstance(one, Tensor)] if isinstance(args[1], list) else []
                assert not any(one.dtype in (torch.bool, torch.uint8) for one in masks), f"{func} of a mask waits"
        return func(*args, **(kwargs or {}))

    def kernels(self) -> SimpleNamespace:
        """The CPU's, which return what a GPU's do: a count of blocks as a tensor."""
        return SimpleNamespace(**{**vars(cpu), **{name: self._kernel(name) for name in KERNELS}})

    def _kernel(self, name: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.in_kernel = True
            result = getattr(cpu, name)(*args, **kwargs)
            self.in_kernel = False
            return torch.tensor(result) if name.startswith("decode") else result

        return run


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    mode = Host()
    monkeypatch.setitem(sys.modules, cpu.__name__, mode.kernels())
    read = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        assert mode.in_kernel, "tolist waits"
        return read(tensor)

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return mode


CONFIGS: list[dict[str, Any]] = [
    {"reducer": "native"},
    {"reducer": "two_shot"},
    {"reducer": "gather"},
    {"reducer": "sum"},
    {"reducer": "tree", "codec": "exponential"},
    {"reducer": "hierarchical", "node_size": 2},
    {"reducer": "gather", "scale": "global"},
    {"reducer": "two_shot", "rotation": True},
    {"reducer": "two_shot", "scale_per": "parameter"},
    {"reducer": "two_shot", "scale_per": "parameter", "norm": "l2", "clip": 2.5},
    {"reducer": "gather", "norm": "power_of_two"},
    {"reducer": "gather", "scale": "global", "norm_over_ranks": "l1"},
    {"reducer": "sum", "norm": "l2", "norm_over_ranks": "l2"},
    {"reducer": "sum", "scale_per": "bucket", "norm_over_ranks": "l2"},
    {"reducer": "two_shot", "scale_per": "bucket"},
    {"reducer": "gather", "codec": "sign", "bits": 1, "memory": "ef"},
    {"reducer": "gather", "codec": "top_k", "bits": 32, "density": 0.1, "memory": "ef"},
    {"reducer": "two_shot", "memory": "diana", "memory_down": "ef"},
]


@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: "-".join(map(str, fields.values())))
def test_no_step_waits(host: Host, fields: dict[str, Any]) -> None:
    config = resolve(GQSGDConfig(**{"sample_every": 1, "block_size": 256, **fields}), RANKS)
    plan = Plan(SEGMENTS, setting_of(config, RANKS, torch.float32))
    sizes = {one.parameter: one.numel for one in SEGMENTS if not one.raw}
    stores = [new_store(plan.setting, sizes, torch.device("cpu")) for _ in range(RANKS)]
    counters, telemetry = [BucketCounters() for _ in range(RANKS)], [Telemetry() for _ in range(RANKS)]
    for step in range(2):
        gradients = [torch.randn(plan.numel) for _ in range(RANKS)]
        gradients[2][5] = torch.inf if step else 0.0
        starts = [
            plan.starts(x, rank, step, stores[rank], counters[rank], telemetry[rank])
            for rank, x in enumerate(gradients)
        ]
        with host:
            for piece in zip(*starts, strict=True):
                for rank, bad in enumerate(run_virtual([start() for start in piece])):
                    counters[rank].add_nonfinite(bad)
            for one in telemetry:
                one.end_step()
    host.in_kernel = True
    if config.reducer != "native":
        counts = [one.nonfinite_blocks for one in counters]
        # The 12 blocks of its parameter, or all 15, share a scale with the one that is not. A rank averages 3 or 4 of
        # them without messages, where it averages its own.
        bad = {"block": 1, "parameter": 9, "bucket": 15 if config.reducer == "sum" else 11}[config.scale_per]
        assert max(counts) == bad  # under "hierarchical", of one rank of each node
        assert telemetry[0].last_rel_l2 > 0
        assert [one.last_rel_l2 for one in telemetry] == [telemetry[0].last_rel_l2] * RANKS


@pytest.mark.parametrize("kind", [ScatterPlan, GatherPlan])
def test_no_step_of_shards_waits(kind: type[Plan], host: Host) -> None:
    segments = [Segment(rank, 500, False) for rank in range(RANKS)]
    plan = kind(segments, setting_of(GQSGDConfig(reducer="two_shot", sample_every=1), RANKS, torch.float32))
    counters, telemetry = BucketCounters(), Telemetry()
    store = new_store(plan.setting, {}, torch.device("cpu"))
    starts = [plan.starts(torch.randn(plan.numel), rank, 0, store, counters, telemetry) for rank in range(RANKS)]
    with host:
        for piece in zip(*starts, strict=True):
            for bad in run_virtual([start() for start in piece]):
                counters.add_nonfinite(bad)
    host.in_kernel = True
    assert counters.nonfinite_blocks == 0


def test_groups_of_blocks_are_numbered_as_by_unique() -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (0, 1, 2, 500):
        values = torch.randint(0, 40, (numel,), generator=generator)
        assert torch.equal(scales._numbers(values), torch.unique(values, return_inverse=True)[1])


@pytest.mark.parametrize("reducer", ["two_shot", "gather", "sum", "native"])
def test_results_do_not_depend_on_pieces(reducer: str) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(3710, generator=generator) for _ in range(3)]
    results = []
    for piece_numel in (1 << 24, 1500, 300):
        config = resolve(GQSGDConfig(reducer=reducer, bits=5), 3)
        plan = Plan(SEGMENTS, setting_of(config, 3, torch.float32, PieceSize(piece_numel, piece_numel)))
        results.append([one.clone() for one in gradients])
        plan.average(results[-1], 0, [new_store(plan.setting, {}, torch.device("cpu"))] * 3)
    assert reducer == "native" or len(plan._pieces) > 10
    for one in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(one, results[0], strict=True))


def test_elias_codes_are_for_the_cpu() -> None:
    config = GQSGDConfig(reducer="gather", dither="stochastic", coder="elias")
    with pytest.raises(ConfigError, match=r"coder='elias' is for tensors on the CPU, not on cuda:0.*coder='fixed'"):
        REDUCERS["gather"].check_device(setting_of(config, 2, torch.float32), torch.device("cuda", 0))
