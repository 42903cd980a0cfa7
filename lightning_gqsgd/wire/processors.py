"""Finds how many processors this process may use, and how many of them are for it alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Number of tasks that srun has started, and of the processors of each if the user has said it.
_SRUN_TASKS, _OF_EACH = "SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK"


def share_of(ranks: int, local_ranks: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns how many processors one rank may use while the other ranks of its machine use equally many; 0 if they are
    more than the processors.

    Args:
        ranks: number of all ranks.
        local_ranks: number of ranks on this machine.
        environment: where launchers have left their variables.
    """
    each = environment.get(_OF_EACH, "")
    if environment.get(_SRUN_TASKS) == str(ranks) and each.isdecimal():
        # Each rank is a task. If SLURM binds tasks, this process may use the processors of its own task only.
        return min(processors(), int(each))
    return processors() // local_ranks


def processors(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the number of processors that this process may use, at least 1.

    ``taskset`` and schedulers name the processors that a process may use. Containers with a limit (``docker --cpus=2``,
    Kubernetes) may use all processors of the machine, but only for so much time: a control group of Linux limits the
    time.

    Args:
        root: where Linux has its control groups.
        membership: where Linux names the control groups of this process.
    """
    named = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([named, *_limits(root, membership)])))


def _limits(root: Path, membership: Path) -> Iterator[float]:
    """Yields the limits of the control groups of this process, in seconds of processor time per second."""
    for line in _text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root  # version 1 has a folder for each controller, and version 2 has one
        group = top / path.lstrip("/")
        # The limits of the groups above count as well. Inside of a container, the path may be the host's, and does not
        # exist; the container's own group is at the top then.
        for folder in (group, *group.parents):
            words = _text(folder / "cpu.max").split() or [
                _text(folder / "cpu.cfs_quota_us"),
                _text(folder / "cpu.cfs_period_us"),
            ]
            if all(word.strip().isdecimal() for word in words):  # without a limit, they are "max" or -1
                yield int(words[0]) / int(words[1])
            if folder == top:
                break


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
