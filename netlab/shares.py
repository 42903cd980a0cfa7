"""Shares of processors: control groups of Linux, whose processes together get at most so much processor time.

Both kinds of control groups have such a limit: ``cpu.max`` of version 2, ``cpu.cfs_quota_us`` of version 1.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from netlab.errors import NetLabError

_MOUNTS = Path("/proc/mounts")
#: Microseconds over which a limit is kept: short, so that a quarter of a processor is slow and not interrupted.
_PERIOD_US = 20_000
#: Seconds for which a group's killed processes may take to end.
_PATIENCE_S = 5.0


def find_root() -> Path:
    """Returns the folder in which control groups with a limit of processor time are made.

    Raises:
        NetLabError: there is none.
    """
    for line in _MOUNTS.read_text().splitlines():
        _, folder, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(folder)
        if kind == "cgroup2" and "cpu" in (Path(folder) / "cgroup.controllers").read_text().split():
            return Path(folder)
    raise NetLabError(
        "no control group of this machine limits processor time; mount one (mount -t cgroup2 none /sys/fs/cgroup), or "
        "leave cpus out"
    )


class Share:
    """A control group whose processes together get a number of processors' time.

    Args:
        name: of the group.
        cpus: seconds of processor time in each second.
        core: the one core that they run on, numbered from 0 among those that this process may use; None: any.

    Raises:
        NetLabError: the group cannot be made.
    """

    def __init__(self, name: str, cpus: float, core: int | None = None) -> None:
        root = find_root()
        self._core = core
        self._folder = root / name
        control = root / "cgroup.subtree_control"
        self._is_version_2 = control.exists()
        try:
            if self._is_version_2 and "cpu" not in control.read_text().split():
                control.write_text("+cpu")
            self._folder.mkdir()
            self.limit(cpus)
        except OSError as error:
            remove(name)
            raise NetLabError(
                f"cpus={cpus:g} needs a control group, and {root} takes none ({error}); run it outside of the "
                "container, or leave cpus out"
            ) from error

    def limit(self, cpus: float | None) -> None:
        """Change the processor time from now on; None: there is no limit."""
        quota_us = None if cpus is None else round(cpus * _PERIOD_US)
        if self._is_version_2:
            (self._folder / "cpu.max").write_text(f"{'max' if quota_us is None else quota_us} {_PERIOD_US}")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))

    def join(self) -> None:
        """Put this process, and all that it starts from now on, into the group."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        if self._core is not None:
            os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[self._core]})


def remove(prefix: str) -> None:
    """Kill the processes of all groups whose names begin with a prefix, and remove the groups."""
    for folder in _folders(prefix):
        deadline = time.monotonic() + _PATIENCE_S
        while folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):  # a process may have ended since it was listed
                for pid in (folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):  # processes take a moment to end
                folder.rmdir()
                break
            time.sleep(0.02)


def names(prefix: str) -> list[str]:
    """Names of the groups that begin with a prefix."""
    return [folder.name for folder in _folders(prefix)]


def _folders(prefix: str) -> list[Path]:
    try:
        folders = list(find_root().iterdir())
    except (NetLabError, OSError):
        return []  # nothing can have been made
    return [folder for folder in folders if folder.name.startswith(prefix) and folder.is_dir()]
