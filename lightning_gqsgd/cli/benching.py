"""The command ``gqsgd bench``: its measurements, as one of a launcher's ranks, and its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lightning_gqsgd.cli.ranks import joined_ranks
from lightning_gqsgd.cli.tables import plain_table
from lightning_gqsgd.cli.training_steps import measure_steps, step_runs
from lightning_gqsgd.errors import ConfigError, check_one_of
from lightning_gqsgd.predict.bench import KERNELS_PART, PARTS, REDUCERS_PART, Bench, WayTime, measure, runs
from lightning_gqsgd.predict.timing import name_of

#: What ``gqsgd bench`` can be restricted to, or asked for.
TRAINING = "training"
CHOICES = (*PARTS, TRAINING)
#: MiB of the gradient that is averaged, where nobody says another number.
MEGABYTES = 25.0
#: A command that predicts steps over a network. Its model comes with torch.
ADVICE = "gqsgd advise --link 10gbit --backward 120ms --model torch.nn:Transformer"
_ON_ONE_MACHINE = (
    "Ranks on one machine share its memory, so this says nothing of a network;\n"
    f"for one, see `{ADVICE}`,\nor the same with `--model module:factory`, a function of yours."
)


@dataclass(frozen=True)
class Training:
    """Training steps that were measured.

    Attributes:
        device: the device, in words.
        backend: of the process group.
        ranks: number of ranks.
        rounds: number of timed rounds.
        steps: see `predict.bench.WayTime`; next to plain DDP.
    """

    device: str
    backend: str
    ranks: int
    rounds: int
    steps: tuple[WayTime, ...]


def check(part: str | None, megabytes: float | None) -> None:
    """Raise ConfigError for a part that does not exist, or that has no gradient whose size could be given."""
    if part is not None:
        check_one_of("the part", part, CHOICES)
    if megabytes is not None and part in (KERNELS_PART, TRAINING):
        raise ConfigError(f"--megabytes {megabytes:g} has no effect on `gqsgd bench {part}`; leave it out")


def run_rank(part: str | None, megabytes: float | None, rounds: int) -> Bench | Training | None:
    """Measure as one of a launcher's ranks; returns the times on rank 0, and None on the others.

    Args:
        part: one of `CHOICES`; None: kernels and all-reduces.
        megabytes: MiB of the gradient that is averaged; None: `MEGABYTES`.
        rounds: number of timed rounds.
    """
    torch.set_num_threads(1)  # the kernels have one thread on a CPU, so the copy next to them has one as well
    with joined_ranks() as device:
        made: Bench | Training
        if part == TRAINING:
            with _progress("training steps", step_runs(rounds)) as tick:
                steps = measure_steps(device, rounds, tick)
                made = Training(name_of(device), dist.get_backend(), dist.get_world_size(), rounds, steps)
        else:
            parts = PARTS if part is None else (part,)
            words = {KERNELS_PART: "kernels", REDUCERS_PART: "all-reduces"}
            numel = int((MEGABYTES if megabytes is None else megabytes) * 2**18)
            with _progress(", then ".join(words[name] for name in parts), runs(rounds, parts)) as tick:
                made = measure(device, numel, rounds, tick, parts)
        return made if dist.get_rank() == 0 else None


@contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar on rank 0's terminal. Yields a function that moves it on by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(words, total=total)
        yield lambda: progress.advance(task)


def parts_of(made: Bench | Training) -> list[RenderableType]:
    """Returns the tables of a measurement, as far as it was made, and the note below them."""
    ranks = f"over {made.ranks} local ranks by {made.backend}"
    if isinstance(made, Training):
        model = f"The model has dense layers and 5 M parameters; medians of {made.rounds} rounds in turns."
        steps = _table_of_ways(f"Training step of a small model {ranks}", "ddp", made.steps)
        return [steps, f"{model}\n{_fastest(made.steps, 'ddp')}"]
    tables: list[RenderableType] = []
    note = [f"Medians of {made.rounds} rounds in turns."]
    if made.kernels:
        tables.append(_table_of_kernels(made))
        note.insert(0, "ns: per coordinate; GB/s: of fp32 gradient.")
    if made.all_reduces:
        title = f"All-reduce of {made.numel * 4 / 2**20:.4g} MiB {ranks}"
        tables.append(_table_of_ways(title, "fp32", made.all_reduces))
        note.append(_fastest(made.all_reduces, "fp32"))
    return [*tables, "\n".join(note)]


def _table_of_kernels(made: Bench) -> Table:
    kernels = plain_table(
        f"Kernels on one {made.device}{' thread' if made.device == 'CPU' else ''}",
        ["codec", "bits", "encode (ns)", "decode (ns)", "both (GB/s)", "both / copy"],
    )
    for kernel in made.kernels:
        times = (kernel.encode_ns, kernel.decode_ns, kernel.gradient_gb_per_s, kernel.times_copy)
        kernels.add_row(kernel.codec, str(kernel.bits), *(f"{value:.2f}" for value in times))
    return kernels


def _table_of_ways(title: str, against: str, ways: Sequence[WayTime]) -> Table:
    made = plain_table(title, ["", "sent (MB)", "time (ms)", f"against {against}", "10 to 90 %"])
    for way in ways:
        spread = f"{way.low:.2f} to {way.high:.2f}"
        made.add_row(way.name, f"{way.sent_mb:.1f}", f"{way.ms:.1f}", f"{way.speedup:.2f}×", spread)
    return made


def _fastest(ways: Sequence[WayTime], against: str) -> str:
    """Returns which way is fastest, and a warning that ranks on one machine say nothing of a network."""
    # Medians of times may have another order, because the speed of a machine changes between rounds.
    best = max(ways, key=lambda way: way.speedup)
    return f"Against {against} in the same round, {best.name} is fastest. {_ON_ONE_MACHINE}"
