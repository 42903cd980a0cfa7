"""FedVote against FedPAQ and signSGD at equal bytes: accuracy on scikit-learn's digits with 8 virtual clients.

    python -m benchmarks.votes --save

A budget is what so many rounds of FedVote send. The other methods have as many rounds, or steps, as fit the budget, to
4 per cent. The learning rate of each is the best one of a short list, by the mean accuracy over all seeds. All methods
train the weights of the hidden layer only, which are what FedVote votes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from benchmarks.report import Report, command_line, listed, present
from lightning_gqsgd.kernels.layout import Segment
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP
from lightning_gqsgd.research.simulation.record import Record
from lightning_gqsgd.research.simulation.votes import FedVote

CLIENTS = 8
SEEDS = 3

#: How far above its budget a method may be: scales of blocks are what votes do without.
TOLERANCE = 1.04

#: Rounds of FedVote, and local steps in each round. One round is "one shot".
BUDGETS = ((1, 15), (1, 100), (30, 15))


class HiddenLayer:
    """The digits, with a network of which the weights of the hidden layer are trained; all else stays at its start."""

    def __init__(self, seed: int) -> None:
        self._whole = DigitsMLP(seed=seed)
        numel = self._whole.segments[0].numel
        self.segments: Sequence[Segment] = [Segment(0, numel, raw=False)]
        self._start, self._fixed = self._whole.start().split([numel, len(self._whole.start()) - numel])

    def start(self) -> Tensor:
        """See `problems.Problem.start`."""
        return self._start.clone()

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """See `problems.Problem.gradients`."""
        return self._whole.gradients(self._filled(x), step, workers)[:, : len(self._start)]

    def loss(self, x: Tensor) -> float:
        """See `problems.Problem.loss`."""
        return self._whole.loss(self._filled(x))

    def metrics(self, x: Tensor) -> dict[str, float]:
        """See `problems.Problem.metrics`."""
        return self._whole.metrics(self._filled(x))

    def _filled(self, x: Tensor) -> Tensor:
        """All parameters, of weights [numel] or [workers, numel]."""
        return torch.cat([x, self._fixed.expand(*x.shape[:-1], -1)], dim=-1)


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: name in the table.
        rates: learning rates to choose from.
        rounds_are_steps: whether every round is one step, whatever the number of local steps.
        run: trains: (problem, rounds, local steps, learning rate, seed).
    """

    name: str
    rates: tuple[float, ...]
    rounds_are_steps: bool
    run: Callable[[HiddenLayer, int, int, float, int], Record]


def _fedvote(reputations: bool) -> Callable[[HiddenLayer, int, int, float, int], Record]:
    def run(problem: HiddenLayer, rounds: int, local_steps: int, rate: float, seed: int) -> Record:
        method = FedVote(CLIENTS, reputations=reputations, local_steps=local_steps, lr=rate, seed=seed)
        return method.run(problem, rounds)

    return run


def _fedpaq(bits: int) -> Callable[[HiddenLayer, int, int, float, int], Record]:
    codec = "eden" if bits < 3 else "auto"

    def run(problem: HiddenLayer, rounds: int, local_steps: int, rate: float, seed: int) -> Record:
        return simulate(
            "gqsgd_fedpaq",
            problem,
            workers=CLIENTS,
            steps=rounds * local_steps,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
            seed=seed,
            progress=False,
            local_steps=local_steps,
            bits=bits,
            codec=codec,
            block_size=256,
        )

    return run


def _signsgd(problem: HiddenLayer, rounds: int, local_steps: int, rate: float, seed: int) -> Record:
    return simulate("signsgd_ef", problem, workers=CLIENTS, steps=rounds, lr=rate, seed=seed, progress=False)


METHODS = (
    Method("FedVote", (0.02, 0.05, 0.1), False, _fedvote(False)),
    Method("FedVote, by reputation", (0.02, 0.05, 0.1), False, _fedvote(True)),
    Method("FedPAQ, 4 bits", (0.005, 0.02, 0.05), False, _fedpaq(4)),
    Method("FedPAQ, 2 bits", (0.005, 0.02, 0.05), False, _fedpaq(2)),
    Method("signSGD with error feedback", (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0), True, _signsgd),
)


@dataclass(frozen=True)
class Outcome:
    """What a method came to under a budget, at one learning rate.

    Attributes:
        rate: the learning rate.
        rounds: rounds, or steps.
        kilobytes: that each client sent.
        accuracies: at the end, in per cent, by seed.
        binary: the same of the signs of the voted weights; empty without votes.
    """

    rate: float
    rounds: int
    kilobytes: float
    accuracies: list[float]
    binary: list[float]


def outcome(method: Method, rate: float, local_steps: int, budget: float) -> Outcome | None:
    """Train with as many rounds as fit a budget in bytes; None: not even one round fits."""
    rounds = int(TOLERANCE * budget // _bytes_of(method, rate))
    if not rounds:
        return None
    records = [method.run(HiddenLayer(seed), rounds, local_steps, rate, seed) for seed in range(SEEDS)]
    voted = "binary_accuracy" in records[0].metrics
    return Outcome(
        rate,
        rounds,
        float(records[0].bytes_sent[-1]) / 1e3,
        [100 * record.last("accuracy") for record in records],
        [100 * record.last("binary_accuracy") for record in records] if voted else [],
    )


def _bytes_of(method: Method, rate: float) -> float:
    """Bytes that a client sends in a round."""
    return float(method.run(HiddenLayer(0), 1, 1, rate, 0).bytes_sent[-1])


def measure(options: argparse.Namespace) -> Report:
    """Train with all methods under all budgets."""
    report = Report(
        "votes",
        f"FedVote, FedPAQ and signSGD at equal bytes: digits, {CLIENTS} virtual clients",
        {
            "rounds of FedVote": "d",
            "local steps": "d",
            "method": "",
            "rounds": "d",
            "kB sent per client": ".1f",
            "learning rate": "g",
            "accuracy (%)": ".1f",
            "lowest": ".1f",
            "highest": ".1f",
            "of the signs (%)": ".1f",
        },
        notes=(
            "One round is one shot: all clients train by themselves and send one message. rounds: as many as fit the "
            "bytes of FedVote; one round of signSGD is one gradient. A dash: not even one round fits.",
            f"Network 64-128-10, batches of 32, means over {SEEDS} seeds of data, start, batches and codes. "
            "All methods train the 8,192 weights of the hidden layer, FedVote and FedPAQ with Adam and signSGD with "
            "SGD. of the signs: of the binary model.",
            "Learning rates that were tried: "
            + "; ".join(f"{method.name}: {listed(method.rates)}" for method in METHODS)
            + ".",
        ),
    )
    for rounds, local_steps in BUDGETS:
        budget = _bytes_of(METHODS[0], METHODS[0].rates[0]) * rounds
        for method in METHODS:
            print(f"votes: {rounds} rounds of {local_steps} steps, {method.name}", file=sys.stderr)
            tried = [outcome(method, rate, local_steps, budget) for rate in method.rates]
            outcomes = [each for each in tried if each is not None]
            steps = None if method.rounds_are_steps else local_steps
            if not outcomes:
                report.rows.append([rounds, steps, method.name, *[None] * 7])
                continue
            best = max(outcomes, key=lambda each: fmean(each.accuracies))
            low, high = min(best.accuracies), max(best.accuracies)
            signs = fmean(best.binary) if best.binary else None
            report.rows.append(
                [
                    rounds,
                    steps,
                    method.name,
                    best.rounds,
                    best.kilobytes,
                    best.rate,
                    fmean(best.accuracies),
                    low,
                    high,
                    signs,
                ]
            )
    return report


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
