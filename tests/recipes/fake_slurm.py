"""A SLURM of one node, for tests: `sbatch` runs the script in the background, `srun` every task of it."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

JOB_ID = "4711"
#: Folder of the running job: its script, its output.
FOLDER = "FAKE_SLURM_FOLDER"


def install(folder: Path) -> dict[str, str]:
    """Put the commands into ``folder``; what an environment needs to find them."""
    for name in ("sbatch", "srun", "sacct"):
        command = folder / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
        command.chmod(command.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", FOLDER: str(folder)}


def sbatch(script: str) -> None:
    folder = Path(os.environ[FOLDER])
    text = Path(script).read_text()
    (folder / "script.sh").write_text(text)
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    environment = {
        "SLURM_JOB_ID": JOB_ID,
        "SLURM_JOB_NAME": options["job-name"],
        "SLURM_NNODES": options["nodes"],
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": str(int(options["nodes"]) * int(options["ntasks-per-node"])),
        "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_PROCID": "0",
    }
    with open(folder / "job.log", "w") as log:
        subprocess.Popen(
            ["bash", script],  # noqa: S607
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(f"Submitted batch job {JOB_ID}")


def srun(*arguments: str) -> None:
    unbuffered, output, pattern, *command = arguments
    assert (unbuffered, output) == ("--unbuffered", "--output")
    processes = []
    for rank in range(int(os.environ["SLURM_NTASKS"])):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        place |= {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": os.environ["SLURM_NTASKS"]}
        with open(pattern.replace("%j", JOB_ID).replace("%t", str(rank)), "w") as log:
            processes.append(
                subprocess.Popen(command, env={**os.environ, **place}, stdout=log, stderr=subprocess.STDOUT)
            )
    sys.exit(max(process.wait() for process in processes))


def sacct(*arguments: str) -> None:
    print(f"JobID|State|NodeList\n{JOB_ID}|RUNNING|localhost")


if __name__ == "__main__":
    {"sbatch": sbatch, "srun": srun, "sacct": sacct}[sys.argv[1]](*sys.argv[2:])
