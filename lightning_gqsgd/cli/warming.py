"""The command ``gqsgd warmup``: compiles kernels for the CPU ahead of time, e.g. while an image is built."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import product
from time import perf_counter

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.resolving import resolve
from lightning_gqsgd.errors import check_one_of, counted
from lightning_gqsgd.kernels.cpu.cache import REMEDY, Compilation, folders, watching, writable_folder
from lightning_gqsgd.kernels.wire import DTYPES_BY_NAME
from lightning_gqsgd.presets import make_config
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.wire.compiling import compile_kernels


class NotKeptError(Exception):
    """Compiled kernels cannot be kept."""


def warm(presets: Sequence[str], dtypes: Sequence[str], ranks: Sequence[int]) -> str:
    """Compile the CPU kernels of presets into the cache, with a progress bar on standard error.

    Args:
        presets: names of presets.
        dtypes: names of gradient dtypes.
        ranks: numbers of ranks. The reducer that a preset chooses depends on this number.

    Returns:
        A line that names the folder and the time.

    Raises:
        ConfigError: an unknown preset or dtype, or a preset that cannot work at a number of ranks.
        NotKeptError: no folder is writable, or the folder has no room.
    """
    jobs = _jobs(presets, dtypes, ranks)
    folder = writable_folder()
    if folder is None:
        raise NotKeptError(f"none of the folders {', '.join(map(str, folders()))} is writable: {REMEDY}")
    start = perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, watching(_refuse_unkept):
        task = progress.add_task("kernels", total=len(jobs))
        for name, config, dtype, count in jobs:
            progress.update(task, description=f"{name}, {dtype}")
            compile_kernels(config, DTYPES_BY_NAME[dtype], torch.device("cpu"), count)
            progress.advance(task)
    return f"CPU kernels of {counted(len(presets), 'preset')} are in {folder} ({perf_counter() - start:.1f} s)"


def _refuse_unkept(compilation: Compilation) -> None:
    """End with the first kernel that is not kept: all others would be compiled in vain."""
    if compilation.folder is None:
        raise NotKeptError(f"{compilation.reason}: {REMEDY}")


def _jobs(
    presets: Sequence[str], dtypes: Sequence[str], ranks: Sequence[int]
) -> list[tuple[str, GQSGDConfig, str, int]]:
    """Returns the preset, the configuration, the dtype and the number of ranks of each compilation.

    Presets that need the same kernels have one compilation.
    """
    for dtype in dtypes:
        check_one_of("--dtype", dtype, DTYPES_BY_NAME)
    jobs: dict[tuple[GQSGDConfig, str], tuple[str, GQSGDConfig, str, int]] = {}
    for name in presets:
        for count in ranks:
            with warnings.catch_warnings():  # nothing is trained here
                warnings.simplefilter("ignore", StabilityWarning)
                asked = make_config(name)
                several = asked.candidates().values() if asked.chooses_bits else [asked]
                configs = [resolve(config, count) for config in several]
            for config, dtype in product(configs, dtypes):
                # Kernels for the CPU do not depend on the number of ranks, beyond the choice of the reducer.
                jobs.setdefault((config, dtype), (name, config, dtype, count))
    return list(jobs.values())
