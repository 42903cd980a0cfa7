"""Time in which one rank encodes and decodes a bucket, by the number of threads that do it.

    python -m benchmarks.codec_threads --threads 1 2 --save

The bucket goes through the package's own pipeline, as one of two ranks. The wire takes no time: what a rank receives is
what it has sent itself, twice. Cases take turns. The processors have to be idle, as many as there are threads.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import cast

import torch
from torch import Tensor

from benchmarks.report import Report, present
from lightning_gqsgd.compiling import compile_kernels
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.layout import Segment, coordinates_per_piece
from lightning_gqsgd.performance.turns import Spread, in_turns, ratio
from lightning_gqsgd.plan import Plan
from lightning_gqsgd.reducers import Setting, new_store, resolve
from lightning_gqsgd.reducers.base import Exchange
from lightning_gqsgd.telemetry import Telemetry
from lightning_gqsgd.transport.communicator import Communicator
from lightning_gqsgd.transport.job import Job
from lightning_gqsgd.transport.pipeline import Sequencer
from lightning_gqsgd.transport.workers import MOST

PROGRAM = "python -m benchmarks.codec_threads"
RANKS = 2


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
            exchange.output.view(RANKS, -1).copy_(exchange.input.view(1, -1))
        else:  # each part has the size of its counterpart, for the bucket has equal shares
            exchange.output.view(-1).copy_(exchange.input.view(-1))
        return _Done()

    def describe(self, error: BaseException, what: str) -> Exception:
        """See `transport.communicator.Communicator.describe`."""
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
        setting = Setting(config, RANKS, self.buffer.dtype, coordinates_per_piece(bits))
        return Plan([Segment(0, self.buffer.numel(), raw=False)], setting)

    def run(self, plan: Plan, threads: int) -> Tensor:
        """Reduce the bucket once."""
        counters, x = self._telemetry.bucket(0), self.buffer
        store = new_store(plan.setting.config, RANKS, {}, x.dtype, x.device)
        starts = plan.starts(x, 0, counters.calls, store, counters, self._telemetry)
        job = Job(x, starts, "a bucket", counters, self._telemetry, last_of_step=True)
        job.threads = threads
        self._sequencer.submit(self._wire, job)
        return job.wait()

    def close(self) -> None:
        """End all threads."""
        self._sequencer.stop()


def measure(options: argparse.Namespace) -> Report:
    """Run all cases in turns."""
    torch.set_num_threads(1)
    report = Report(
        "codec_threads",
        f"Encoding and decoding a bucket of {options.numel:,} fp32 coordinates as one of two ranks, by threads",
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
        ),
    )
    bench = Bench(options.numel)
    for reducer in options.reducer:
        for bits in options.bits:
            plan = bench.plan(reducer, bits)
            _add_rows(report, options, plan, {str(n): partial(bench.run, plan, n) for n in options.threads})
    bench.close()
    return report


def _add_rows(report: Report, options: argparse.Namespace, plan: Plan, cases: dict[str, partial[Tensor]]) -> None:
    config = plan.setting.config
    seconds = in_turns(cases, options.rounds)
    for name, values in seconds.items():
        spread = Spread.of(values)
        report.rows.append(
            [
                f"{config.reducer}, {config.bits} bit",
                int(name),
                1e3 * spread.median,
                f"{1e3 * spread.low:.2f} to {1e3 * spread.high:.2f}",
                ratio(seconds, str(options.threads[0]), name),
                8e-9 * plan.message_bytes / spread.median,
            ]
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], choices=range(1, MOST + 1), metavar="N")
    parser.add_argument("--numel", type=int, default=6_553_600, help="coordinates (default 6553600, 25 MiB)")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--reducer", nargs="+", choices=["two_shot", "gather"], default=["two_shot", "gather"])
    parser.add_argument("--rounds", type=int, default=30)
    present(parser, measure)


if __name__ == "__main__":
    main()
