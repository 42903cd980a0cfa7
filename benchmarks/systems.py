"""The smallest experiments of optimizers, error feedback, votes and gossip, on virtual workers in one process.

    python -m benchmarks.systems --save

`docs/systems.md` has the same figures in a table for each system, and says what they mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Report, present
from lightning_gqsgd.research.optim import CMDAdagrad, RDAAdagrad, soft_threshold, sparsity
from lightning_gqsgd.research.simulation import simulate
from lightning_gqsgd.research.simulation.gossip import DPSVRG, DSPG, Penalised
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LeastSquares, LogisticRegression
from lightning_gqsgd.research.simulation.shifted import DGDDEF
from lightning_gqsgd.research.simulation.votes import FedVote
from lightning_gqsgd.research.systems import SYSTEMS

#: Of the L1 norm, in both experiments that have a penalty.
PENALTY = 1e-2

#: A row: experiment, method, setting, and what was measured by its name.
Row = tuple[str, str, str, dict[str, float]]


class SparseLogistic(LogisticRegression):
    """Logistic regression of which 5 % of the true weights are not zero."""

    def _targets(self, scores: Tensor, noise: Tensor) -> Tensor:
        self.truth = 2 * torch.where(torch.arange(self.dimension) % 20 == 0, self.truth, 0.0)
        return super()._targets((self.features * self.truth).sum(1), noise)


def adagrad() -> Iterator[Row]:
    """Zeros, objective and accuracy after 400 steps of 4 workers with batches of 32; d = 500."""
    problem = SparseLogistic(dimension=500, rows=2000, batch=32, noise=0.5, regularisation=0.0)
    clipped = SYSTEMS["qcmd_adagrad"].fields
    ways: dict[str, tuple[str, dict[str, Any]]] = {
        "fp32": ("ddp", {}),
        "gqsgd_4bit": ("gqsgd_4bit", {}),
        "ternary, clipped": ("gqsgd", clipped),
        "ternary, not clipped": ("gqsgd", {**clipped, "clip": 0.0}),
    }
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "CMDAdagrad": lambda parameters: CMDAdagrad(parameters, lr=0.05, l1=PENALTY, eps=1e-2),
        "RDAAdagrad": lambda parameters: RDAAdagrad(parameters, lr=0.05, l1=PENALTY, eps=1e-2),
        "torch.optim.Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-2),
    }
    for name, make in makers.items():
        for way, (preset, fields) in ways.items() if name != "torch.optim.Adagrad" else [("fp32", ways["fp32"])]:
            record = simulate(
                preset, problem, workers=4, steps=400, optimizer=make, record_every=400, progress=False, **fields
            )
            x = torch.from_numpy(record.parameters)
            objective = record.last() + PENALTY * float(x.abs().sum())
            facts = {"zeros": sparsity([x]), "loss + penalty": objective, "accuracy": record.last("accuracy")}
            yield "Adagrad with an L1 penalty", name, way, facts


def shifted() -> Iterator[Row]:
    """Factors per step by which the distance to the optimum of least squares shrinks in 50 steps; d = 116."""
    problem = LeastSquares(dimension=116, rows=400, noise=0.0, dtype=torch.float64)
    smallest, largest = torch.linalg.eigvalsh(problem.features.T @ problem.features / problem.rows)[[0, -1]].tolist()
    lr, x = 2 / (largest + smallest), problem.start()
    for step in range(50):
        x = x - lr * problem.gradients(x, step, 1)[0]
    exact = float(((x - problem.truth).norm() / problem.truth.norm()) ** (1 / 50))
    yield "DGD-DEF", "gradient descent", "fp32", {"factor": exact}
    methods: dict[str, tuple[bool, dict[str, Any]]] = {
        "DGD-DEF": (True, {}),
        "classic error feedback": (False, {}),
        "DGD-DEF without rotation": (True, {"rotation": False}),
    }
    for bits in (1, 2, 3, 4, 8):
        sign = {"codec": "sign", "dither": "adaptive"} if bits == 1 else {}
        for name, (is_shifted, fields) in methods.items():
            run = DGDDEF(1, lr, is_shifted).run(
                problem, 50, **{**SYSTEMS["dgd_def"].fields, "bits": bits, **sign, **fields}
            )
            distance = run.metrics["distance"]
            yield "DGD-DEF", name, f"{bits} bits", {"factor": float((distance[-1] / distance[0]) ** (1 / 50))}


def votes() -> Iterator[Row]:
    """Digits, 8 workers, 15 local steps in each of 30 rounds."""
    digits = DigitsMLP()
    for attackers in (0, 3):
        for name, is_weighed in (("summed", False), ("weighed by reputation", True)):
            run = FedVote(8, reputations=is_weighed, attackers=attackers).run(digits, 30)
            facts = {
                "accuracy": run.last("accuracy"),
                "of the binary model": run.last("binary_accuracy"),
                "kB sent per worker": float(run.bytes_sent[-1]) / 1e3,
            }
            yield "FedVote", name, f"{attackers} attackers", facts


def gossip() -> Iterator[Row]:
    """Logistic regression with an L1 penalty, d = 40, 8 workers with a truth each, 120 epochs' worth of gradients."""
    graphs = {"ring": Graph.ring(8), "torus": Graph.torus(2, 4), "exponential": Graph.exponential(8)}
    for name, graph in graphs.items():
        facts = {"neighbours": float(max(graph.degrees)), "contraction": graph.contraction}
        yield "Graphs of 8 ranks", "gossip", name, facts
    fields: dict[str, Any] = {"dimension": 40, "rows": 1600, "parts": 8, "spread": 0.5, "regularisation": 0.0}
    fields |= {"dtype": torch.float64}
    whole = LogisticRegression(**fields)
    problem = Penalised(LogisticRegression(batch=20, **fields), whole, l1=PENALTY, batch_share=0.1)
    smoothness = float(torch.linalg.eigvalsh(whole.features.T @ whole.features / 1600)[-1]) / 4
    x, momentum = whole.start(), whole.start()
    for step in range(400):  # FISTA
        moved = soft_threshold(momentum - whole.gradients(momentum, 0, 1)[0] / smoothness, PENALTY / smoothness)
        momentum, x = moved + step / (step + 3) * (moved - x), moved
    least = problem.objective(x)

    def row(method: str, graph: str, run: Any) -> Row:
        facts = {
            "F - F*": run.objective[-1] - least,
            "rounds": float(run.rounds[-1]),
            "MB sent, busiest worker": float(run.bytes_sent) / 1e6,
            "disagreement": float(run.disagreement[-1]),
        }
        return "DPSVRG", method, graph, facts

    for name in ("ring", "exponential"):
        tried = [
            DSPG(lr / smoothness, tau).run(problem, graphs[name], 120) for lr in (0.1, 0.3, 1.0) for tau in (20, 100)
        ]
        yield row("DSPG, tuned step", name, min(tried, key=lambda run: run.objective[-1]))
    for method, most in (("DPSVRG, always one round", {"most_rounds": 1}), ("DPSVRG, up to 4 rounds", {})):
        for name, graph in graphs.items():
            run = DPSVRG(0.1 / smoothness, first=10, growth=1.05, **most).run(problem, graph, 120)
            yield row(method, name, run)


def measure(options: argparse.Namespace) -> Report:
    """All experiments, a row for each quantity."""
    report = Report(
        name="systems",
        title="Optimizers, error feedback, votes and gossip: the smallest experiments",
        columns={"experiment": "", "method": "", "setting": "", "quantity": "", "value": ".6g"},
        notes=(
            "One seed, virtual workers in one process. docs/systems.md has the same figures in a table for each "
            "system, and says what they mean. A factor above 1 is a run that diverges.",
        ),
    )
    for experiment in (adagrad, shifted, votes, gossip):
        for name, method, setting, facts in experiment():
            print(f"systems: {name}, {method}, {setting}: {facts}", file=sys.stderr)
            report.rows += [[name, method, setting, quantity, value] for quantity, value in facts.items()]
    return report


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.systems", description=__doc__.split("\n")[0])
    torch.set_num_threads(1)
    present(parser, measure)


if __name__ == "__main__":
    main()
