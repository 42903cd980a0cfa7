"""The record of a simulated run, as arrays, a table or a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.errors import import_optional
from lightning_gqsgd.research.simulation.problems import Problem


@dataclass(frozen=True, eq=False)
class Record:
    """The record of a run of `simulate`, with R rows. The first row is from before the training.

    Attributes:
        name: name of the preset.
        config: the configuration, with the chosen reducer and the numbers of its memories.
        workers: number of workers.
        step: steps done, int64 [R].
        loss: loss of the problem, float64 [R]. All entries below have this type unless they say otherwise.
        metrics: metrics of the problem, by name, each [R].
        bytes_sent: bytes that each worker has sent, int64 [R].
        relative_error: relative L2 error of the latest mean of gradients; NaN in the first row.
        wire_bits: bits of one worker's message per coordinate, scales included, in the latest step.
        parameters: the parameters at the end, [d].
        diverged_at: the step after which parameters or loss were not finite; the run ended there. None if they stayed
            finite. The rows before this step are kept, and the step itself has no row.
    """

    name: str
    config: GQSGDConfig
    workers: int
    step: np.ndarray
    loss: np.ndarray
    metrics: dict[str, np.ndarray]
    bytes_sent: np.ndarray
    relative_error: np.ndarray
    wire_bits: np.ndarray
    parameters: np.ndarray
    diverged_at: int | None

    def last(self, name: str = "loss", rows: int = 1) -> float:
        """Returns the mean of the last rows of the loss or a metric; after divergence, infinite or NaN."""
        if self.diverged_at is not None:
            return math.inf if name == "loss" else math.nan
        values = self.loss if name == "loss" else self.metrics[name]
        return float(values[-rows:].mean())

    def to_dict(self) -> dict[str, np.ndarray]:
        """Returns all columns by name."""
        return {
            "step": self.step,
            "loss": self.loss,
            **self.metrics,
            "bytes_sent": self.bytes_sent,
            "relative_error": self.relative_error,
            "wire_bits": self.wire_bits,
        }

    def to_pandas(self) -> Any:
        """Returns all columns as a `pandas.DataFrame`.

        Raises:
            PackageError: if pandas is missing.
        """
        pandas = import_optional("pandas", "pandas", "Record.to_pandas", "take Record.to_dict")
        return pandas.DataFrame(self.to_dict())

    def plot(self, path: str | Path, *others: Record) -> None:
        """Write a picture of this and other runs: loss over steps, and over the bytes that a worker sends.

        Raises:
            PackageError: if matplotlib is missing.
        """
        module = import_optional("matplotlib.figure", "matplotlib", "Record.plot", "take Record.to_dict")
        figure = module.Figure(figsize=(9, 3.6), layout="constrained")
        by_step, by_bytes = figure.subplots(1, 2, sharey=True)
        runs = (self, *others)
        for run in runs:
            label = run.name if run.diverged_at is None else f"{run.name} (diverged at {run.diverged_at})"
            by_step.plot(run.step, run.loss, label=label)
            sent = run.bytes_sent > 0  # a logarithmic axis has no zero
            by_bytes.plot(run.bytes_sent[sent] / 1e6, run.loss[sent])
        if all((run.loss > 0).all() for run in runs):
            by_step.set_yscale("log")
        by_bytes.set_xscale("log")
        by_step.set(xlabel="step", ylabel="loss")
        by_bytes.set(xlabel="MB sent per worker")
        for axes in (by_step, by_bytes):
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        by_step.legend(frameon=False, fontsize="small")
        figure.savefig(path, dpi=150)


class Workers(Protocol):
    """Virtual workers with a configuration, which know what they have sent; see `Record`."""

    @property
    def config(self) -> GQSGDConfig: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def wire_bits(self) -> float: ...


class Rows:
    """The rows of a run that is under way.

    Args:
        problem: the problem to train on.
        workers: the virtual workers.
    """

    def __init__(self, problem: Problem, workers: Workers) -> None:
        self._problem = problem
        self._workers = workers
        self._columns: dict[str, list[float]] = defaultdict(list)
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def add(self, x: Tensor, step: int, error: float, metrics: Mapping[str, float] | None = None) -> bool:
        """Add a row if the loss is finite. Returns whether it is finite.

        Args:
            x: the parameters, [d].
            step: number of steps so far.
            error: relative L2 error of the latest mean of gradients.
            metrics: more metrics than those of the problem, by name; the names are the same in every call.
        """
        loss = self._problem.loss(x)
        if not math.isfinite(loss):
            return False
        sent = {"bytes_sent": self._workers.bytes_sent, "wire_bits": self._workers.wire_bits}
        for name, value in {"loss": loss, "step": step, "relative_error": error, **sent}.items():
            self._columns[name].append(value)
        for name, value in {**self._problem.metrics(x), **(metrics or {})}.items():
            self._metrics[name].append(value)
        return True

    def record(self, name: str, workers: int, parameters: Tensor, diverged_at: int | None = None) -> Record:
        """Returns the rows as a `Record`, which describes the arguments."""
        return Record(
            name=name,
            config=self._workers.config,
            workers=workers,
            metrics={metric: np.array(values) for metric, values in self._metrics.items()},
            parameters=parameters.detach().numpy().copy(),
            diverged_at=diverged_at,
            **{column: np.array(values) for column, values in self._columns.items()},
        )
