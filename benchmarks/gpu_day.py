"""All that is to be measured where there is a GPU, by one command, in parts that each have an end.

    python -m benchmarks.gpu_day
    python -m benchmarks.gpu_day --part kernels training
    python -m benchmarks.gpu_day --dry

Each part runs commands of this repository, under a limit of time. What it prints goes to ``NAME.log`` in a folder with
the name of the device, tables and pictures of the commands to benchmarks/results, and ``page.md`` says how each part
ended. A part that ended well is left out when the command runs again, unless ``--part`` names it.

Nothing is installed, and nothing is fetched: torch, Triton, Numba, pytest, pytest-xdist, pytest-timeout, hypothesis,
scikit-learn, torchvision, Lightning and matplotlib have to be there. The part *training* needs root and iproute2. The
part *language_model* keeps each training that is over, and goes on with the next one when it runs again.

``--dry`` runs the same commands on a machine without a GPU, with the smallest sizes: a processor stands in for the
card, and no table is written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import slug

PROGRAM = "python -m benchmarks.gpu_day"
#: Seconds that a part has for its last words after its time is over, before it is killed.
GRACE_S = 15.0


@dataclass(frozen=True)
class Part:
    """Something that is measured or tested.

    Attributes:
        on_card: arguments of Python, where there is a GPU; ``{folder}`` stands for that of the logs.
        dry: arguments of Python, where there is none.
        seconds: limit.
    """

    on_card: str
    dry: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        code: exit code of its command; None if its time was over first.
        seconds: what it took.
        last: the last lines that it printed.
    """

    code: int | None
    seconds: float
    last: list[str]


PARTS = {
    "training": Part(
        on_card="-m benchmarks.training --device cuda --model resnet50 --batch-size 64 --hosts 2 4 "
        "--rate 1gbit 10gbit --rounds 8 --save",
        dry="-m benchmarks.training --device cpu --model resnet18 --batch-size 1 --rate 10gbit --rounds 1",
        seconds=240,
    ),
    "kernels": Part(
        on_card="-m benchmarks.kernels --device cuda --megabytes 25 1000 --rounds 10 --save",
        dry="-m benchmarks.kernels --device cpu --numel 65536 --bits 8 --rounds 1",
        seconds=240,
    ),
    "tests": Part(
        on_card="-m pytest -p no:cacheprovider -m gpu -q --tb=short tests/gpu "
        f"-n {os.cpu_count()} --maxprocesses {os.cpu_count()}",
        dry="-m pytest -p no:cacheprovider -q --tb=short -n 0 tests/gpu/test_statistics.py",
        seconds=540,
    ),
    "language_model": Part(
        on_card="-m benchmarks.language_model --device cuda --sweep-steps 250 --minutes 8 --folder {folder}/trainings "
        "--save",
        dry="-m benchmarks.language_model --at-once --layers 1 --width 16 --batch 1 --steps 4 --sweep-steps 2 "
        "--validate-every 2 --most-rates 1 --seeds 1 --folder {folder}/trainings",
        seconds=560,
    ),
}


def run(arguments: str, seconds: float, log: Path) -> Outcome:
    """Run Python, with what it prints in a file. It is interrupted when its time is over, and then killed."""
    begun = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments.split()],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell that runs this in the background has switched SIGINT off for all below, and parts end by it.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        code = _ended(process, seconds)
    return Outcome(code, round(time.monotonic() - begun, 1), log.read_text(errors="replace").splitlines()[-25:])


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Returns the exit code, or None if the time was over first; no process of its group is left."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then says what has failed so far
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        return None
    finally:
        with suppress(ProcessLookupError):  # the usual case: all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def page(device: str, outcomes: dict[str, Outcome]) -> str:
    """Returns how all parts ended, as Markdown."""
    lines = [f"# A day on {device}", "", f"    {PROGRAM}", ""]
    lines += ["| part | ended | seconds |", "| --- | --- | ---: |"]
    for name, outcome in outcomes.items():
        ended = {0: "well", None: "its time was over"}.get(outcome.code, f"with exit code {outcome.code}")
        lines.append(f"| {name} | {ended} | {outcome.seconds:g} |")
    for name, outcome in outcomes.items():
        lines += ["", f"## {name}", "", "```text", *outcome.last, "```"]
    return "\n".join(lines) + "\n"


def known(folder: Path, names: Sequence[str]) -> dict[str, Outcome]:
    """Returns how parts ended in earlier runs."""
    files = {name: folder / f"{name}.json" for name in names}
    return {name: Outcome(**json.loads(file.read_text())) for name, file in files.items() if file.exists()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__.split("\n")[0])
    parser.add_argument("--part", nargs="+", choices=list(PARTS), help="run these, also if they ended well before")
    parser.add_argument("--dry", action="store_true", help="smallest sizes, without a GPU")
    parser.add_argument("--folder", type=Path, default=Path("gpu_day"), help="default ./gpu_day")
    parser.add_argument("--seconds", type=float, default=math.inf, help="limit of each part, if lower than its own")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device; --dry runs the smallest sizes without one")
    device = "a CPU" if options.dry else torch.cuda.get_device_name()
    folder = options.folder / ("dry" if options.dry else slug(device))
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = known(folder, list(PARTS))
    all_well = True
    for name, part in PARTS.items():
        wanted = name in options.part if options.part else name not in outcomes or outcomes[name].code != 0
        if not wanted:
            print(f"{name}: left out", flush=True)
            continue
        limit = min(part.seconds, options.seconds)
        arguments = (part.dry if options.dry else part.on_card).replace("{folder}", str(folder))
        outcomes[name] = run(arguments, limit, folder / f"{name}.log")
        (folder / f"{name}.json").write_text(json.dumps(asdict(outcomes[name]), indent=1) + "\n")
        (folder / "page.md").write_text(page(device, outcomes))
        all_well &= outcomes[name].code == 0
        print(f"{name}: exit code {outcomes[name].code} after {outcomes[name].seconds:g} s", flush=True)
    raise SystemExit(not all_well)


if __name__ == "__main__":
    main()
