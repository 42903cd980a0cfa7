"""The command ``gqsgd simulate``: presets on a small problem, with virtual workers in this process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rich.table import Table

from lightning_gqsgd.cli.tables import plain_table, three_digits
from lightning_gqsgd.codecs import CODECS
from lightning_gqsgd.errors import ConfigError, check_one_of, counted
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.simulation import Record, simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LeastSquares, LogisticRegression, Problem
from lightning_gqsgd.research.simulation.training import UNCOMPRESSED

#: The largest learning rate: beyond it, losses of all problems overflow at once.
_LARGEST_RATE = 1e6
#: The presets of a call without names: no compression, the package's own widths, and well-known systems.
DEFAULT_PRESETS = (UNCOMPRESSED, "gqsgd", "gqsgd_4bit", "gqsgd_2bit", "qsgd", "terngrad", "signsgd_ef", "topk_ef")
#: Makers of a `Problem`, by name; each worker draws 16 rows for a gradient.
PROBLEMS: dict[str, Callable[[], Any]] = {
    "least_squares": lambda: LeastSquares(batch=16),
    "logistic": lambda: LogisticRegression(batch=16),
    "digits": lambda: DigitsMLP(batch=16),
}


def outcomes(
    presets: Sequence[str], problem: str, workers: int, steps: int, lr: float, say: Callable[[str], None]
) -> list[Record]:
    """Train with each preset on the same problem, from the same start. Returns the records.

    Raises:
        ConfigError: an unknown preset or problem, a problem whose package is missing, or numbers that cannot work.
    """
    check_one_of("--problem", problem, PROBLEMS)
    if not 0 < lr <= _LARGEST_RATE:
        raise ConfigError(f"--lr {lr} is out of range: above 0 to {_LARGEST_RATE:g}, e.g. --lr 0.1")
    made = PROBLEMS[problem]()
    return [_outcome(name, made, workers, steps, lr, say) for name in presets]


def _outcome(name: str, problem: Problem, workers: int, steps: int, lr: float, say: Callable[[str], None]) -> Record:
    say(f"training with {name}")
    with warnings.catch_warnings():  # a memory that may be unstable shows in the loss
        warnings.simplefilter("ignore", StabilityWarning)
        return simulate(name, problem, workers=workers, steps=steps, lr=lr, progress=False)


def _figures(run: Record) -> dict[str, float]:
    """Returns the loss at the end; bits of one worker's message per coordinate in the last step, scales included; 10^6
    bytes that each worker has sent; and the relative L2 error of the last mean of gradients, or of changes with local
    steps. They mean nothing if the run has diverged, whose rows end some steps before."""
    return {
        "loss": float(run.loss[-1]),
        "bits": float(run.wire_bits[-1]),
        "megabytes_sent": float(run.bytes_sent[-1]) / 1e6,
        "relative_error": float(run.relative_error[-1]),
    }


def to_dict(run: Record) -> dict[str, Any]:
    """Returns plain values, with None for numbers that are not finite, which JSON does not have."""
    finite = {name: value if math.isfinite(value) else None for name, value in _figures(run).items()}
    return {"preset": run.name, **(finite if run.diverged_at is None else dict.fromkeys(finite))}


def notes(problem: str, workers: int) -> list[str]:
    """Returns what the column of bits needs as an explanation where padding is most of a message; elsewhere nothing."""
    parameters = sum(segment.numel for segment in PROBLEMS[problem]().segments)
    if parameters >= workers * CODECS["companded"].default_block_size:
        return []
    return [
        f"{problem} has {parameters} parameters. Messages of most presets are padded to a whole block for each worker, "
        f"and have more bits per parameter here than those of a network, which are in gqsgd presets."
    ]


def table(made: Sequence[Record], problem: str, workers: int, steps: int) -> Table:
    """Returns the table for a terminal."""
    title = f"{problem}, {counted(workers, 'virtual worker')}, {counted(steps, 'step')} of SGD"
    shown = plain_table(title, ["preset", "loss at the end", "bits", "sent (MB)", "relative error"])
    for run in made:
        loss, bits, sent, error = _figures(run).values()
        numbers = (f"{loss:.4g}", f"{bits:.2f}", three_digits(sent), f"{error:.2%}")
        shown.add_row(run.name, *(numbers if run.diverged_at is None else ("diverged", "–", "–", "–")))
    return shown
