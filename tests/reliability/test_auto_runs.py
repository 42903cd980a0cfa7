"""`auto` over links that change, on real processes: trials, turns of plain DDP, and what users do meanwhile.

A clock that is made up says how long steps take, by the bits, by who carries the gradients, and by the link, which
changes at random moments. So other programs of the machine decide nothing, and a run can be repeated from its seed.

The last test has the real clock, and ranks that sleep at random before their steps.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gqsgd.adaptive import clock as clock_module
from lightning_gqsgd.adaptive import steering as steering_module
from lightning_gqsgd.ddp.hook import GQSGDState
from tests.distributed.models import batch, fingerprint, loss_of, mlp, train, wrapped
from tests.distributed.ranks import run
from tests.reliability.knobs import SEED, chance, scaled

#: Steps of a run.
STEPS = 500
#: Seconds of a step without communication, and what the hook costs.
COMPUTE_S, HOOK_S = 0.010, 0.001
#: Seconds that a link takes for 32 bits of each coordinate.
LINKS_S = (0.0, 0.001, 0.002, 0.004, 0.02, 0.2)
#: Seconds that ranks sleep before a step, on average, one of them for some steps in a row.
SLEEPS_S = (0.0, 0.004, 0.012)
#: The largest relative error of a mean, by bits.
ERRORS = {32: 1e-5, 16: 0.02, 8: 0.05, 4: 0.6}


@dataclass
class Run:
    """A training under `auto`, and what has happened in it."""

    model: DistributedDataParallel
    state: GQSGDState
    rank: int
    link_s: float = 0.0
    now_s: float = 0.0
    saved: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def is_plain(self) -> bool:
        """Whether DDP's Reducer has no hook."""
        return not self.model._get_ddp_logging_data().get("comm_hook")

    def pass_time(self) -> None:
        """Let the clock go on by the length of a step; ranks differ by up to 2 %."""
        bits = 32 if self.is_plain else self.state.config.num_bits
        seconds = COMPUTE_S + self.link_s * bits / 32 + (0 if self.is_plain else HOOK_S)
        self.now_s += seconds * (1 + 0.01 * self.rank)


def _mean_gradient(model: nn.Module, steps: list[int], ranks: int) -> Tensor:
    """The exact mean over ranks of gradients that are added up over micro-batches."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for rank in range(ranks):
        for step in steps:
            (loss_of(twin, rank, step) / ranks).backward()
    return torch.cat([parameter.grad.flatten() for parameter in twin.parameters() if parameter.grad is not None])


def _validates(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(batch(run.rank, 0)[0])
    run.model.train()


def _saves(run: Run) -> None:
    run.saved = copy.deepcopy((run.model.module.state_dict(), run.state.state_dict()))


def _loads(run: Run) -> None:
    if run.saved is not None:
        parameters, hook = copy.deepcopy(run.saved)
        run.model.module.load_state_dict(parameters)
        run.state.load_state_dict(hook)


def _fails_in_the_forward_pass(run: Run) -> None:
    with contextlib.suppress(RuntimeError):
        run.model(torch.zeros(3, 5))  # the model takes 32 features


def _copies(run: Run) -> None:
    copy.deepcopy(run.model)(batch(run.rank, 0)[0])


def _wraps_anew(run: Run) -> None:
    run.model = run.state.rewrap(DistributedDataParallel)


def _runs_forward_only(run: Run) -> None:
    run.model(batch(run.rank, 0)[0])


def _drops_gradients(run: Run) -> None:
    run.model.zero_grad(set_to_none=True)


EVENTS: tuple[Callable[[Run], None], ...] = (
    _validates,
    _saves,
    _loads,
    _fails_in_the_forward_pass,
    _copies,
    _wraps_anew,
    _runs_forward_only,
    _drops_gradients,
)


def _step(run: Run, step: int, micro_batches: int, ranks: int) -> float:
    """One step of SGD; returns the relative error of the mean gradient."""
    steps = [step + STEPS * number for number in range(micro_batches)]
    expected = _mean_gradient(run.model.module, steps, ranks)
    run.model.zero_grad()
    for number in steps:
        context = contextlib.nullcontext() if number == steps[-1] else run.model.no_sync()
        with context:
            x, y = batch(run.rank, number)
            nn.functional.cross_entropy(run.model(x), y).backward()
    run.pass_time()
    parameters = list(run.model.module.parameters())
    found = torch.cat([parameter.grad.flatten() for parameter in parameters])
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.05 * parameter.grad
    return float((found - expected).norm() / expected.norm())


def _trains(rank: int, seed: int, ranks: int) -> dict[str, Any]:
    """A run with events that all ranks have in common; returns what happened."""
    chances = chance("auto", seed)
    model, state = wrapped({}, {"preset": "gqsgd_auto", "sample_every": 0}, mlp())
    run = Run(model, state, rank)
    for module in (clock_module, steering_module):
        module.time = SimpleNamespace(perf_counter=lambda: run.now_s)  # type: ignore[attr-defined]
    for step in range(STEPS):
        if chances.random() < 0.02:
            run.link_s = chances.choice(LINKS_S)
        if chances.random() < 0.06:
            event = chances.choice(EVENTS)
            run.seen[event.__name__.strip("_")] += 1
            event(run)
        error = _step(run, step, 2 if chances.random() < 0.1 else 1, ranks)
        bits = 32 if run.is_plain else run.state.config.num_bits
        run.seen["plain DDP" if run.is_plain else f"{bits} bits"] += 1
        assert error <= ERRORS[bits], f"seed {seed}, step {step}: {bits} bits, relative error {error:.2g}"
        facts = (fingerprint(run.model), bits, run.is_plain, len(run.state.decisions))
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, facts)
        assert len(set(everyone)) == 1, f"seed {seed}, step {step}: ranks differ: {everyone}"
    result = {"seen": dict(run.seen), "decisions": len(run.state.decisions)}
    run.state.close()
    return result


def _checked(seed: int, ranks: int, tmp_path: Path) -> None:
    results = run(_trains, ranks, tmp_path, seed, ranks, timeout=300)
    assert all(result == results[0] for result in results)
    print(f"auto, {ranks} ranks, seed {seed}: {results[0]['decisions']} decisions, {results[0]['seen']}")


@pytest.mark.slow
def test_ranks_stay_equal_and_means_right_while_auto_changes_its_mind(tmp_path: Path) -> None:
    _checked(SEED, 2, tmp_path)


@pytest.mark.reliability
@pytest.mark.parametrize("number", range(scaled(12)))
def test_ranks_stay_equal_and_means_right_in_many_runs_of_auto(number: int, tmp_path: Path) -> None:
    _checked(1000 * (SEED + 1) + number, 2 + number % 3, tmp_path)


def _sleeps(rank: int, ranks: int, steps: int) -> dict[str, Any]:
    """A run with the real clock, in which each rank sleeps before each step; returns what has been decided."""
    model, state = wrapped({"bucket_cap_mb": 0.03}, {"preset": "gqsgd_auto", "sample_every": 0}, mlp())
    alike, own, mean_s = chance("sleeps"), chance("sleeps", rank), 0.0
    carried: Counter[str] = Counter()
    for step in range(1, steps + 1):
        if alike.random() < 0.01:
            mean_s = alike.choice(SLEEPS_S)
        time.sleep(own.random() * 2 * mean_s)
        train(model, rank, range(step, step + 1))
        is_plain = not model._get_ddp_logging_data().get("comm_hook")
        carried["plain DDP" if is_plain else f"{state.config.num_bits} bits"] += 1
        if step % 100 == 0 or step == steps:
            facts = (fingerprint(model), is_plain, repr(state.decisions), dict(carried))
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, facts)
            assert all(other == facts for other in everyone), f"step {step}: ranks differ: {everyone}"
    rows = [row.to_dict() for row in state.decisions]
    state.close()
    return {"decisions": rows, "carried": dict(carried), "bits": fingerprint(model)}


@pytest.mark.reliability
def test_4_ranks_agree_through_1000_steps_of_random_sleeps_by_the_real_clock(tmp_path: Path) -> None:
    results = run(_sleeps, 4, tmp_path, 4, scaled(1000), timeout=600)
    assert all(result == results[0] for result in results)
    decisions = results[0]["decisions"]
    assert decisions
    print(f"auto, 4 ranks, random sleeps, seed {SEED}: {len(decisions)} decisions, {results[0]['carried']}")
    for row in decisions:
        print(f"  step {row['step']}: {row['bits']} bits, {row['reason']}")
