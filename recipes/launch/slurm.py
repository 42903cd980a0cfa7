"""Submitting a run to SLURM: what the machine and the environment need for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import MutableMapping

from recipes.errors import RecipeError, check_installed
from recipes.launch.processes import ROOT

PLUGIN = "hydra_plugins.hydra_submitit_launcher"


def prepare_submission(environment: MutableMapping[str, str]) -> None:
    """Check what ``-m hardware=slurm`` needs, and make `recipes` importable in the job; before Hydra starts.

    Raises:
        RecipeError: the extra ``slurm`` or SLURM's commands are missing.
    """
    check_installed(PLUGIN, "hardware=slurm", "hydra-submitit-launcher", "slurm")
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if missing:
        raise RecipeError(f"{' and '.join(missing)} not found on PATH: submit from a machine of the SLURM cluster")
    # The job unpickles functions of this repository in a process that does not start from run.py.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
