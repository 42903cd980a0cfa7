"""Runs a benchmark's worker once on every host of a lab, and collects the measurements of the first host."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Report, present, program
from lightning_gqsgd.predict.timing import slowest as slowest
from netlab.lab import NetLab, NetLabError, parse_rate
from netlab.ranks import run_everywhere

RESULT = "GQSGD_BENCHMARK_RESULT"
TIMEOUT_S = 1800.0


def work_or_present(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    measure: Callable[[argparse.Namespace], Report],
) -> None:
    """Do a worker's part if this process is a worker; otherwise measure with workers and present the report."""
    if os.environ.get(RESULT):
        work(parser.parse_known_args()[0])  # arguments that this parser does not know belong to the presentation
    else:
        present(parser, measure)


def add_labs(parser: argparse.ArgumentParser) -> None:
    """Add the arguments ``--hosts``, ``--rate`` and ``--ranks-per-host``, which `in_labs` reads."""
    parser.add_argument("--hosts", type=int, nargs="+", default=[2], help="numbers of hosts (default 2)")
    parser.add_argument("--rate", nargs="+", default=["1gbit"], help="of each link, e.g. 100mbit 1gbit none")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="processes on each host (default 1)")


def in_labs(
    options: argparse.Namespace,
    report: Report,
    add_rows: Callable[[Report, int, str, Any], None],
    timeout: float = TIMEOUT_S,
) -> None:
    """Run this command as every rank of a lab, for every number of hosts and every rate; report what host 0 measured.

    An interrupt ends the labs. The report then has the rows of those that had ended, and says so.

    Args:
        options: the command line, with the arguments of `add_labs`.
        report: where the rows go.
        add_rows: adds a lab's result to the report: (report, hosts, rate, argument of `finish`).
        timeout: seconds after which a lab's workers are ended.

    Raises:
        NetLabError: a lab cannot be built, or a worker failed or left no result.
    """
    for hosts in options.hosts:
        for rate in options.rate:
            try:
                with NetLab(hosts, rate, options.ranks_per_host) as lab:
                    result = in_lab(lab, program(), f"on {hosts} hosts at {rate}", timeout)
            except KeyboardInterrupt:
                if not report.rows:
                    raise
                report.notes = (*report.notes, f"Interrupted on {hosts} hosts at {rate}; later labs are missing.")
                return
            add_rows(report, hosts, rate, result)
            report.raw[f"{hosts} hosts, {rate}"] = result


def in_lab(lab: NetLab, command: str, where: str, timeout: float = TIMEOUT_S) -> Any:
    """Run this command as every rank of a lab, with this process's arguments; the argument of `finish` on host 0.

    ``where`` says in an error what the lab is.
    """
    words = [sys.executable, *command.split()[1:], *sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        os.environ[RESULT] = str(file)
        code = run_everywhere(lab, words, timeout=timeout)
        if code or not file.exists():
            raise NetLabError(f"{command} {where} failed with exit code {code}")
        return json.loads(file.read_text())


def wire_seconds(nbytes: float, rate: str) -> float | None:
    """Seconds that a link of a rate needs for a number of bytes; None if the link has no limit."""
    bits_per_second = parse_rate(rate)
    return 8 * nbytes / bits_per_second if bits_per_second else None


def begin() -> tuple[int, int]:
    """Join the other workers over Gloo, with one compute thread; returns rank and number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    return dist.get_rank(), dist.get_world_size()


def finish(result: Any) -> None:
    """Write the first worker's result, and leave the process group."""
    dist.barrier()
    if dist.get_rank() == 0:
        Path(os.environ[RESULT]).write_text(json.dumps(result))
    dist.destroy_process_group()


def sent_bytes() -> int:
    """Returns the bytes that this host has sent to others, headers included, as its network devices count them."""
    counters = Path("/sys/class/net").glob("*/statistics/tx_bytes")
    return sum(int(file.read_text()) for file in counters if file.parts[-3] != "lo")
