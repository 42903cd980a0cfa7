"""Finds how many processors this process may use, and how many of them are for it alone."""

from __future__ import annotations

import hashlib
import math
import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

#: Number of tasks that srun has started, and of the processors of each if the user has said it.
_SRUN_TASKS, _OF_EACH = "SLURM_STEP_NUM_TASKS", "SLURM_CPUS_PER_TASK"
#: Where Linux has its control groups, and where it names those of this process.
_ROOT, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class Place(NamedTuple):
    """The processors on which a process may run, in plain values, which ranks tell each other.

    Attributes:
        machine: a name that no other machine has.
        container: a digest of its control groups. Processes in the same ones share the limits of `processors`.
        cores: the numbers of the processors, as the bits of a hexadecimal number.
    """

    machine: str
    container: str
    cores: str

    def numbers(self) -> list[int]:
        """Returns the numbers of the processors."""
        bits = f"{int(self.cores, 16):b}"
        return [number for number, bit in enumerate(reversed(bits)) if bit == "1"]


def own_place() -> Place:
    """Returns the place of this process."""
    groups = ""
    with suppress(OSError):
        groups = f"{os.readlink('/proc/self/ns/cgroup')} {_text(_MEMBERSHIP)}"
    container = hashlib.blake2b(groups.encode(), digest_size=8).hexdigest()
    machine = _text(Path("/proc/sys/kernel/random/boot_id")).strip() or socket.gethostname()
    return Place(machine, container, f"{sum(1 << core for core in _cores()):x}")


def share_of(
    ranks: int,
    local_ranks: int | None,
    environment: Mapping[str, str] = os.environ,
    places: Sequence[Place] = (),
) -> int:
    """Returns how many processors one rank may use while the other ranks of its machine use equally many; 0 if they are
    more than the processors.

    A launcher may have given each rank processors of its own (``mpirun --bind-to``, ``torchrun --numa-binding``,
    ``taskset``), so a processor is divided only among the ranks that may use it.

    Args:
        ranks: number of all ranks.
        local_ranks: number of ranks on this machine; None if it is not known. Then all of which no place is known are
            assumed to be on it.
        environment: where launchers have left their variables.
        places: the places of this rank and of others, as far as they are known. Other ranks of this machine are assumed
            to use the processors of this one.
    """
    each = environment.get(_OF_EACH, "")
    if environment.get(_SRUN_TASKS) == str(ranks) and each.isdecimal():
        # Each rank is a task. If SLURM binds tasks, this process may use the processors of its own task only.
        return min(processors(), int(each))
    own = own_place()
    places = places or [own]
    here = [place for place in places if place.machine == own.machine]
    unknown = max(0, local_ranks - len(here) if local_ranks else ranks - len(places))
    users = Counter(number for place in here for number in place.numbers())
    of_cores = sum(Fraction(1, max(1, users[number]) + unknown) for number in own.numbers())
    beside = max(1, sum(place.container == own.container for place in here)) + unknown
    return int(min([of_cores, *(Fraction(limit, beside) for limit in _limits())]))


def processors(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int:
    """Returns the number of processors that this process may use, at least 1.

    ``taskset`` and schedulers name the processors that a process may use. Containers with a limit (``docker --cpus=2``,
    Kubernetes) may use all processors of the machine, but only for so much time: a control group of Linux limits the
    time.

    Args:
        root: where Linux has its control groups.
        membership: where Linux names the control groups of this process.
    """
    return max(1, min([len(_cores()), *_limits(root, membership)]))


def _cores() -> set[int]:
    """Returns the numbers of the processors on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _limits(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> Iterator[int]:
    """Yields the limits of the control groups of this process, in seconds of processor time per second, rounded up."""
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
                yield math.ceil(int(words[0]) / int(words[1]))
            if folder == top:
                break


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
