"""The command ``gqsgd advise --local-steps``: the plan of least energy, compared with plans that have fewer free
choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.predict.local_plan import LocalPlan, LocalProblem, plan


def check_alone(others: Sequence[str]) -> None:
    """Raise ConfigError for options of clusters beside ``--local-steps``; ``others``: their names."""
    if others:
        raise ConfigError(
            f"{', '.join(others)}: no effect beside --local-steps, whose file has all numbers; leave out either"
        )


def plans(path: Path) -> tuple[LocalPlan, dict[str, LocalPlan]]:
    """Returns the plan of least energy for the problem of a JSON file (see `LocalProblem.load`), and plans with less
    freedom, by what they do without; those that keep no limit are left out.

    Raises:
        ConfigError: a file or a problem that cannot work.
    """
    problem = LocalProblem.load(path)
    best = plan(problem)
    others = {}
    for name, restriction in (("one sample per step", {"batch": 1}), ("one step per round", {"most_steps": 1})):
        try:
            others[name] = plan(problem, **restriction)
        except ConfigError:  # no such plan keeps the limits, and the best plan is what was asked for
            continue
    return best, others


def lines(best: LocalPlan, others: Mapping[str, LocalPlan]) -> list[str]:
    """Returns a line for each plan, the best one first."""
    steps = ", ".join(map(str, best.steps))
    return [
        f"least energy: {best.rounds} rounds of {steps} local steps (by kind of workers) on batches of "
        f"{best.batch}: {best.energy:.0f} J, {best.seconds:.0f} s, error {best.error:.3g}",
        *(
            f"{name}: {other.rounds} rounds, batches of {other.batch}: {other.energy:.0f} J, {other.seconds:.0f} s"
            for name, other in others.items()
        ),
    ]


def to_dict(best: LocalPlan, others: Mapping[str, LocalPlan]) -> dict[str, Any]:
    """Returns the plans as plain values."""
    return {**asdict(best), "others": {name: asdict(other) for name, other in others.items()}}
