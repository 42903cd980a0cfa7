"""The smallest experiments of optimizers, error feedback, votes and gossip, on virtual workers in one process.

    python -m benchmarks.systems --save

`docs/systems.md` has the same figures in a table for each system, and says what they mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from benchmarks.report import Report, command_line, present
from lightning_gqsgd.research.experiments.optimizing import PENALTY, SIGN, Rates, sparse_problem, sparse_run
from lightning_gqsgd.research.experiments.voting import lasso
from lightning_gqsgd.research.optim import CMDAdagrad, RDAAdagrad
from lightning_gqsgd.research.simulation.gossip import DPSVRG, DSPG
from lightning_gqsgd.research.simulation.graph import Graph
from lightning_gqsgd.research.simulation.problems import DigitsMLP
from lightning_gqsgd.research.simulation.votes import FedVote
from lightning_gqsgd.research.systems import SYSTEMS

#: A row: experiment, method, setting, and what was measured by its name.
Row = tuple[str, str, str, dict[str, float]]


def adagrad() -> Iterator[Row]:
    """Zeros, objective and accuracy after 400 steps of 4 workers with batches of 32; d = 500."""
    problem = sparse_problem()
    clipped = SYSTEMS["qcmd_adagrad"].fields
    ways: dict[str, tuple[str, Mapping[str, Any]]] = {
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
            zeros, objective, accuracy = sparse_run(problem, make, preset, 400, **fields)
            facts = {"zeros": zeros, "loss + penalty": objective, "accuracy": accuracy}
            yield "Adagrad with an L1 penalty", name, way, facts


def shifted() -> Iterator[Row]:
    """Factors per step by which the distance to the optimum of least squares shrinks in 50 steps; d = 116."""
    rates = Rates()
    yield "DGD-DEF", "gradient descent", "fp32", {"factor": rates.exact()}
    methods: dict[str, tuple[bool, dict[str, Any]]] = {
        "DGD-DEF": (True, {}),
        "classic error feedback": (False, {}),
        "DGD-DEF without rotation": (True, {"rotation": False}),
    }
    for bits in (1, 2, 3, 4, 8):
        sign = SIGN if bits == 1 else {}
        for name, (is_shifted, fields) in methods.items():
            yield "DGD-DEF", name, f"{bits} bits", {"factor": rates.of(is_shifted, **{"bits": bits, **sign, **fields})}


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
    problem, least, smoothness = lasso()

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


if __name__ == "__main__":
    present(command_line(__doc__), measure, threads=1)
