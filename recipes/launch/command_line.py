"""The command line of `run.py`: what is checked before anything heavy is imported, and then the training."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.wire.processors import processors
from netlab.lab import NetLabError
from recipes.configuration import check_configuration, for_hydra
from recipes.data.sizes import check_known_samples
from recipes.errors import DivergedError, RecipeError
from recipes.folders import check_writable, claimed
from recipes.launch.environment import profile_environment
from recipes.launch.hardware import MULTI_NODE, NETLAB, SLURM, check_devices
from recipes.launch.processes import check_launch, external_rank, hydra_arguments, local_processes, torchrun_needed
from recipes.launch.slurm import prepare_submission
from recipes.launch.sweeps import check_sweeper, is_search, run_job, run_on_hosts
from recipes.opening import INTERRUPTED, leads, say, speaks
from recipes.overrides import composed, first_combination, parse
from recipes.own_folders import is_search_path, with_search_path
from recipes.strategies.choices import (
    CONF,
    check_settings,
    check_strategies,
    register_presets,
)
from recipes.training.checkpoints import (
    FullDiskError,
    find_checkpoint,
    finished_message,
    full_disk_in_one_line,
    goes_on_with,
)
from recipes.training.continuing import check_continued, uncompared
from recipes.unread import check_read

#: Exit code of a command line that asks for something that cannot be.
REFUSED = 2
#: Exit code of a training whose result is of no use, or which found no room for its files.
FAILED = 1
MULTIRUN = ("-m", "--multirun")


def run() -> None:
    """Check the command line of this process, and train as it says.

    Raises:
        SystemExit: with code `REFUSED` or `FAILED` after one line on standard error, or `INTERRUPTED`.
        KeyboardInterrupt: somebody has interrupted what comes before the training.
    """
    with refusals_in_one_line():
        sys.argv[1:] = arguments = with_search_path(sys.argv[1:])
        check_strategies(arguments)
        if f"hardware={SLURM}" in arguments and {*MULTIRUN} & set(arguments):
            prepare_submission(os.environ)
        register_presets()
        sys.argv += hydra_arguments(arguments, os.environ)
        finished = None if _is_for_hydra(arguments) else examine(sys.argv[1:])
    if finished:
        say(finished)
        return
    sys.argv[1:] = for_hydra(sys.argv[1:])
    main()


@contextmanager
def refusals_in_one_line() -> Iterator[None]:
    """End the process with one line on standard error where what is inside ``with`` refuses something.

    Every process of a run finds what is wrong with the run. One process of each machine says it: the first one, as a
    launcher may show the output of a single machine.

    HYDRA_FULL_ERROR=1 lets the errors through, with their tracebacks.
    """
    try:
        yield
    except (DivergedError, FullDiskError) as error:
        # The command line was right: this is a failure, and no refusal.
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(FAILED)
    except (RecipeError, NetLabError, ConfigError) as error:
        if os.environ.get("HYDRA_FULL_ERROR"):
            raise
        if leads(os.environ) or getattr(error, "of_one_process", False):
            # A traceback would hide the line. One call writes all of it, so that no other process writes inside.
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(REFUSED)


def examine(arguments: Sequence[str]) -> str | None:
    """Check everything that can be checked without torch.

    Returns:
        What is to be said instead of a training, if there is nothing to be trained; None before a training.

    Raises:
        RecipeError, NetLabError: the command line asks for something that cannot be.
    """
    multirun = bool({*MULTIRUN} & set(arguments))
    overrides = parse([argument for argument in arguments if argument not in MULTIRUN])
    swept = [override for override in overrides if override.is_sweep_override()]
    if swept and not multirun:
        raise RecipeError(
            f"{swept[0].input_line}: a comma list makes several runs; take python recipes/compare.py, or quote a value "
            f"that has commas"
        )
    if multirun:
        check_sweeper(overrides)
    if (
        multirun
        and not swept
        and not is_search(overrides)
        and not any(override.input_line == f"hardware={SLURM}" for override in overrides)
    ):
        raise RecipeError(
            "-m makes one run of each value of a comma list, and there is no comma list; leave -m out, or write e.g. "
            "-m seed=0,1 trainer.devices=1"
        )
    mode = ("hydra.mode=MULTIRUN",) if multirun else ()
    cfg = composed([*first_combination(overrides), *mode], with_hydra=True)
    with profile_environment(cfg.hardware.env, os.environ):
        check(cfg, cfg.hydra)
    checkpoint = None if multirun else find_checkpoint(cfg, Path(cfg.hydra.run.dir))
    if checkpoint:
        check_continued(cfg, checkpoint)
    finished = finished_message(cfg, checkpoint) if checkpoint else None
    if not finished:
        kind = "sweep" if multirun else "run"
        check_writable(f"hydra.{kind}.dir", cfg.hydra[kind].dir)
        if not multirun:
            _check_unclaimed(Path(cfg.hydra.run.dir))
        _say_what_comes(cfg, checkpoint)
    return finished


def _check_unclaimed(folder: Path) -> None:
    """Refuse the folder of a run that is under way, before Hydra writes to it."""
    if folder.is_dir() and speaks(os.environ):
        with claimed("hydra.run.dir", folder):
            pass


def check(cfg: DictConfig, hydra_config: Any) -> None:
    """Check numbers, arguments, hardware and launch, before data are prepared or processes started.

    Raises:
        RecipeError, NetLabError: the run cannot be made as asked.
    """
    check_configuration(cfg, os.environ)
    name, (nodes, devices) = cfg.hardware.name, places(cfg)
    by_hand = external_rank(os.environ) is None
    if name == SLURM and by_hand and (nodes * devices > 1 or "SLURM_JOB_ID" not in os.environ):
        submitted = str(hydra_config.launcher._target_).endswith(".SlurmLauncher") and _is_multirun(hydra_config)
        if not submitted:
            raise RecipeError(
                f"hardware=slurm submits a job with -m: python {shlex.join([sys.argv[0], '-m', *sys.argv[1:]])}; "
                "in an allocation of your own, put srun before the same command without -m"
            )
        return  # the machine that runs the job is another one
    check_devices(cfg)
    check_known_samples(cfg.data, nodes * devices)
    # With NODE_RANK, users start Lightning on each node themselves, or Lightning has started this process.
    for_lightning = name != MULTI_NODE and (nodes == 1 or "NODE_RANK" in os.environ)
    if by_hand and name != NETLAB and not for_lightning:
        raise torchrun_needed(name, nodes, devices, cfg.trainer.accelerator, sys.argv)
    check_launch(nodes, devices, os.environ)
    _refuse_sweeps_of_processes(name, nodes * devices, hydra_config)


def places(cfg: DictConfig) -> tuple[int, int]:
    """Nodes, and processes on each."""
    return cfg.trainer.num_nodes, local_processes(cfg.trainer.accelerator, cfg.trainer.devices)


def _refuse_sweeps_of_processes(name: str, processes: int, hydra_config: Any) -> None:
    submitted = name == SLURM and str(hydra_config.launcher._target_).endswith(".SlurmLauncher")
    if _is_multirun(hydra_config) and processes > 1 and not submitted and external_rank(os.environ) is not None:
        raise RecipeError(
            "-m / --multirun cannot be used below a launcher: each of its processes would run the whole sweep. "
            "Take recipes/compare.py or -m without the launcher, which start fresh processes for every combination"
        )


def _starts_processes(cfg: DictConfig, hydra_config: Any) -> bool:
    """Whether this is a job of a sweep on this machine, whose training has processes of its own.

    Lightning would start the other processes with the command line of the whole sweep.
    """
    nodes, devices = places(cfg)
    submitted = cfg.hardware.name == SLURM
    return _is_multirun(hydra_config) and not submitted and (nodes * devices > 1 or cfg.hardware.name == NETLAB)


def _is_multirun(hydra_config: Any) -> bool:
    return str(hydra_config.mode).rpartition(".")[2] == RunMode.MULTIRUN.name


def _is_for_hydra(arguments: Sequence[str]) -> bool:
    """Whether a command line has an option of Hydra, such as ``--help`` or ``--cfg``, which Hydra answers itself."""
    from hydra._internal.utils import get_args_parser

    known = {name for action in get_args_parser()._actions for name in action.option_strings} - {*MULTIRUN}
    return any(argument.partition("=")[0] in known for argument in arguments)


def _say_what_comes(cfg: DictConfig, checkpoint: str | None) -> None:
    nodes, devices = places(cfg)
    processes = counted(nodes * devices, "process", "processes")
    where = f"{counted(nodes, 'node')}, " if nodes > 1 else ""
    say(
        f"{cfg.title} under {cfg.strategy.name}: {processes}, {where}hardware={cfg.hardware.name}, "
        f"{counted(processors(), 'core')} here; loading torch and Lightning ..."
    )
    if checkpoint:
        say(f"goes on from {checkpoint}")
        warning = uncompared(checkpoint)
        if warning:
            say(warning)


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> float:
    """Train as a configuration says, and return the final value of the task's metric."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        # The variables come before anything asks for GPUs: CUDA reads its variables then.
        with refusals_in_one_line(), profile_environment(cfg.hardware.env, os.environ):
            check(cfg, HydraConfig.get())
            if _starts_processes(cfg, HydraConfig.get()):
                code, value = run_job(_arguments_of_job(HydraConfig.get()), folder)
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                if code:
                    sys.exit(code)
                return value
            if cfg.hardware.name == NETLAB and external_rank(os.environ) is None:
                hosts, ranks = places(cfg)
                code = run_on_hosts(hosts, str(cfg.hardware.rate), ranks, sys.argv[1:], folder)
                if code == INTERRUPTED:
                    raise KeyboardInterrupt
                sys.exit(code)
            check_read(cfg)
            check_settings(cfg.strategy)
            # Here, not above: Lightning takes seconds to import, and what is refused or only starts others needs none.
            from recipes.training.train import train

            # Rank 0 alone writes; the other ranks of an outside launcher have no folder.
            claim = claimed("hydra.run.dir", folder) if speaks(os.environ) else nullcontext()
            with claim, full_disk_in_one_line(folder):
                return train(cfg, folder)
    except KeyboardInterrupt:
        _say_how_to_go_on(cfg, HydraConfig.get(), folder)
        sys.exit(INTERRUPTED)


def _arguments_of_job(hydra_config: Any) -> list[str]:
    """The command line of a job of a sweep, with the user's own folders, as it would be typed for this job alone."""
    overrides = hydra_config.overrides
    return [*(word for word in overrides.hydra if is_search_path(word)), *overrides.task]


def _say_how_to_go_on(cfg: DictConfig, hydra_config: Any, folder: Path) -> None:
    """Say how an interrupted run goes on. A sweep's command would start all of its jobs from one checkpoint."""
    if not _is_multirun(hydra_config):
        say(goes_on_with(folder, sys.argv))
        return
    if not _starts_processes(cfg, hydra_config):  # else a process of the job's own has said it
        say(goes_on_with(folder, [sys.argv[0], *_arguments_of_job(hydra_config)]))
    say(f"the sweep ends with job {hydra_config.job.num}; jobs that follow have not run")
