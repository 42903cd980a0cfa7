"""Time of one bucket's reduction on links of a given rate, against the time that its bytes need on the link.

    python -m benchmarks.reducers --hosts 2 4 --rate 1gbit 10gbit --save

The benchmark needs Linux, root and iproute2, see `netlab`. Cases run in turns: torch's all-reduce of fp32; torch's
all-reduce of bf16 with both casts, as torch's compression hook does; each reducer; and each reducer's messages without
the codec. The next command compares two ways of adding exponential codes: in pairs along a tree, and exactly after two
shots.

    python -m benchmarks.reducers --hosts 2 4 --rate 1gbit --reducer tree "two_shot exponential"

The next command compares one level with two levels, on hosts that run several ranks each.

    python -m benchmarks.reducers --hosts 2 --ranks-per-host 2 --rate 1gbit --reducer two_shot hierarchical
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.hosts import add_labs, begin, finish, in_labs, slowest, wire_seconds, work_or_present
from benchmarks.report import Report, command_line
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels import kernels_for
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.predict.timing import Spread, in_turns
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.base import ring_bytes
from lightning_gqsgd.reducers.memory import MemoryStore
from lightning_gqsgd.session.nodes import nodes_of_groups, with_nodes
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.meeting import Meeting
from lightning_gqsgd.wire.pipeline import Job, release, runner_for
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import Telemetry

BARE = " without codec"
#: Kernels that do nothing, so that only the reducer's messages are timed.
IDLE: dict[str, Any] = {
    "block_maxima": lambda _, blocks: torch.zeros(len(blocks), dtype=torch.int32),
    "encode": lambda *_: None,
    "combine": lambda *_: None,
    "reduce": lambda *_: None,
    "decode": lambda *_: 0,
    "decode_sum": lambda *_: 0,
}


class Bench:
    """All cases on one buffer per rank, reduced in place."""

    def __init__(self, numel: int, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self.buffer = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        assert dist.group.WORLD is not None
        self.communicator = Communicator(self.buffer.device, dist.group.WORLD, "benchmarks.reducers")
        self.runner = runner_for(self.communicator)
        self.telemetry = Telemetry()
        self.cases: dict[str, Callable[[], object]] = {}
        self.bytes: dict[str, int] = {}  # bytes that each rank sends

    def add_native(self) -> None:
        small = torch.empty_like(self.buffer, dtype=torch.bfloat16)

        def bf16() -> None:
            small.copy_(self.buffer)
            dist.all_reduce(small.div_(self.ranks))
            self.buffer.copy_(small)

        self.cases |= {"fp32": partial(_mean, self.buffer, self.ranks), "bf16": bf16}
        fp32 = ring_bytes(self.buffer.nbytes, self.ranks)
        self.bytes |= {"fp32": fp32, "bf16": fp32 // 2}

    def add_reducer(self, case: str, bits: int, connections: int = 1) -> None:
        name = f"{case}, {bits} bit" + f", {connections} connections" * (connections > 1)
        self.add_config(name, case_config(case, bits), connections)

    def add_config(self, name: str, config: GQSGDConfig, connections: int = 1) -> None:
        assert dist.group.WORLD is not None
        with Meeting("benchmarks.reducers", [dist.group.WORLD], timedelta(minutes=1)) as meeting:
            (nodes,) = nodes_of_groups(meeting, self.buffer.device)
        config = resolve(with_nodes(config, nodes), self.ranks)
        setting = setting_of(config, self.ranks, self.buffer.dtype, self.communicator.piece_size(config.num_bits))
        self.communicator.extend(setting.reducer.scopes(setting), connections)
        compile_kernels(config, self.buffer.dtype, self.buffer.device, self.communicator.size)
        plan = Plan([Segment(0, self.buffer.numel(), raw=False)], setting)
        store = new_store(setting, {0: self.buffer.numel()}, self.buffer.device)
        run = partial(self._run, plan, store, connections)
        self.cases |= {name: run, name + BARE: partial(self._run_bare, run)}
        self.bytes[name] = self.bytes[name + BARE] = plan.sent_bytes

    def close(self) -> None:
        self.runner.close(self.communicator)
        release(self.runner)
        self.communicator.close()

    def _run(self, plan: Plan, store: MemoryStore, connections: int) -> None:
        counters = self.telemetry.bucket(0)
        starts = plan.starts(self.buffer, self.rank, counters.calls, store, counters, self.telemetry)
        job = Job(self.buffer, starts, "a bucket", counters, self.telemetry, True, connections=connections)
        self.runner.submit(self.communicator, job)
        job.future.wait()

    def _run_bare(self, run: Callable[[], None]) -> None:
        with patch.multiple(kernels_for(self.buffer.device), **IDLE):
            run()


def case_config(case: str, bits: int) -> GQSGDConfig:
    """The configuration of a case's name.

    Codes are exponential for the tree, and where the name ends in "exponential"; else those that the package takes:
    linear where codes are added, and companded.
    """
    reducer, _, codec = case.partition(" ")
    codec = "exponential" if reducer == "tree" else codec or "auto"
    return GQSGDConfig(reducer=reducer, codec=codec, bits=bits, sample_every=0)


def _mean(x: Tensor, ranks: int) -> None:
    dist.all_reduce(x.div_(ranks))  # DDP divides before the all-reduce as well


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    bench = Bench(options.numel, ranks, rank)
    bench.add_native()
    for reducer in options.reducer:
        if reducer != "gather" or ranks == 2:  # with more ranks, a gather moves more bytes than its rivals
            for bits in options.bits:
                bench.add_reducer(reducer, bits)
    seconds = in_turns(bench.cases, options.rounds, before=dist.barrier)
    seconds = {name: slowest(values).tolist() for name, values in seconds.items()}
    bench.close()
    finish({"seconds": seconds, "bytes": bench.bytes})


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    several = options.ranks_per_host > 1
    report = Report(
        "reducers_netlab" + f"_{options.ranks_per_host}_ranks_per_host" * several,
        f"Reduction of one bucket of {options.numel:,} fp32 coordinates over shaped links"
        + f", {options.ranks_per_host} ranks per host" * several,
        {
            "case": "",
            "hosts": "d",
            "rate": "",
            "sent (MB)": ".2f",
            "wire (ms)": ".1f",
            "time (ms)": ".1f",
            "time / wire": ".2f",
            "fp32 / time": ".2f",
            "bf16 / time": ".2f",
        },
        notes=(
            "wire = bytes sent by each host / rate of its link; time = median over rounds of the slowest host's time. "
            "TCP's headers take 4.4 % of the rate (`python -m netlab --rate 1gbit --check`), so that "
            "time / wire cannot fall below 1.05.",
            "'without codec' sends the same messages through the same pipeline and neither encodes nor decodes: what "
            "it has above 1.05 is Gloo's. Gloo takes about 0.5 ms of processor per collective, and a rank cannot "
            "receive a message while it sends one of the same collective, so a bucket's first piece goes one way at a "
            "time. All hosts share this machine's cores: with more hosts than cores they wait for each other's "
            "network stacks, and times differ between runs and machines (4 hosts on 2 cores, two_shot at 4 bits over 1 "
            "Gbit/s: 1.5 to 2.9). Two cores carry less than 10 Gbit/s.",
        ),
    )
    in_labs(options, report, partial(_add_rows, options))
    return report


def _add_rows(options: argparse.Namespace, report: Report, hosts: int, rate: str, result: dict[str, Any]) -> None:
    seconds = {name: torch.tensor(values).numpy() for name, values in result["seconds"].items()}
    for name, values in seconds.items():
        time, sent = Spread.of(values).median, result["bytes"][name]
        # A part of what several ranks of one host send stays on that host.
        wire = wire_seconds(sent, rate) if options.ranks_per_host == 1 else None
        faster = [
            None if name.endswith(BARE) else Spread.of(seconds[plain] / values).median for plain in ("fp32", "bf16")
        ]
        times = (1e3 * wire, 1e3 * time, time / wire) if wire else (None, 1e3 * time, None)
        report.rows.append([name, hosts, rate, sent / 1e6, *times, *faster])


if __name__ == "__main__":
    parser = command_line(__doc__)
    add_labs(parser)
    parser.add_argument("--numel", type=int, default=6_553_600, help="coordinates (default 6553600, 25 MiB)")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    cases = ["gather", "two_shot", "sum", "tree", "two_shot exponential", "hierarchical"]
    parser.add_argument("--reducer", nargs="+", choices=cases, default=cases[:3])
    parser.add_argument("--rounds", type=int, default=15)
    work_or_present(parser, work, measure)
