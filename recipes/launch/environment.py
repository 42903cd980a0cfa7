"""Environment variables of a run: those of its hardware profile, and the number of compute threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from lightning_gqsgd.wire.processors import share_of
from recipes.errors import RecipeError
from recipes.launch.hardware import variables


@contextmanager
def profile_environment(wanted: Mapping[str, Any], environment: MutableMapping[str, str]) -> Iterator[None]:
    """Set the environment variables of a profile inside ``with``; processes that are started there inherit them.

    An entry that is None changes nothing.

    Raises:
        RecipeError: a variable has another value already; nothing is changed then.
    """
    values = variables(wanted)
    for name, value in values.items():
        if environment.get(name, value) != value:
            raise RecipeError(
                f"{name}={environment[name]} is set in the environment, the hardware profile sets {name}={value}; "
                f"unset {name}, or take hardware.env.{name}={environment[name]} (null: whatever the environment has)"
            )
    added = [name for name in values if name not in environment]
    environment.update(values)
    try:
        yield
    finally:
        for name in added:
            environment.pop(name, None)


def check_threads(environment: Mapping[str, str]) -> None:
    """Check the number of threads that the environment names. A process with another value would end in torch's import,
    or later, without a word of its own.

    Raises:
        RecipeError: it is no positive integer, nor a list of them, one for each level of nested regions.
    """
    value = environment.get("OMP_NUM_THREADS")
    if value is None or all(part.strip().isdecimal() and int(part) > 0 for part in value.split(",")):
        return
    raise RecipeError(
        f"OMP_NUM_THREADS={value} is not a number of threads; unset it, or set an integer of at least 1 (threads=N "
        "limits the threads of a run, too)"
    )


def set_threads(threads: int | None, ranks: int, local_processes: int, environment: MutableMapping[str, str]) -> int:
    """Limit the compute threads of this process, and of the processes that it starts; returns the limit.

    Args:
        threads: the limit; None: OMP_NUM_THREADS if a launcher has set it, otherwise this process's share of the cores.
        ranks: number of processes on all machines.
        local_processes: number of processes on this machine; LOCAL_WORLD_SIZE of a launcher goes before it.
        environment: where launchers have left their variables, and where OMP_NUM_THREADS is set.
    """
    if threads is None and environment.get("OMP_NUM_THREADS", "").isdecimal():
        threads = int(environment["OMP_NUM_THREADS"])
    if threads is None:
        local_processes = max(1, int(environment.get("LOCAL_WORLD_SIZE", local_processes)))
        threads = max(1, share_of(ranks, local_processes, environment))
    import torch  # here, not above: the environment of a profile is set before torch is imported

    environment["OMP_NUM_THREADS"] = str(threads)  # Lightning sets a number of its own where the variable is missing
    torch.set_num_threads(threads)
    return threads
