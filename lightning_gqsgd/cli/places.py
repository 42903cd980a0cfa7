"""The place of this process among the ranks of a launcher, for ``gqsgd doctor --nodes``, ``probe`` and ``bench``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.membership.door import in_brackets

#: Where launchers say rank and size: torchrun and accelerate, SLURM's srun, Open MPI, and MPICH with its kin. The
#: script of a SLURM job has SLURM_PROCID and SLURM_NTASKS, too; the number of a step's tasks is srun's alone.
TORCHRUN = "torchrun or its like"
LAUNCHERS = {
    TORCHRUN: ("RANK", "WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE"),
}
#: Where the launchers that do not set torchrun's variables say the number of a rank on its node, and that of its node's
#: ranks. SLURM lists the numbers of all nodes, as ``8(x2)``; unequal numbers are left out.
_ON_NODE = {
    "srun": ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun (MPICH)": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
#: torchrun's own port.
PORT = 29500
#: Under srun, the last four digits of the job's number are added to this port, as in Lightning: jobs may share a node.
SRUN_PORT = 15000

HOW = "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --no-python gqsgd doctor"


class Place(NamedTuple):
    """A rank, and where all ranks meet.

    Attributes:
        launcher: what has started the rank.
        rank: its number.
        size: number of ranks.
        address, port: where rank 0 waits for the others.
    """

    launcher: str
    rank: int
    size: int
    address: str
    port: int

    @property
    def meets_at(self) -> str:
        """Address and port, as one writes them."""
        return f"{in_brackets(self.address)}:{self.port}"


def launcher_of(environment: Mapping[str, str]) -> str | None:
    """Returns the launcher that has given this process a rank; None if none has."""
    return next((name for name, variables in LAUNCHERS.items() if environment.keys() >= {*variables}), None)


def torchruns_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that torchrun would have set for a rank of another launcher; none for torchrun's own ranks.

    Raises:
        ConfigError: see `place_of`.
    """
    launcher = launcher_of(environment)
    if launcher == TORCHRUN:
        return {}
    place = place_of(environment)
    made = {"RANK": place.rank, "WORLD_SIZE": place.size, "MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    on_node = zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE"), _ON_NODE[place.launcher], strict=True)
    found = {name: {*re.findall(r"(?<![x\d])\d+", environment.get(said, ""))} for name, said in on_node}
    alike = {name: numbers.pop() for name, numbers in found.items() if len(numbers) == 1}
    return {name: str(value) for name, value in made.items()} | alike


def place_of(environment: Mapping[str, str]) -> Place:
    """Returns the place of this process.

    Raises:
        ConfigError: no launcher has started this process, or too few ranks, or nothing says where the ranks meet.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        raise ConfigError(
            f"--nodes asks the ranks of a launcher, and none has started this process; type on each node e.g. {HOW} "
            "--nodes, or srun gqsgd doctor --nodes in an allocation"
        )
    rank, size = LAUNCHERS[launcher]
    numbers = {name: number_in(environment, name) for name in (rank, size)}
    if numbers[size] < 2:
        raise ConfigError(f"{size}={numbers[size]}: one rank has no other to send to; start at least two")
    return Place(launcher, numbers[rank], numbers[size], _address(environment, launcher), _port(environment, launcher))


def number_in(environment: Mapping[str, str], name: str) -> int:
    """Returns the number that a launcher has given to a variable."""
    if not environment[name].isdecimal():
        raise ConfigError(
            f"{name}={environment[name]!r} is not a number; start the ranks with torchrun, srun or mpirun"
        )
    return int(environment[name])


def _address(environment: Mapping[str, str], launcher: str) -> str:
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"]
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if launcher == "srun" and nodes:
        return first_node(nodes)
    raise ConfigError(
        f"{launcher} does not say where rank 0 is; set MASTER_ADDR to the address of its host on all ranks, e.g. "
        "export MASTER_ADDR=10.0.0.1 before srun, or mpirun -x MASTER_ADDR=10.0.0.1"
    )


def _port(environment: Mapping[str, str], launcher: str) -> int:
    job = environment.get("SLURM_JOB_ID", "")
    of_launcher = SRUN_PORT + int(job[-4:]) if launcher == "srun" and job.isdecimal() else PORT
    port = environment.get("MASTER_PORT") or str(of_launcher)
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; take a number from 1 to 65535, e.g. {PORT}")
    return int(port)


def first_node(nodes: str) -> str:
    """Returns the first name of SLURM's list of nodes, e.g. ``gpu03`` of ``gpu[03-07,12],login1``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    if found is None:
        raise ConfigError(f"SLURM_JOB_NODELIST={nodes!r} is not a list of nodes; set MASTER_ADDR to the host of rank 0")
    return "".join(part or "" for part in found.groups())
