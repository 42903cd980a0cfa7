"""What ``gqsgd bench`` does as one of a launcher's ranks, and what it says."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_gqsgd.cli.probing import joined_ranks, plain_table
from lightning_gqsgd.performance.bench import Bench, measure, runs

#: What answers for a network. Whoever has torch has its model.
ADVICE = "gqsgd advise --link 10gbit --backward 120ms --model torch.nn:Transformer"


def run_rank(megabytes: float, rounds: int) -> Bench | None:
    """Measure as one of a launcher's ranks; returns the times on rank 0, and None on the others.

    Args:
        megabytes: MiB of the gradient that is averaged.
        rounds: number of timed rounds.
    """
    torch.set_num_threads(1)  # the kernels have one thread on a CPU, so the copy next to them has one as well
    with joined_ranks() as device:
        console = Console(stderr=True, quiet=dist.get_rank() != 0)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("kernels, then all-reduces", total=runs(rounds))
            made = measure(device, int(megabytes * 2**18), rounds, lambda: progress.advance(task))
        return made if dist.get_rank() == 0 else None


def tables(made: Bench) -> list[Table]:
    """What was measured, for people."""
    kernels = plain_table(
        f"Kernels on one {made.device}{' thread' if made.device == 'CPU' else ''}",
        ["codec", "bits", "encode (ns)", "decode (ns)", "both (GB/s)", "both / copy"],
    )
    for kernel in made.kernels:
        times = (kernel.encode_ns, kernel.decode_ns, kernel.gradient_gb_per_s, kernel.times_copy)
        kernels.add_row(kernel.codec, str(kernel.bits), *(f"{value:.2f}" for value in times))
    mebibytes = made.numel * 4 / 2**20
    reduces = plain_table(
        f"All-reduce of {mebibytes:.4g} MiB over {made.ranks} local ranks by {made.backend}",
        ["", "sent (MB)", "time (ms)", "against fp32", "10 to 90 %"],
    )
    for way in made.all_reduces:
        spread = f"{way.low:.2f} to {way.high:.2f}"
        reduces.add_row(way.name, f"{way.sent_mb:.1f}", f"{way.ms:.1f}", f"{way.speedup:.2f}×", spread)
    return [kernels, reduces]


def note(made: Bench) -> str:
    """What the figures do and do not say, in words."""
    fastest = max(made.all_reduces, key=lambda way: way.speedup)
    return (
        f"ns: per coordinate; GB/s: of fp32 gradient; medians of {made.rounds} rounds in turns.\n"
        f"Between these ranks {fastest.name} is fastest. Ranks on one machine share its memory, so nothing is gained "
        f"there;\nfor a network, see `{ADVICE}`,\nor the same with `--model module:factory`, a function of yours."
    )
