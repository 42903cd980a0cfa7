"""Time of one bucket's reduction over a link that is a bundle of thinner ones, by the number of connections.

    python -m benchmarks.connections --members 4 --member-rate 50mbit --connections 1 2 4 8 --save

A switch sends each TCP connection over one member of a bundle of links, by a hash of its ports, so that one connection
never gets more than one member's rate. Public clouds limit single connections in a similar way. Here a host's packets
are sorted by two bits of their source port. Which member a connection gets is luck, so each case runs in several labs.
The benchmark needs Linux, root and iproute2, see `netlab`.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.hosts import begin, finish, in_lab, slowest, work_or_present
from benchmarks.reducers import BARE, Bench
from benchmarks.report import Report, command_line, program
from lightning_gqsgd.predict.timing import in_turns
from netlab.lab import INTERFACE, NetLab, parse_rate


def bundle(lab: NetLab, host: int, members: int, rate: str) -> None:
    """Let what a host sends go over so many members, by two bits of the source port.

    Linux gives even ports to those who connect, so the lowest bit says nothing.
    """
    tc = ["tc", "-n", lab.namespace(host)]
    _run([*tc, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb", "default", "1"])
    for member in range(members):
        of_class = ["classid", f"1:{member + 1}", "htb", "rate", f"{parse_rate(rate)}bit", "burst", "70kb"]
        _run([*tc, "class", "add", "dev", INTERFACE, "parent", "1:", *of_class, "quantum", "60000"])
        for port in range(member, 4, members):
            match = ["u32", "match", "ip", "sport", hex(2 * port), "0x6", "flowid", f"1:{member + 1}"]
            _run([*tc, "filter", "add", "dev", INTERFACE, "parent", "1:", "protocol", "ip", *match])


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True)


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    bench = Bench(options.numel, ranks, rank)
    bench.add_native()
    for connections in options.connections:
        bench.add_reducer("two_shot", 4, connections)
    cases = {name: case for name, case in bench.cases.items() if not name.endswith(BARE)}
    seconds = in_turns(cases, options.rounds, before=dist.barrier)
    medians = {name: float(np.median(slowest(values))) for name, values in seconds.items()}
    bench.close()
    finish({"seconds": medians, "bytes": bench.bytes})


def measure(options: argparse.Namespace) -> Report:
    """Run the workers in every lab."""
    whole = options.members * (parse_rate(options.member_rate) or 0)
    report = Report(
        "connections_netlab",
        f"Reduction of one bucket of {options.numel:,} fp32 coordinates over a bundle of {options.members} links of "
        f"{options.member_rate}",
        {"case": "", "sent (MB)": ".2f", "wire (ms)": ".1f", "time (ms)": ".1f", "fastest lab": ".1f",
         "slowest lab": ".1f", "time / wire": ".2f"},
        notes=(
            "wire = bytes sent by each host / rate of all members together. time = median over "
            f"{options.labs} labs, in each of which connections have other ports, and so other members; in a lab, the "
            f"median over {options.rounds} rounds of the slowest host's time. Two exchanges make a two-shot mean, each "
            "with its own connections.",
        ),
    )  # fmt: skip
    found = [_in_lab(options) for _ in range(options.labs)]
    for case in found[0]["seconds"]:
        times = 1e3 * np.array([one["seconds"][case] for one in found])
        sent, time = found[0]["bytes"][case], float(np.median(times))
        wire = 8e3 * sent / whole
        report.rows.append([case, sent / 1e6, wire, time, times.min(), times.max(), time / wire])
    report.raw["labs"] = found
    return report


def _in_lab(options: argparse.Namespace) -> Any:
    with NetLab(2, "none") as lab:
        for host in range(lab.hosts):
            bundle(lab, host, options.members, options.member_rate)
        return in_lab(lab, program(), f"over {options.members} links of {options.member_rate}")


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--members", type=int, choices=[1, 2, 4], default=4, help="links of the bundle (default 4)")
    parser.add_argument("--member-rate", default="50mbit", help="of each member (default 50mbit)")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--numel", type=int, default=6_553_600, help="coordinates (default 6553600, 25 MiB)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--labs", type=int, default=7)
    work_or_present(parser, work, measure)
