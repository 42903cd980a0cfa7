"""One mean of 25 MiB over shaped links, by this package and by other tools: time, processor, error and equal bits.

    python -m benchmarks.rival_means --rate 100mbit 1gbit 10gbit --save

The benchmark needs Linux, root and iproute2, see `netlab`. Ways take turns on the same two hosts, except for
hivemind's, which follow on the same hosts in processes of their own. torch's hooks get a bucket of one matrix, 2560 ×
2560, with no backward pass around it. hivemind is left out unless ``--hivemind PYTHON`` names an
interpreter that has it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.hosts import begin, finish, in_lab, slowest, work_or_present
from benchmarks.reducers import Bench
from benchmarks.report import Report, command_line, program
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.research.optim import Dion
from lightning_gqsgd.research.simulation import relative_error
from lightning_gqsgd.research.systems import SYSTEMS
from netlab.lab import NetLab, NetLabError

SIDE = 2560
#: Samples whose products make the gradient of a layer: its rank is at most so many.
SAMPLES = 64
WARMUP = 3
FP32 = "torch, fp32"
OURS = {f"gqsgd, {bits} bit": bits for bits in (8, 4, 2)}
DION = "Dion, rank 40 (this package's)"
HOW_TO_INSTALL = (
    "hivemind is left out: uv venv --python 3.11 VENV && uv pip install --python VENV/bin/python hivemind==1.1.12 "
    "'numpy<2', and give --hivemind VENV/bin/python"
)


def gradient(rank: int) -> Tensor:
    """Returns the gradient of a dense layer on samples of this rank, flat: inputs after a ReLU times errors."""
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(SAMPLES, SIDE, generator=generator).relu()
    errors = torch.randn(SAMPLES, SIDE, generator=generator)
    return (errors.T @ inputs / SAMPLES).flatten()


class OneBucket:
    """What torch's hooks ask of a bucket, which only DDP can make: one matrix."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        """Returns all gradients."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Returns the gradient of each parameter."""
        return [self._buffer.view(SIDE, SIDE)]

    def parameters(self) -> list[Tensor]:
        """Returns the parameters, of which only shapes count."""
        return self.gradients()

    def index(self) -> int:
        """Returns the number of the bucket."""
        return 0

    def is_last(self) -> bool:
        """Returns whether the step has no further bucket."""
        return True


@dataclass
class Way:
    """A way to average.

    Attributes:
        run: leaves the mean in the buffer.
        has_mean: whether it is a mean that the buffer has afterwards.
    """

    run: Callable[[], object]
    has_mean: bool = True


def ways(bench: Bench) -> dict[str, Way]:
    """Returns all ways on the buffer of a bench."""
    buffer = bench.buffer
    bucket: Any = OneBucket(buffer)

    def fp32() -> None:
        dist.all_reduce(buffer.div_(2))

    def hook(state: Any, function: Any) -> Callable[[], None]:
        return lambda: _put(buffer, function(state, bucket).wait())

    made = {FP32: Way(fp32)}
    made["torch bf16 hook"] = Way(hook(None, default_hooks.bf16_compress_hook))
    made["torch fp16 hook"] = Way(hook(None, default_hooks.fp16_compress_hook))
    for rank in (1, 4):
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
        made[f"torch PowerSGD, rank {rank}"] = Way(hook(state, powerSGD_hook.powerSGD_hook))
    made["torchft, fp32"] = Way(_torchft(buffer))
    for name, bits in OURS.items():
        bench.add_config(name, GQSGDConfig(bits=bits, sample_every=0))
        made[name] = Way(bench.cases[name])
    bench.add_config("DeMo (this package's)", GQSGDConfig(**SYSTEMS["demo"].fields, sample_every=0))
    made["DeMo (this package's)"] = Way(bench.cases["DeMo (this package's)"])
    matrix = torch.zeros(SIDE, SIDE, requires_grad=True)
    matrix.grad = buffer.view(SIDE, SIDE)
    made[DION] = Way(Dion([matrix], lr=0.0, rank_fraction=40 / SIDE).step, has_mean=False)
    return made


def _put(buffer: Tensor, mean: Any) -> None:
    mean = mean[0] if isinstance(mean, list) else mean
    if mean.data_ptr() != buffer.data_ptr():
        buffer.copy_(mean)


def _torchft(buffer: Tensor) -> Callable[[], None]:
    """Returns the mean of torchft's process group, which sums."""
    from torchft import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}/torchft"
    group.configure(address, "rivals", dist.get_rank(), dist.get_world_size())

    def run() -> None:
        group.allreduce([buffer.div_(2)], dist.AllreduceOptions()).wait()

    return run


def work(options: argparse.Namespace) -> None:
    """Do one rank's part."""
    rank, ranks = begin()
    own = gradient(rank)
    bench = Bench(own.numel(), ranks, rank)
    found: dict[str, dict[str, Any]] = {}
    cases = ways(bench)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own)
    for name, way in cases.items():
        for _ in range(WARMUP):
            _timed(way, bench.buffer, own)
        found[name] = {"seconds": [], "processor": []}
        if way.has_mean:
            found[name]["error"] = float(slowest([relative_error(bench.buffer, everyone)])[0])
            found[name]["equal"] = _equal(bench.buffer)
    for _ in range(options.rounds):
        for name, way in cases.items():
            seconds, processor = _timed(way, bench.buffer, own)
            found[name]["seconds"].append(float(slowest([seconds])[0]))
            found[name]["processor"].append(processor)
    bench.close()
    finish(found)


def _timed(way: Way, buffer: Tensor, own: Tensor) -> tuple[float, float]:
    """Returns the seconds of a mean, and those of this process's processors."""
    buffer.copy_(own)
    dist.barrier()
    worked, begun = time.process_time(), time.perf_counter()
    way.run()
    return time.perf_counter() - begun, time.process_time() - worked


def _equal(buffer: Tensor) -> bool:
    """Returns whether all ranks have the same bits."""
    own = torch.frombuffer(bytearray(hashlib.sha256(buffer.numpy().tobytes()).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(digests, own)
    return all(torch.equal(digest, own) for digest in digests)


def hivemind(lab: NetLab, python: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns what two peers of hivemind take on the hosts of a lab; see `benchmarks.rival_hivemind`."""
    script = Path(__file__).with_name("rival_hivemind.py")
    own = [gradient(rank) for rank in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for rank in range(2):
            np.save(place / f"gradient{rank}.npy", own[rank].numpy())
        peers = [
            lab.popen(
                rank,
                [python, str(script), str(rank), folder, lab.address(rank), str(rounds)],
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        codes = [peer.wait(timeout=240) for peer in peers]
        if any(codes):
            raise NetLabError(f"hivemind's peers ended with codes {codes}; their errors stand above")
        results = [json.loads((place / f"result{rank}.json").read_text()) for rank in range(2)]
        found = {}
        for name, first in results[0].items():
            second = results[1][name]
            if "error" in first or "error" in second:
                print(f"{name} failed: {first.get('error') or second.get('error')}", file=sys.stderr)
                continue
            means = [torch.from_numpy(np.load(place / f"{name} {rank}.npy")) for rank in range(2)]
            found[name] = {
                "seconds": np.maximum(first["seconds"], second["seconds"]).tolist(),
                "processor": first["processor"],
                "error": max(relative_error(mean, own) for mean in means),
                "equal": first["digest"] == second["digest"],
            }
        return found


def measure(options: argparse.Namespace) -> Report:
    """Run all ways on two hosts at each rate."""
    report = Report(
        "rival_means",
        f"One mean of {4 * SIDE * SIDE / 2**20:.0f} MiB on 2 hosts, beside other tools",
        {
            "way": "",
            "rate": "",
            "time (ms)": ".0f",
            "10 to 90 % (ms)": "",
            "processor (ms)": ".0f",
            "fp32 / time": ".2f",
            "error (%)": ".2f",
            "equal bits": "",
        },
    )
    for rate in options.rate:
        with NetLab(2, rate) as lab:
            result = in_lab(lab, program(), f"at {rate}")
            if options.hivemind:
                result |= hivemind(lab, options.hivemind, options.rounds)
        report.raw[rate] = result
        report.rows += [row_of(name, rate, case, result[FP32]) for name, case in result.items()]
    if not options.hivemind:
        print(HOW_TO_INSTALL, file=sys.stderr)
    report.notes = (*NOTES, *(in_words(report.rows, rate) for rate in options.rate))
    return report


def row_of(name: str, rate: str, case: dict[str, Any], plain: dict[str, Any]) -> list[Any]:
    """Returns a way's row of the table; ``plain``: torch's fp32 mean in the same run."""
    low, median, high = 1e3 * np.quantile(case["seconds"], (0.1, 0.5, 0.9))
    ratio = 1e3 * float(np.median(plain["seconds"])) / median
    error = 100 * case["error"] if "error" in case else None
    equal = {True: "yes", False: "no"}.get(case.get("equal", ""), "–")
    processor = 1e3 * float(np.median(case["processor"]))
    return [name, rate, median, f"{low:.0f} to {high:.0f}", processor, ratio, error, equal]


def in_words(rows: Sequence[Sequence[Any]], rate: str) -> str:
    """Returns who is the fastest at a rate, and where a rival is ahead of this package."""
    own = [row for row in rows if row[1] == rate]
    ours = min((row for row in own if row[0] in OURS), key=lambda row: row[2])
    rivals = sorted((row for row in own if row[0] not in OURS), key=lambda row: row[2])
    ahead = [f"`{row[0]}` with {row[2]:.0f} ms" for row in rivals if row[2] < ours[2]]
    said = f"faster than that: {', '.join(ahead)}" if ahead else "no other way is faster"
    least = min(own, key=lambda row: row[4])
    return (
        f"At {rate}, the fastest of this package is `{ours[0]}` with {ours[2]:.0f} ms; {said}. The least processor "
        f"time has `{least[0]}` with {least[4]:.0f} ms."
    )


NOTES = (
    f"The gradient is that of a dense layer of {SIDE} × {SIDE} weights on {SAMPLES} samples of each host, so a matrix "
    f"of rank {SAMPLES} on each. time = median over rounds of the slower host. processor: of all threads of the first "
    "host's process (of hivemind: and of its daemon), in one mean. Both hosts share two cores.",
    "error: relative L2 error of the mean after three means of the same gradient. PowerSGD and DeMo keep what they "
    "leave out in a memory and send it later, so their error in one mean says little of a training. DeMo is to be "
    "followed by an optimizer of signs. Dion's row is a whole step of the optimizer, which orthonormalises, and has no "
    "mean.",
    "hivemind's time begins when both peers have found each other, which takes seconds more. torchft is its process "
    "group over Gloo without the Manager. epfml/powersgd is left out: on PyPI it wants torch 1.10. torch's hook has "
    "the same method.",
)


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--rate", nargs="+", default=["100mbit", "1gbit", "10gbit"], help="of each host's link")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hivemind", metavar="PYTHON", help="an interpreter that has hivemind")
    work_or_present(parser, work, measure)
