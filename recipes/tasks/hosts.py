"""Runs that start themselves on the hosts of a lab (netlab/)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from netlab.lab import NetLab
from netlab.ranks import exit_on_signals, run_everywhere
from recipes.tasks.launch import folder_argument

RUN = Path(__file__).resolve().parents[1] / "run.py"


def run_on_hosts(hosts: int, rate: str, ranks_per_host: int, arguments: Sequence[str], folder: Path) -> int:
    """This command line as every rank of a lab, all with one ``folder``; the exit code.

    Rank 0's output is that of the run, other ranks' lines carry the name of their host.

    Raises:
        NetLabError: no lab can be had here.
    """
    # This process has written the configuration into the folder.
    own = [folder_argument(folder), "hydra.output_subdir=null"]
    exit_on_signals()
    try:
        with NetLab(hosts, rate, ranks_per_host) as lab:
            return run_everywhere(lab, [sys.executable, str(RUN), *arguments, *own], plain_rank=0)
    except KeyboardInterrupt:
        return 130
