"""The command ``gqsgd simulate``: presets on a small problem, with virtual workers in this process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from lightning_gqsgd.cli.tables import plain_table
from lightning_gqsgd.codecs import CODECS
from lightning_gqsgd.errors import ConfigError, check_one_of, counted
from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.simulation import simulate
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


@dataclass(frozen=True)
class Simulated:
    """The result of a preset.

    Attributes:
        preset: its name.
        loss: of the problem, at the end; infinite if the run diverged.
        bits: of one worker's message per coordinate, scales included, in the last step.
        megabytes_sent: that each worker has sent, in 10^6 bytes.
        relative_error: relative L2 error of the last mean of gradients, or of changes with local steps; 0 without
            compression.
    """

    preset: str
    loss: float
    bits: float
    megabytes_sent: float
    relative_error: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, with None for numbers that are not finite, which JSON does not have."""
        return {
            name: value if isinstance(value, str) or math.isfinite(value) else None
            for name, value in asdict(self).items()
        }


def outcomes(
    presets: Sequence[str], problem: str, workers: int, steps: int, lr: float, say: Callable[[str], None]
) -> list[Simulated]:
    """Train with each preset on the same problem, from the same start. Returns the results.

    Raises:
        ConfigError: an unknown preset or problem, a problem whose package is missing, or numbers that cannot work.
    """
    check_one_of("--problem", problem, PROBLEMS)
    if not 0 < lr <= _LARGEST_RATE:
        raise ConfigError(f"--lr {lr} is out of range: above 0 to {_LARGEST_RATE:g}, e.g. --lr 0.1")
    made = PROBLEMS[problem]()
    return [_outcome(name, made, workers, steps, lr, say) for name in presets]


def _outcome(name: str, problem: Problem, workers: int, steps: int, lr: float, say: Callable[[str], None]) -> Simulated:
    say(f"training with {name}")
    with warnings.catch_warnings():  # a memory that may be unstable shows in the loss
        warnings.simplefilter("ignore", StabilityWarning)
        record = simulate(name, problem, workers=workers, steps=steps, lr=lr, progress=False)
    # The rows of a run that has diverged end some steps before.
    bits, nbytes, error = (
        math.nan if record.diverged_at is not None else float(column[-1])
        for column in (record.wire_bits, record.bytes_sent, record.relative_error)
    )
    return Simulated(name, record.last(), bits, nbytes / 1e6, error)


def notes(problem: str, workers: int) -> list[str]:
    """Returns what the column of bits needs as an explanation where padding is most of a message; elsewhere nothing."""
    parameters = sum(segment.numel for segment in PROBLEMS[problem]().segments)
    if parameters >= workers * CODECS["companded"].default_block_size:
        return []
    return [
        f"{problem} has {parameters} parameters. Messages of most presets are padded to a whole block for each worker, "
        f"and have more bits per parameter here than those of a network, which are in gqsgd presets."
    ]


def table(made: Sequence[Simulated], problem: str, workers: int, steps: int) -> Table:
    """Returns the table for a terminal."""
    title = f"{problem}, {counted(workers, 'virtual worker')}, {counted(steps, 'step')} of SGD"
    shown = plain_table(title, ["preset", "loss at the end", "bits", "sent (MB)", "relative error"])
    for row in made:
        if math.isinf(row.loss):
            shown.add_row(row.preset, "diverged", "–", "–", "–")
            continue
        numbers = (f"{row.loss:.4g}", f"{row.bits:.2f}", f"{row.megabytes_sent:.3g}", f"{row.relative_error:.2%}")
        shown.add_row(row.preset, *numbers)
    return shown
