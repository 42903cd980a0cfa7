"""Runs that this process only starts: jobs of a sweep or a search, ``-m``, and a run on the hosts of a lab."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from netlab.lab import NetLab, exit_on_signals
from netlab.ranks import run_everywhere
from recipes.errors import check_installed
from recipes.files import RESULT_FILE
from recipes.launch.processes import end_session, folder_argument, run_command
from recipes.measuring.metrics import Metric
from recipes.opening import INTERRUPTED

#: Hydra's plugin of a search, and the words that choose it.
PLUGIN = "hydra_plugins.hydra_optuna_sweeper"
SEARCHES = ("hydra/sweeper", "hparams_search")


def is_search(overrides: Sequence[Override]) -> bool:
    """Whether a command line chooses a sweeper of its own, which makes jobs without a comma list."""
    return any(override.key_or_group.lstrip("+") in SEARCHES for override in overrides)


def check_sweeper(overrides: Sequence[Override]) -> None:
    """Check that the sweeper is installed that a command line names."""
    named = [override for override in overrides if override.key_or_group in SEARCHES and override.value() == "optuna"]
    if named:
        check_installed(PLUGIN, str(named[0].input_line), "hydra-optuna-sweeper", "optuna")


def run_job(overrides: Sequence[str], folder: Path) -> tuple[int, float]:
    """Run a job of a sweep; returns the exit code, and the final value of the task's metric, NaN without one."""
    # No output_subdir: this process has already written the configuration into the folder.
    words = [*overrides, folder_argument(folder), "hydra.output_subdir=null"]
    code = _run_to_its_end(run_command(words))
    if code:
        return code, float("nan")
    facts = json.loads((folder / RESULT_FILE).read_text())
    value = Metric.of_facts(facts).of_run(facts["metrics"])
    return 0, float("nan") if value is None else float(value)


def _run_to_its_end(command: Sequence[str]) -> int:
    """Run a command, and end it where this process has to end; returns the exit code."""
    exit_on_signals()
    # A session of its own: an interrupt on a terminal reaches this process alone, which ends the command.
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    finally:
        end_session(process)


def run_on_hosts(hosts: int, rate: str, ranks_per_host: int, arguments: Sequence[str], folder: Path) -> int:
    """Run `run.py` with these arguments as every rank of a lab; returns the exit code.

    Lines of rank 0 are printed as they are, lines of other ranks with the name of their host.

    Raises:
        NetLabError: no lab can be built here.
    """
    # No output_subdir: this process has already written the configuration into the folder.
    shared = [folder_argument(folder), "hydra.output_subdir=null"]
    try:
        with NetLab(hosts, rate, ranks_per_host) as lab:
            return run_everywhere(lab, run_command([*arguments, *shared]), plain_rank=0)
    except KeyboardInterrupt:
        return INTERRUPTED
