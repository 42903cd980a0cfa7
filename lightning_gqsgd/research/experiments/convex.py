"""The smallest experiments of memories: which errors they remove on convex problems, and on a network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from lightning_gqsgd.reducers.memory import StabilityWarning
from lightning_gqsgd.research.experiments import codecs
from lightning_gqsgd.research.experiments.rows import Row, normal, virtual
from lightning_gqsgd.research.optim import ProximalSGD, soft_threshold
from lightning_gqsgd.research.simulation import relative_error, simulate
from lightning_gqsgd.research.simulation.problems import DigitsMLP, LeastSquares, LogisticRegression
from lightning_gqsgd.research.simulation.subspaces import SubspaceRanks

#: A memory whose reference is the latest reduced gradient.
LATEST = {"shared": True, "rho": 1.0, "beta": 0.0}


def ecq_sgd() -> Iterator[Row]:
    """ECQ-SGD against QSGD and no compression."""
    problem = LeastSquares(dimension=256, rows=10_000, batch=64, noise=0.1, scale=0.25)

    def error(preset: str, **fields: Any) -> float:
        run = simulate(preset, problem, workers=4, steps=1200, lr=0.16, record_every=20, progress=False, **fields)
        return float((run.metrics["distance"][-15:] ** 2).mean())

    exact = error("ddp")
    fed_back = error("ecq_sgd")
    without = error("ecq_sgd", memory="none")
    measured = f"|w - w*|²: {fed_back:.3g}, without compression {exact:.3g}"
    yield Row("about as good as no compression", measured, fed_back < 1.2 * exact)
    yield Row("better than QSGD with the same codes", f"{fed_back:.3g}, QSGD {without:.3g}", without > 1.15 * fed_back)


@cache
def _excess(preset: str, memory: str = "") -> float:
    """Returns the loss above its minimum after 350 steps with full gradients, in which each of 10 workers has its own
    true weights."""
    problem = LeastSquares(dimension=20, rows=1000, parts=10, spread=1.0, noise=0.0, dtype=torch.float64)
    lr = 1 / 7 / problem.smoothness  # ω <= 24/4 in a block of 24, the smallest block that holds d
    fields = {"memory": memory} if memory else {}
    given: dict[str, Any] = {"record_every": 5, "progress": False, "block_size": 24, **fields}
    return float(simulate(preset, problem, workers=10, steps=350, lr=lr, **given).metrics["excess"][-20:].mean())


def differences(name: str) -> Iterator[Row]:
    """DIANA, Artemis and DORE with workers that differ."""
    found = _excess(name)
    without = _excess("diana" if name == "diana" else "artemis", "none")
    yield Row("linear convergence where workers differ: the loss goes to 0", f"{found:.2g}", found < 1e-9)
    yield Row("the same codes without memory stall", f"{without:.2g}", without > 0.02)


@cache
def _penalised_excess(memory: str) -> tuple[float, float]:
    """Train DIANA's codes with a memory and proximal steps, on the problem of `_excess` with a penalty 0.3 |x|_1.
    Returns the objective above its minimum, and the share of weights that are zero either in the result or at the
    optimum, but not in both."""
    problem = LeastSquares(dimension=20, rows=1000, parts=10, spread=1.0, noise=0.0, dtype=torch.float64)
    penalty = 0.3
    least = problem.start()
    for _ in range(500):
        moved = least - problem.gradients(least, 0, 1)[0] / problem.smoothness
        least = soft_threshold(moved, penalty / problem.smoothness)
    given: dict[str, Any] = {"record_every": 350, "progress": False, "block_size": 24, "memory": memory}
    made = partial(ProximalSGD, lr=1 / 7 / problem.smoothness, l1=penalty)
    x = torch.from_numpy(simulate("diana", problem, workers=10, steps=350, optimizer=made, **given).parameters)
    objectives = [problem.loss(point) + penalty * float(point.abs().sum()) for point in (x, least)]
    return objectives[0] - objectives[1], float(((x == 0) != (least == 0)).double().mean())


def diana() -> Iterator[Row]:
    """DIANA with workers that differ, without and with a penalty."""
    yield from differences("diana")
    found, wrong = _penalised_excess("diana")
    without = _penalised_excess("none")[0]
    words = f"{found:.2g}, without memory {without:.2g}"
    yield Row("with a penalty that is not smooth, by proximal steps, as well", words, found < 1e-9 < without)
    yield Row("and all its zeros are found", f"{wrong:.0%} of the weights are wrong", wrong == 0)


def _amsgrad(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.002, betas=(0.9, 0.99), amsgrad=True)


@cache
def _slopes(preset: str, memory: str = "", **fields: Any) -> tuple[float, float]:
    """Returns |∇f| after 1000 and after 2000 steps of AMSGrad, in which each of 5 workers has its own true weights.
    ``fields`` are further fields of `GQSGDConfig`."""
    problem = LogisticRegression(
        dimension=100, rows=500, parts=5, spread=1.0, scale=0.3, regularisation=0.1, dtype=torch.float64
    )
    if memory:
        fields["memory"] = memory
    given: dict[str, Any] = {"block_size": 104, "record_every": 20, "progress": False, **fields}
    run = simulate(preset, problem, workers=5, steps=2000, optimizer=_amsgrad, **given)
    norms = run.metrics["gradient_norm"]
    return float(norms[run.step == 1000][0]), float(norms[-10:].mean())


def cd_adam() -> Iterator[Row]:
    """CD-Adam's linear convergence."""
    middle, end = _slopes("cd_adam")
    others = _slopes("comp_ams")
    words = f"{middle:.2g} after 1000 steps, {end:.2g} after 2000"
    yield Row("converges to a stationary point at one bit: |∇f| goes on falling", words, end < middle / 5)
    words = f"{others[0]:.2g} and {others[1]:.2g}"
    yield Row("error feedback (COMP-AMS) stands still, well above", words, others[1] > max(10 * end, others[0] / 2))


def comp_ams() -> Iterator[Row]:
    """COMP-AMS against signs without memory."""
    found = _slopes("comp_ams")[1]
    naive = _slopes("comp_ams", "none")[1]
    yield Row("error feedback is needed: |∇f| a tenth of that without", f"{found:.2g}, {naive:.2g}", found < naive / 10)
    yield Row("at one bit, |∇f| comes within 0.01", f"{found:.2g}", found < 0.01)


@cache
def _digits(preset: str, fields: tuple[tuple[str, Any], ...] = ()) -> tuple[float, float]:
    """Returns loss and accuracy on the digits after 300 steps of 4 workers with batches of 32."""
    run = simulate(preset, DigitsMLP(), workers=4, steps=300, lr=0.2, progress=False, **dict(fields))
    return run.last(), run.last("accuracy")


def trained(name: str) -> Iterator[Row]:
    """A system on the digits, against no compression. ``name`` is the name of its preset."""
    exact = _digits("ddp")
    found = _digits(name)
    yield Row(
        "digits: accuracy within 3 points of no compression",
        f"{found[1]:.3f}, {exact[1]:.3f}",
        found[1] > exact[1] - 0.03,
    )


def fed_back(name: str) -> Iterator[Row]:
    """Error feedback on the digits."""
    yield from trained(name)
    without: Sequence[tuple[str, Any]] = (("memory", "none"),)
    without = (*without, ("memory_down", "none")) if name == "signsgd_ef" else without
    loss = _digits(name)[0]
    lost = _digits(name, tuple(without))[0]
    yield Row("without its memory, the loss is larger", f"{loss:.3g}, {lost:.3g}", lost > 1.3 * loss)


def walk(distance: float, numel: int = 4096, steps: int = 8) -> list[Tensor]:
    """Returns ``steps`` + 1 vectors of norm sqrt(numel), each at a relative ``distance`` from the previous one."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(numel, generator=generator)]
    for _ in range(steps):
        moved = vectors[-1] + distance * torch.randn(numel, generator=generator)
        vectors.append(moved * math.sqrt(numel) / moved.norm())
    return vectors


def squared_error(vectors: list[Tensor], **fields: Any) -> float:
    """Returns the mean relative squared error of one rank's messages, without the first three, in which a reference
    builds up."""
    fields = {"bits": 3, "codec": "linear", "reducer": "gather", "block_size": 256, **fields}
    rank = virtual(1, vectors[0].numel(), **fields)
    errors = [relative_error(rank.mean([vector], step), [vector]) ** 2 for step, vector in enumerate(vectors)]
    return sum(errors[3:]) / len(errors[3:])


def wyner_ziv() -> Iterator[Row]:
    """Differences to a shared reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)  # the warning is about the worst gradient
        errors = {distance: squared_error(walk(distance), memory=LATEST) for distance in (0.1, 0.3)}
    plain = squared_error(walk(0.1))
    ratio = errors[0.3] / errors[0.1]
    yield Row(
        "the error follows the squared distance to the reference: 9 times from .1 to .3", f"{ratio:.3g}", 6 < ratio < 12
    )
    yield Row("and not the gradient's size", f"{errors[0.1]:.3g}, plain codes {plain:.3g}", errors[0.1] < 0.05 * plain)


def half_a_bit() -> Iterator[Row]:
    """Signs of half of the rotated coordinates, which are also unbiased."""
    numel, steps = 1024, 400
    x = normal(0, numel) ** 3
    ranks = SubspaceRanks(1, numel, 0.5, x.dtype, remembers=False, codec="eden", bits=1, block_size=512)
    total = torch.zeros(numel, dtype=torch.float64)
    squares = 0.0
    for step in range(steps):
        error = (ranks.mean([x], step) - x).double()
        total += error
        squares += float(error.square().sum()) / steps
    left = steps * float((total / steps).square().sum()) / squares
    words = f"unbiased at {ranks.wire_bits:.2f} bits: the mean of {steps} steps has 1/{steps} of the squared error"
    yield Row(words, f"{left:.2f}/{steps}", abs(left - 1) < 0.3)
    omega = 2 * math.pi / 2 - 1
    found = squares / float(x.square().sum())
    yield Row(f"its error is (1 + ω)/s - 1 = {omega:.2f}", f"{found:.2f}", abs(found - omega) < 0.1 * omega)


def dq_psgd() -> Iterator[Row]:
    """DQ-PSGD's codes, and the mean of its iterates."""
    yield from codecs.dq_psgd()
    yield from half_a_bit()
    problem = LeastSquares(dimension=64, rows=4000, batch=8, noise=4.0)
    means: list[AveragedModel] = []

    def made(parameters: list[Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.05)
        model = torch.nn.ParameterList(parameters)
        means.append(AveragedModel(model))
        optimizer.register_step_post_hook(lambda *_: means[0].update_parameters(model))
        return optimizer

    last = simulate("dq_psgd", problem, workers=4, steps=600, optimizer=made, progress=False).last("excess")
    (mean,) = means[0].module.parameters()
    excess = problem.metrics(mean.detach())["excess"]
    yield Row(
        "the mean of all iterates is nearer to the optimum than the last one",
        f"excess {excess:.2g}, {last:.2g}",
        excess < last / 3,
    )


def terngrad() -> Iterator[Row]:
    """TernGrad on the digits."""
    yield from codecs.terngrad()
    yield from trained("terngrad")
