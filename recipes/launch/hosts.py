"""Runs that start themselves on the hosts of a lab (see `netlab`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from netlab.lab import NetLab
from netlab.ranks import exit_on_signals, run_everywhere
from recipes.launch.processes import folder_argument

RUN = Path(__file__).resolve().parents[1] / "run.py"


def run_on_hosts(hosts: int, rate: str, ranks_per_host: int, arguments: Sequence[str], folder: Path) -> int:
    """Run `run.py` with these arguments as every rank of a lab; returns the exit code.

    Lines of rank 0 are printed as they are, lines of other ranks with the name of their host.

    Args:
        hosts: number of hosts.
        rate: rate of each link in each direction, see `netlab.lab.parse_rate`.
        ranks_per_host: number of processes on each host.
        arguments: command line of this process, without the name of the script.
        folder: folder of the run, which all ranks share.

    Raises:
        NetLabError: no lab can be built here.
    """
    # No output_subdir: this process has already written the configuration into the folder.
    shared = [folder_argument(folder), "hydra.output_subdir=null"]
    exit_on_signals()
    try:
        with NetLab(hosts, rate, ranks_per_host) as lab:
            return run_everywhere(lab, [sys.executable, str(RUN), *arguments, *shared], plain_rank=0)
    except KeyboardInterrupt:
        return 130
