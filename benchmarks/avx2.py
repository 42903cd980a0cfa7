"""What kernels, buckets and steps take on a processor that has AVX2 and no AVX-512, beside all that this processor has.

    python -m benchmarks.avx2 --save

Kernels are compiled for a processor without AVX-512, and torch takes its kernels for AVX2: Numba and torch are told so
by variables of the environment. Each benchmark runs by its own command under both. Clock rate, caches and memory stay
those of this processor. The benchmark needs Linux, root and iproute2, see `netlab`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from llvmlite import binding

from benchmarks.report import Report, command_line, present

#: Instruction sets that a processor of the years of AVX2 lacks.
_NEWER = re.compile(r"avx512|avx10|avxvnni|avxifma|avxne|amx|gfni|vaes|vpclmulqdq")
#: Runs a benchmark whose results go to another folder.
_RUN = (
    "import runpy, sys; from pathlib import Path; from benchmarks import report; "
    "report.RESULTS = Path(sys.argv[1]); sys.argv = sys.argv[2:]; "
    # Its workers start by the name of the main module.
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)
#: Compiles the kernels of companded codes anew, whatever is kept on disk.
_COMPILE = (
    "import sys, torch; from pathlib import Path; "
    "from lightning_gqsgd.research.simulation import average; from lightning_gqsgd.kernels.cpu import cache; "
    "cache.folders = lambda: [Path(sys.argv[1])]; average([torch.ones(4096)] * 2, bits=4)"
)


@dataclass(frozen=True)
class Part:
    """A benchmark, and what of it is compared.

    Attributes:
        what: what is measured, in words.
        module: of the benchmark.
        arguments: of its command line.
        figure: the column that is compared.
    """

    what: str
    module: str
    arguments: str
    figure: str


_KERNELS = ("encoding and decoding, over a copy", "benchmarks.kernels")
PARTS = (
    Part(*_KERNELS, "--codec linear companded --bits 8 4 --block-size 128 --rounds 25", "(encode + decode) / copy_"),
    Part(*_KERNELS, "--codec eden --bits 2 --rounds 25", "(encode + decode) / copy_"),
    Part(
        "25 MiB between two hosts at 1 Gbit/s, times faster than fp32",
        "benchmarks.reducers",
        "--hosts 2 --rate 1gbit --reducer two_shot --bits 8 4 2 --rounds 8",
        "fp32 / time",
    ),
    Part(
        "a step of dense layers in two processes, times faster than ddp",
        "benchmarks.training",
        "--hosts 1 --ranks-per-host 2 --rate none --case ddp gqsgd gqsgd_4bit --rounds 12",
        "ddp / step",
    ),
)


def without_avx512(features: str) -> dict[str, str]:
    """Returns the variables of the environment under which Numba and torch take nothing newer than AVX2.

    Args:
        features: the processor's instruction sets in LLVM's spelling, e.g. ``"+avx2,+avx512f"``.
    """
    kept = [("-" + name[1:]) if _NEWER.match(name[1:]) else name for name in features.split(",")]
    return {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ",".join(kept), "ATEN_CPU_CAPABILITY": "avx2"}


def measured(part: Part, variables: dict[str, str]) -> dict[str, float]:
    """Returns the figure of each case of a benchmark, by the case's name."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _RUN, folder, part.module, *part.arguments.split(), "--save"]
        subprocess.run(command, env={**os.environ, **variables}, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).glob("*.json")
        saved = json.loads(file.read_text())
    column = saved["columns"].index(part.figure)
    return {row[0]: row[column] for row in saved["rows"] if row[column] is not None}


def wide_registers(variables: dict[str, str]) -> int:
    """Returns how many lines of the kernels' machine code name a register of AVX-512."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **variables, "NUMBA_DUMP_ASSEMBLY": "1"}
        command = [sys.executable, "-c", _COMPILE, folder]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return sum("zmm" in line for line in done.stdout.splitlines())


def measure(options: argparse.Namespace) -> Report:
    """Run all parts under both."""
    restricted = without_avx512(binding.get_host_cpu_features().flatten())
    wide = wide_registers(restricted)
    usual = wide_registers({})
    if wide or not usual:
        raise SystemExit(
            f"{wide} lines of the kernels' code have a zmm register under AVX2, and {usual} without limits"
        )
    report = Report(
        "avx2",
        "AVX2 alone, beside all instructions of a processor with AVX-512",
        {"what": "", "case": "", "all instructions": ".2f", "AVX2 alone": ".2f"},
        notes=(
            "Medians over the rounds of each benchmark's own command: "
            + "; ".join(f"`python -m {part.module} {part.arguments}`" for part in PARTS)
            + ".",
            f"Under AVX2, Numba and torch are told {_settings(restricted)}, and Numba leaves out what is newer. "
            f"Of the machine code of companded kernels, {usual:,} lines name a register of AVX-512 with all "
            "instructions, and none under AVX2.",
        ),
    )
    for part in PARTS:
        with_all = measured(part, {})
        with_avx2 = measured(part, restricted)
        for case, figure in with_all.items():
            if any(row[:2] == [part.what, case] for row in report.rows):  # the cast, beside kernels of several widths
                continue
            report.rows.append([part.what, case, figure, with_avx2[case]])
    return report


def _settings(variables: dict[str, str]) -> str:
    return " and ".join(f"`{name}={variables[name]}`" for name in ("NUMBA_CPU_NAME", "ATEN_CPU_CAPABILITY"))


if __name__ == "__main__":
    present(command_line(__doc__), measure)
