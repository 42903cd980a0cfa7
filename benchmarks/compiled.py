"""Shows what kernels for GPUs are compiled to, and that they compile with several versions of Triton; without a GPU.

    python -m benchmarks.compiled --save
    python -m benchmarks.compiled --triton 3.4.0 3.5.1 3.6.0 3.7.0 --arch 80 90 100
    python -m benchmarks.compiled --triton installed --arch gfx90a gfx942 gfx1100

The first writes the table. The others compile the kernels with each version for each GPU, of NVIDIA or of AMD, and fail
if one does not compile. Versions are installed into a folder of their own by ``uv pip install --target`` when they are
asked for first, and are imported in place of the one that torch brought.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Where versions of Triton are installed.
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lightning_gqsgd" / "triton"
#: The version that came with torch.
INSTALLED = "installed"

COLUMNS = {
    "configuration": "",
    "kernel": "",
    "tiles": "",
    "registers": ".0f",
    "spilled bytes": ".0f",
    "instructions/coordinate": ".1f",
    "16-byte loads": ".0f",
    "other loads": ".0f",
    "16-byte stores": ".0f",
}
#: What `benchmarks.compiling` calls them.
KEYS = ("case", "kernel", "tiles", "registers", "spills", "instructions", "wide_loads", "narrow_loads", "wide_stores")


def folder_of(version: str) -> Path:
    """Returns the folder that has a version of Triton, which is installed there if it is not."""
    folder = FOLDER / version
    if not (folder / "triton").exists():
        command = ["uv", "pip", "install", "--quiet", "--no-deps", "--python", sys.executable, "--target", str(folder)]
        subprocess.run([*command, f"triton=={version}"], check=True)
    return folder


def compile_with(version: str, *arguments: str) -> dict[str, Any]:
    """Returns what `benchmarks.compiling` prints with a version of Triton, or with the installed one."""
    path = [str(ROOT)] if version == INSTALLED else [str(folder_of(version)), str(ROOT)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "benchmarks.compiling", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"triton {version}: {done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def matrix(versions: Sequence[str], arguments: Sequence[str]) -> int:
    """Compile with each version, print a line for each, and return how many kernels did not compile."""
    failures = 0
    for version in versions:
        begun = time.perf_counter()
        facts = compile_with(version, *arguments)
        taken = time.perf_counter() - begun
        print(f"triton {facts['triton']}: {facts['compiled']} kernels compiled in {taken:.0f} s", flush=True)
        for name, text in facts["failed"].items():
            print(f"triton {facts['triton']}: {name} does not compile: {text}", flush=True)
        failures += len(facts["failed"])
    return failures


def table(found: Sequence[dict[str, Any]]) -> list[Sequence[Any]]:
    """Returns the rows of the table."""
    return [[one[key] for key in KEYS] for one in found]


def save(found: Sequence[dict[str, Any]], version: str) -> None:
    """Write ``benchmarks/results/compiled.md`` and ``.json``."""
    from benchmarks.report import Report

    report = Report(
        "compiled",
        "What the kernels for GPUs are compiled to, for sm_90",
        COLUMNS,
        notes=(
            "Counted in the machine code. instructions/coordinate: of a thread that skips none, "
            "without the routines for rare numbers, over the coordinates of the thread; for *reduce* of 8 messages, "
            "per coordinate and message. Aligned tiles have blocks of full length that begin at multiples of 16 bytes; "
            "full ones begin elsewhere; ragged ones have the ends of parameters and what travels uncompressed.",
        ),
        rows=table(found),
        raw={"triton": version, "found": list(found)},
        machine=f"Triton {version}, no GPU",
    )
    report.show()
    report.save("python -m benchmarks.compiled")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__.split("\n")[0])
    parser.add_argument("--triton", nargs="+", metavar="VERSION", help=f"versions to compile with, or {INSTALLED!r}")
    parser.add_argument("--kernels", choices=["default", "few", "refused"], default="few")
    parser.add_argument(
        "--arch", nargs="+", default=["80", "90", "100"], help="compute capabilities, or GPUs of AMD, e.g. gfx942"
    )
    parser.add_argument(
        "--front", action="store_true", help="stop at Triton's intermediate code, in a tenth of the time"
    )
    parser.add_argument("--save", action="store_true", help="write the table")
    options = parser.parse_args()
    if options.triton:
        front = ["--front"] if options.front else []
        # A process compiles for one maker, as a PyTorch is built for one.
        of_amd = [arch for arch in options.arch if arch.startswith("gfx")]
        of_nvidia = [arch for arch in options.arch if arch not in of_amd]
        failures = 0
        for some in filter(None, (of_nvidia, of_amd)):
            failures += matrix(options.triton, ["--kernels", options.kernels, "--arch", *some, *front])
        sys.exit(1 if failures else 0)
    facts = compile_with(INSTALLED, "--kernels", "table", "--counts")
    if options.save:
        save(facts["found"], facts["triton"])
    else:
        print(json.dumps(table(facts["found"]), indent=1))


if __name__ == "__main__":
    main()
