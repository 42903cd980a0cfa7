"""Time in which one rank encodes and decodes a bucket, by the number of threads that do it.

    python -m benchmarks.codec_threads --threads 1 2 --save

The bucket goes through the package's own pipeline, as one of two ranks. The wire takes no time: what a rank receives is
what it has sent itself, twice. Beside that, kernels encode and decode the bucket alone, on threads with a processor
each. Cases take turns. The processors have to be idle, as many as there are threads.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from typing import cast

import torch
from torch import Tensor

from benchmarks.kernels import codec_cases
from benchmarks.report import Report, command_line, present
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import codec_of
from lightning_gqsgd.config.resolving import resolve, setting_of
from lightning_gqsgd.kernels.layout import PieceSize, Segment
from lightning_gqsgd.predict.timing import Spread, in_turns
from lightning_gqsgd.reducers import new_store
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.wire.communicator import Communicator
from lightning_gqsgd.wire.compiling import compile_kernels
from lightning_gqsgd.wire.pipeline import Job, Sequencer
from lightning_gqsgd.wire.plan import Plan
from lightning_gqsgd.wire.telemetry import Telemetry
from lightning_gqsgd.wire.workers import MOST

RANKS = 2
#: Coordinates of the bucket, which has 25 MiB.
NUMEL = 6_553_600
BITS = (8, 4)


class _Done:
    """Work that is over."""

    def get_future(self) -> torch.futures.Future[None]:
        """A future that is complete."""
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def wait(self) -> None:
        """Wait for nothing."""


class Mirror:
    """Stands in for a communicator: the other rank sends what this one sends, at once."""

    def start(self, exchange: Exchange, stage: int, turn: int) -> _Done:
        """Fill the output of an exchange."""
        del stage, turn  # there is no order to keep
        if exchange.kind == "all_gather":
            message = exchange.input.view(1, -1).clone()  # it lies where the gathered ones go
            exchange.output.view(RANKS, -1).copy_(message)
        else:  # each part has the size of its counterpart, for the bucket has equal shares
            exchange.output.view(-1).copy_(exchange.input.view(-1))
        return _Done()

    def describe(self, error: BaseException, what: str) -> Exception:
        """See `wire.communicator.Communicator.describe`."""
        return RuntimeError(f"{what} {error}")


class Bench:
    """A bucket, and what reduces it."""

    def __init__(self, numel: int) -> None:
        self.buffer = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        self._sequencer, self._telemetry = Sequencer(), Telemetry()
        self._wire = cast("Communicator", Mirror())

    def plan(self, reducer: str, bits: int) -> Plan:
        """How the bucket is reduced; its kernels are compiled."""
        config = resolve(GQSGDConfig(bits=bits, reducer=reducer, sample_every=0), RANKS)
        compile_kernels(config, self.buffer.dtype, self.buffer.device, RANKS)
        setting = setting_of(config, RANKS, self.buffer.dtype, PieceSize.of_bits(bits))
        return Plan([Segment(0, self.buffer.numel(), raw=False)], setting)

    def run(self, plan: Plan, threads: int) -> Tensor:
        """Reduce the bucket once."""
        counters, x = self._telemetry.bucket(0), self.buffer
        store = new_store(plan.setting, {}, x.device)
        starts = plan.starts(x, 0, counters.calls, store, counters, self._telemetry)
        job = Job(x, starts, "a bucket", counters, self._telemetry, ends_step=True)
        job.threads = threads
        self._sequencer.submit(self._wire, job)
        return job.wait()

    def close(self) -> None:
        """End all threads."""
        self._sequencer.stop()


class Alone:
    """Threads that encode and decode equal parts of a bucket, with nothing but kernels.

    Each thread is bound to a processor, where the system can do that. A virtual machine may leave two threads on one
    processor for longer than a bucket takes.
    """

    def __init__(self, buffer: Tensor, bits: int, threads: int) -> None:
        config = resolve(GQSGDConfig(bits=bits), RANKS)
        self._cases = [codec_cases(part, codec_of(config), config.block_size) for part in buffer.chunk(threads)]
        places = cycle(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None])
        self._pools = [ThreadPoolExecutor(1, initializer=partial(_bind, next(places))) for _ in self._cases]

    def run(self) -> None:
        """Encode and decode the bucket once."""
        work = [pool.submit(_both, *pair) for pool, pair in zip(self._pools, self._cases, strict=True)]
        for part in work:
            part.result()

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()


def _bind(processor: int | None) -> None:
    if processor is not None:
        os.sched_setaffinity(0, {processor})  # 0 is the calling thread


def _both(encode: Callable[[], object], decode: Callable[[], object]) -> None:
    encode()
    decode()


def measure(options: argparse.Namespace) -> Report:
    """Run all cases in turns."""
    torch.set_num_threads(1)
    report = Report(
        "codec_threads",
        f"Encoding and decoding a bucket of {NUMEL:,} fp32 coordinates as one of two ranks, by threads",
        {
            "case": "",
            "threads": "d",
            "time (ms)": ".2f",
            "10 to 90 % (ms)": "",
            "one thread / time": ".2f",
            "codes (Gbit/s)": ".1f",
        },
        notes=(
            "time = median over rounds; ratios are medians over rounds of times within one round. codes = bits of the "
            "bucket's own codes, once, by time: a link of that rate takes as long in each direction.",
            "kernels alone = each thread encodes and decodes its part of the bucket, on a processor of its own.",
        ),
    )
    bench = Bench(NUMEL)
    for bits in BITS:
        alone = {n: Alone(bench.buffer, bits, n) for n in options.threads}
        plan = bench.plan("gather", bits)  # its messages hold the codes once
        _add_rows(report, options, f"kernels alone, {bits} bit", plan, {str(n): one.run for n, one in alone.items()})
        for one in alone.values():
            one.close()
    for reducer in ("two_shot", "gather"):
        for bits in BITS:
            plan = bench.plan(reducer, bits)
            cases = {str(n): partial(bench.run, plan, n) for n in options.threads}
            _add_rows(report, options, f"{reducer}, {bits} bit", plan, cases)
    bench.close()
    return report


def _add_rows(
    report: Report, options: argparse.Namespace, name: str, plan: Plan, cases: Mapping[str, Callable[[], object]]
) -> None:
    seconds = in_turns(cases, options.rounds)
    for threads, values in seconds.items():
        spread = Spread.of(values)
        report.rows.append(
            [
                name,
                int(threads),
                1e3 * spread.median,
                f"{1e3 * spread.low:.2f} to {1e3 * spread.high:.2f}",
                Spread.of(seconds[str(options.threads[0])] / values).median,
                8e-9 * plan.message_bytes / spread.median,
            ]
        )


def main() -> None:
    """Run the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], choices=range(1, MOST + 1), metavar="N")
    parser.add_argument("--rounds", type=int, default=30)
    present(parser, measure)


if __name__ == "__main__":
    main()
