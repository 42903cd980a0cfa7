"""Measures the processor time that the host takes for one bucket on a GPU, without a GPU.

    python -m benchmarks.host_time --save

The way is that of a real bucket, from the engine to the last launch: plan, job, runner, reducer, and launches of
kernels that Triton has compiled. There are stand-ins for what is behind that: a driver that launches nothing, and a
process group that sends nothing. Tensors lie in the host's memory, and no kernel reads them. So what a real driver and
NCCL take comes on top, and so do CUDA's streams and events.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"  # Triton looks at it when it is imported

import torch
import torch.distributed as dist
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import cpu, cuda
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.presets import FIXED
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.wire import communicator, engine
from lightning_gqsgd.wire.agreement import Stamp
from lightning_gqsgd.wire.engine import Engine, Request
from lightning_gqsgd.wire.peers import Peers
from lightning_gqsgd.wire.pipeline import StreamRunner

#: Ranks that the stand-in for NCCL has.
RANKS = 8
#: Buckets of a step.
BUCKETS = 6
#: Steps that are timed.
STEPS = 300
CPU = torch.device("cpu")


class Case(NamedTuple):
    """A kind of bucket.

    Attributes:
        preset: name of the configuration.
        bucket: what is in it, in words.
        segments: its parameters.
    """

    preset: str
    bucket: str
    segments: tuple[Segment, ...]


# Small, so that buffers come from the C library as fast as from PyTorch's allocator for GPUs. Blocks of full length are
# one launch in each stage, and the ends of parameters are another.
_MATRIX = (Segment(0, 1 << 15, raw=False),)
_LAYERS = tuple(Segment(number, numel, raw=numel < 100) for number, numel in enumerate([1000, 16, 16] * 20))

CASES = [
    Case("gqsgd", "one matrix", _MATRIX),
    Case("gqsgd", "60 parameters", _LAYERS),
    Case("gqsgd_4bit", "one matrix", _MATRIX),
    Case("native", "one matrix", _MATRIX),
]


class _Card:
    """As much of the driver of a GPU as compiling and launching ask for."""

    class launcher_cls:
        """A launch that launches nothing."""

        def __init__(self, source: Any, metadata: Any) -> None:
            """Take what Triton gives the launcher of a kernel."""

        def __call__(self, *arguments: Any) -> None:
            """Take what Triton gives a launch."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        load_binary=lambda *arguments: (object(), object(), 0, 0, 1024),
        unload_module=lambda module: None,
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


class _Work:
    def wait(self) -> None:
        """Wait for nothing."""


class _Group:
    """A process group that sends nothing."""

    def __init__(self, *arguments: Any) -> None:
        self._work = _Work()

    def allreduce(self, tensors: list[Tensor], operation: Any) -> _Work:
        return self._work

    def alltoall_base(self, output: Tensor, source: Tensor, *splits: list[int]) -> _Work:
        return self._work

    def _allgather_base(self, output: Tensor, source: Tensor) -> _Work:
        if source.dtype == torch.int64:  # stamps, which are compared
            output.view(-1, source.numel()).copy_(source)
        return self._work

    def shutdown(self) -> None:
        """Nothing is to be shut down."""


def stand_in() -> None:
    """Let tensors on the CPU go the way of those on a GPU, over a group that sends nothing."""
    driver.set_active(_Card())
    sys.modules[cpu.__name__] = cuda  # what is imported for tensors on a CPU
    communicator.backend_for = lambda *_: "nccl"
    patch.object(dist, "ProcessGroupNCCL", _Group).start()
    engine.runner_for = lambda *_: StreamRunner([None])


class Bench:
    """The engine of one of `RANKS` ranks, the others of which are not there, and a tensor."""

    def __init__(self, case: Case) -> None:
        config = GQSGDConfig(reducer="native") if case.preset == "native" else FIXED[case.preset].config
        self._config = resolve(config, RANKS)
        peers = Peers(0, tuple(range(RANKS)), dist.HashStore(), {"cuda": "nccl"}, timedelta(seconds=10))
        self._engine = Engine(CPU, peers, f"{case.preset} {case.bucket}")
        self._engine.connect(self._config)
        self._segments = case.segments
        self._store = new_store(setting_of(self._config, RANKS, torch.float32), {}, CPU)
        self._x = torch.ones(sum(segment.numel for segment in case.segments), device=CPU)

    def bucket(self, step: int, number: int) -> None:
        """Reduce one bucket of a step, as the hook does."""
        request = Request(
            name=f"bucket {number} of step {step}",
            configs=(self._config,),
            segments=self._segments,
            step=step,
            store=self._store,
            agreement=Stamp(0, step, 0) if number == 0 else None,
            bucket=number,
            ends_step=number == BUCKETS - 1,
        )
        self._engine.reduce(self._x, request).future  # noqa: B018  # DDP asks for it

    def step(self, step: int) -> tuple[float, float]:
        """Returns the seconds of this thread's processor time that the first bucket of a step takes, which brings what
        ranks compare and new keys; and those of each of the others, on average."""
        begun = time.thread_time()
        self.bucket(step, 0)
        first = time.thread_time()
        for number in range(1, BUCKETS):
            self.bucket(step, number)
        return first - begun, (time.thread_time() - first) / (BUCKETS - 1)

    def calls(self, step: int) -> int:
        """Returns how many functions are called for a bucket that is neither the first nor the last of a step, counted
        by `cProfile`, which also counts functions in C."""
        self.bucket(step, 0)  # makes the keys of the step
        profile = cProfile.Profile()
        profile.enable()
        self.bucket(step, 1)
        profile.disable()
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def facts(steps: int) -> list[dict[str, Any]]:
    """Returns the figures of all cases, which take steps in turns: rows of the table, by names."""
    benches = [Bench(case) for case in CASES]
    found: list[list[tuple[float, float]]] = [[] for _ in benches]
    for step in range(1, steps + 20):
        for bench, taken in zip(benches, found, strict=True):
            seconds = bench.step(step)
            if step > 19 and step % 100:  # neither the first steps nor those in which errors are sampled
                taken.append(seconds)
    rows = []
    for case, bench, taken in zip(CASES, benches, found, strict=True):
        # The lowest tenth, because what else a machine does makes processor time longer, and never shorter.
        first, others = (statistics.quantiles(seconds, n=10)[0] * 1e6 for seconds in zip(*taken, strict=True))
        row = {"preset": case.preset, "bucket": case.bucket, "first_us": round(first, 1), "us": round(others, 1)}
        rows.append({**row, "calls": bench.calls(steps + 201)})
    return rows


def measure(options: argparse.Namespace) -> Report:
    """Returns the table of all cases."""
    stand_in()
    rows = facts(STEPS)
    return Report(
        "host_time",
        "Processor time of the host for a bucket on a GPU",
        {
            "configuration": "",
            "bucket": "",
            "first of a step (us)": ".0f",
            "each other one (us)": ".0f",
            "function calls": ".0f",
        },
        notes=(
            f"One of {RANKS} ranks, {BUCKETS} buckets in a step, lowest tenth of {STEPS} steps. Processor time "
            "from the engine's call to the last launch, with compiled kernels, and with stand-ins for the driver and "
            "for NCCL, whose time is not in it. Nor is that of CUDA's streams and events. The first bucket of a step "
            "also has what ranks compare, and new keys. function calls: for each other bucket, those in C included; "
            "they do not depend on the processor.",
        ),
        rows=[[one["preset"], one["bucket"], one["first_us"], one["us"], one["calls"]] for one in rows],
        raw={"facts": rows},
    )


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
