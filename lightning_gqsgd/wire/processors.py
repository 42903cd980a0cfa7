"""Finds how many processors this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


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
