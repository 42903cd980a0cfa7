"""The command ``gqsgd doctor``: checks that this machine has what the package needs, with a line for each."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from lightning_gqsgd import version
from lightning_gqsgd.errors import ConfigError, counted
from lightning_gqsgd.frameworks.versions import check_version
from lightning_gqsgd.kernels import triton_version
from lightning_gqsgd.wire.build import this_build
from lightning_gqsgd.wire.processors import processors

#: The answer where kernels work.
_RIGHT = "compile, run and give the readable kernels' numbers"


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        question: the part that was checked, e.g. "GPU kernels".
        answer: the result in words.
        is_bad: whether training cannot work like this.
    """

    question: str
    answer: str
    is_bad: bool = False


def findings() -> list[Finding]:
    """Returns the results of all checks, in the order in which they are printed."""
    questions: dict[str, Callable[[], str]] = {
        "versions": _versions,
        "devices": _devices,
        "backends": _backends,
        "CPU kernels": _cpu_kernels,
        "GPU kernels": _gpu_kernels,
        "Lightning": lambda: _strategy("lightning.pytorch.strategies"),
        "pytorch_lightning": lambda: _strategy("pytorch_lightning.strategies"),
        "Accelerate": lambda: _framework("accelerate"),
        "transformers": lambda: _framework("transformers"),
        "netlab": _iproute2,
    }
    answers = []
    for question, ask in questions.items():
        try:
            answers.append(Finding(question, ask()))
        except ConfigError as error:
            answers.append(Finding(question, str(error), is_bad=True))
        except Exception as error:  # the point of this command is to say what fails
            answers.append(Finding(question, f"{type(error).__name__}: {error}", is_bad=True))
    return answers


def lines(answers: list[Finding]) -> list[str]:
    """Returns a line for each result."""
    width = max(len(finding.question) for finding in answers)
    return [
        f"{'FAIL' if finding.is_bad else 'ok  '}  {finding.question:{width}}  {finding.answer}" for finding in answers
    ]


def _versions() -> str:
    # There may be another copy of the package, which the metadata is of. Bugs are reported of what was imported.
    own = f"lightning-gqsgd {this_build()} in {Path(version.__file__).parent}"
    others = [f"{name} {_version(name)}" for name in ("torch", "numba", "numpy")]
    return ", ".join([f"Python {platform.python_version()}", *others, own])


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _framework(package: str) -> str:
    """Returns the version of a framework, and whether it is too old, which matters to those who use it."""
    found = _version(package)
    try:
        if found != "not installed":
            check_version(package)
    except ImportError as error:
        return f"{found}; {error}"
    return found


def _devices() -> str:
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    threads = torch.get_num_threads()
    usable = processors()
    # torch does not know the limits of containers (docker --cpus), and its threads then take turns.
    too_many = f" for {counted(usable, 'processor')}: set OMP_NUM_THREADS={usable}" if threads > usable else ""
    return ", ".join([f"CPU ({platform.machine()}, {threads} threads{too_many})", *names])


def _backends() -> str:
    if not dist.is_available():
        raise ConfigError("torch was built without torch.distributed; install another build")
    names = [name for name, has in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if has]
    wanted = {"gloo", "nccl"} if torch.cuda.is_available() else {"gloo"}
    if not wanted & set(names):
        raise ConfigError(f"neither Gloo nor NCCL, which the package needs; torch has {names}")
    return ", ".join(names)


def _cpu_kernels() -> str:
    from lightning_gqsgd.kernels.cpu.cache import REMEDY, Compilation, watching, writable_folder

    compilations: list[Compilation] = []
    with watching(compilations.append):
        _check_kernels(torch.device("cpu"))
    folder = writable_folder()
    reasons = ["no folder to keep them in is writable"] if folder is None else []
    reasons += [compilation.reason for compilation in compilations if compilation.folder is None]  # e.g. a full disk
    if reasons:
        return f"{_RIGHT}; every process compiles them again, because {reasons[0]}: {REMEDY}"
    return f"{_RIGHT}; kept in {folder}"


def _gpu_kernels() -> str:
    triton = triton_version() or "not installed"
    if not torch.cuda.is_available():
        # Nodes with GPUs often have the image of this one.
        compiler = "" if _c_compiler() else ", which needs a C compiler on nodes with GPUs: install gcc, or set CC"
        return f"no GPU to run them on; Triton {triton}{compiler}"
    _check_kernels(torch.device("cuda"))
    return f"{_RIGHT}; Triton {triton}"


def _c_compiler() -> str | None:
    """Returns the C compiler that Triton would use; None if there is none."""
    return os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")


def _check_kernels(device: torch.device) -> None:
    """Compile and check the kernels of the default configuration."""
    from lightning_gqsgd.config import GQSGDConfig
    from lightning_gqsgd.config.resolving import resolve
    from lightning_gqsgd.wire.compiling import compile_kernels

    compile_kernels(resolve(GQSGDConfig(), 2), torch.float32, device, 2)


def _strategy(module: str) -> str:
    """Check that a Lightning package knows the strategy "gqsgd"."""
    package = module.partition(".")[0]
    name = "gqsgd"
    if _version(package) == "not installed":
        return "not installed"
    registry = importlib.import_module(module).StrategyRegistry
    if name not in registry.available_strategies():
        raise ConfigError(
            f'{_version(package)} does not know strategy="{name}"; import lightning_gqsgd before the Trainer is made'
        )
    return f'{_version(package)} knows strategy="{name}"'


def _iproute2() -> str:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if sys.platform != "linux":
        return "slow links on one machine need Linux"
    return f"{' and '.join(missing)} missing: apt-get install iproute2" if missing else "ip and tc are there"
