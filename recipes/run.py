"""One training run: ``python recipes/run.py +exp=quickstart strategy=gqsgd logger=wandb``."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `recipes` is importable from every folder

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gqsgd.config import ConfigError
from netlab.lab import NetLabError
from recipes.errors import RecipeError
from recipes.launch.environment import profile_environment
from recipes.launch.hardware import MULTI_NODE, NETLAB, SLURM, HardwareError, check_devices, check_profile
from recipes.launch.hosts import run_on_hosts
from recipes.launch.processes import (
    LaunchError,
    check_launch,
    external_rank,
    hydra_arguments,
    local_processes,
    torchrun_needed,
)
from recipes.launch.slurm import prepare_submission
from recipes.strategies.choices import CONF, check_strategies, register_presets


def _check(cfg: DictConfig) -> None:
    """Everything that can be wrong with hardware and launch, before data are prepared or processes started."""
    check_profile(cfg)
    name, (nodes, devices) = cfg.hardware.name, _places(cfg)
    by_hand = external_rank(os.environ) is None
    if name == SLURM and by_hand and (nodes * devices > 1 or "SLURM_JOB_ID" not in os.environ):
        raise HardwareError(
            f"hardware=slurm submits a job with -m: python {shlex.join([sys.argv[0], '-m', *sys.argv[1:]])}; "
            "in an allocation of your own, put srun before the same command without -m"
        )
    check_devices(cfg)
    # With NODE_RANK, users start Lightning on each node themselves, or Lightning has started this process.
    for_lightning = name != MULTI_NODE and (nodes == 1 or "NODE_RANK" in os.environ)
    if by_hand and name != NETLAB and not for_lightning:
        raise torchrun_needed(name, nodes, devices, cfg.trainer.accelerator, sys.argv)
    check_launch(nodes, devices, os.environ)
    _refuse_sweeps_of_processes(name, nodes * devices)


def _refuse_sweeps_of_processes(name: str, processes: int) -> None:
    hydra_config = HydraConfig.get()
    submitted = name == SLURM and str(hydra_config.launcher._target_).endswith(".SlurmLauncher")
    if hydra_config.mode == RunMode.MULTIRUN and processes > 1 and not submitted:
        raise LaunchError(
            "-m / --multirun cannot be used with several processes: every process would run the whole sweep. "
            "Take recipes/compare.py, which starts a fresh run for every combination"
        )


def _places(cfg: DictConfig) -> tuple[int, int]:
    """Nodes, and processes on each."""
    return cfg.trainer.num_nodes, local_processes(cfg.trainer.accelerator, cfg.trainer.devices)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float:
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        # Before anything asks for GPUs: CUDA reads its variables then.
        with profile_environment(cfg.hardware.env, os.environ):
            _check(cfg)
            if cfg.hardware.name == NETLAB and external_rank(os.environ) is None:
                hosts, ranks = _places(cfg)
                sys.exit(run_on_hosts(hosts, str(cfg.hardware.rate), ranks, sys.argv[1:], folder))
            # Here, not above: Lightning takes seconds to import, and what is refused or only starts others needs none.
            from recipes.training.train import train

            return train(cfg, folder)
    except (RecipeError, NetLabError, ConfigError) as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        sys.exit(f"{type(error).__name__}: {error}")  # a traceback would hide it


def start() -> None:
    """Train as the command line of this process says.

    Raises:
        SystemExit: the command line asks for something that cannot be; its code is the message, in one line.
    """
    try:
        check_strategies(sys.argv[1:])
        prepare_submission(sys.argv[1:], os.environ)
    except RecipeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    register_presets()
    sys.argv += hydra_arguments(sys.argv[1:], os.environ)
    main()


if __name__ == "__main__":
    start()
