"""Problems for simulated training: small, seeded, with the gradients of any number of workers at once.

For any number of workers, the mean of the workers' gradients is the gradient of one loss (with batches, in
expectation), so runs with different numbers of workers can be compared. Data come from generators with fixed seeds, and
batches depend only on the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_gqsgd.errors import ConfigError, check_at_least, import_optional
from lightning_gqsgd.kernels.layout import Segment

#: Parameters with fewer coordinates are sent uncompressed, as by default in training.
MIN_NUMEL = 1024


class Problem(Protocol):
    """A training problem for `virtual.simulate`."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The parameters in the flat vector x of d coordinates, in order."""
        ...

    def start(self) -> Tensor:
        """Returns the initial x, [d]. All other tensors have its dtype."""
        ...

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step, [workers, d]; ``x`` is one point for all, [d], or a point for each
        worker, [workers, d]."""
        ...

    def loss(self, x: Tensor) -> float:
        """Returns the objective, which is minimised."""
        ...

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns more metrics, with the same names in every call."""
        ...


@dataclass
class Quadratic:
    """f_i(x) = ½ (x - b_i)ᵀ A (x - b_i) with a diagonal A; the optimum is the mean of all b_i, which is the same for
    any number of workers.

    Args:
        dimension: d.
        condition: ratio of A's largest eigenvalue, 1, to its smallest.
        noise: standard deviation of the noise in each coordinate of a gradient.
        spread: standard deviation of each coordinate of b_i over workers; with 0, all workers have the same optimum.
        seed: seed of all random numbers.
        dtype: dtype of x; fp32 or fp64.

    The loss is f(x) minus its minimum. Metrics: ``distance`` to the optimum and ``gradient_norm``, both l2.
    """

    dimension: int = 1000
    condition: float = 100.0
    noise: float = 0.0
    spread: float = 0.0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_at_least(1, dimension=self.dimension, condition=self.condition)
        check_at_least(0, noise=self.noise, spread=self.spread)
        self.segments = [Segment(0, self.dimension, raw=False)]
        self.eigenvalues = torch.logspace(0, -math.log10(self.condition), self.dimension, dtype=self.dtype)
        self.optimum = torch.randn(self.dimension, generator=generator_of(self.seed, 0), dtype=self.dtype)
        self._offsets: dict[int, Tensor] = {}

    def start(self) -> Tensor:
        """Returns zeros, [d]."""
        return torch.zeros(self.dimension, dtype=self.dtype)

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step, [workers, d], at one point [d] or at one for each [workers, d]."""
        gradients = (x - self.optimum - self._offset(workers)) * self.eigenvalues
        if self.noise:
            generator = generator_of(self.seed, 4, step)
            gradients += self.noise * torch.randn(gradients.shape, generator=generator, dtype=self.dtype)
        return gradients

    def loss(self, x: Tensor) -> float:
        """Returns f(x) minus its minimum."""
        return float(((x - self.optimum).square() * self.eigenvalues).sum() / 2)

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns the ``distance`` to the optimum and the ``gradient_norm``, both l2."""
        away = x - self.optimum
        return {"distance": float(away.norm()), "gradient_norm": float((away * self.eigenvalues).norm())}

    def _offset(self, workers: int) -> Tensor:
        """Returns b_i minus their mean, [workers, d]."""
        if workers not in self._offsets:
            shape = (workers, self.dimension)
            # A separate use of the seed, which shares no random number with the optimum.
            offset = self.spread * torch.randn(shape, generator=generator_of(self.seed, 3), dtype=self.dtype)
            self._offsets = {workers: offset - offset.mean(0)}
        return self._offsets[workers]


@dataclass(kw_only=True)
class _LinearModel:
    """Rows a_r with targets y_r: f(x) = mean over r of l(a_rᵀ x, y_r) + ½ λ |x|².

    Args:
        dimension: d.
        rows: number of rows, divided among the workers in order, as evenly as possible.
        batch: number of rows of one worker's gradient, drawn from its own rows with replacement; None means all of its
            rows.
        spread: how much the true weights differ: in each of ``parts`` equal runs of rows, a normal number of this
            standard deviation is added to each coordinate of the weights. If there are as many workers as parts, each
            has its own true weights.
        parts: see ``spread``.
        noise: noise of the targets.
        scale: standard deviation of the coordinates of a_r.
        regularisation: λ.
        seed: seed of all random numbers.
        dtype: dtype of x; fp32 or fp64.
    """

    dimension: int
    rows: int
    batch: int | None = None
    spread: float = 0.0
    parts: int = 10
    noise: float
    scale: float = 1.0
    regularisation: float = 0.0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_at_least(1, dimension=self.dimension, rows=self.rows, parts=self.parts, batch=self.batch or 1)
        check_at_least(0, spread=self.spread, noise=self.noise, scale=self.scale, regularisation=self.regularisation)
        self.segments = [Segment(0, self.dimension, raw=False)]
        generator = generator_of(self.seed, 0)
        self.features = self.scale * torch.randn(self.rows, self.dimension, generator=generator, dtype=self.dtype)
        self.truth = torch.randn(self.dimension, generator=generator, dtype=self.dtype)
        moved = torch.randn(self.parts, self.dimension, generator=generator, dtype=self.dtype)
        part = torch.arange(self.rows) * self.parts // self.rows
        weights = self.truth + self.spread * moved[part]
        noise = self.noise * torch.randn(self.rows, generator=generator, dtype=self.dtype)
        self.targets = self._targets((self.features * weights).sum(1), noise)

    def start(self) -> Tensor:
        """Returns zeros, [d]."""
        return torch.zeros(self.dimension, dtype=self.dtype)

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step, [workers, d], at one point [d] or at one for each [workers, d]."""
        first = _dealt(self.rows, workers)
        # Weights for workers that have one row more than others, so that the mean of gradients is the mean over all
        # rows.
        shares = first.diff().to(x) * workers / self.rows
        if self.batch is None:
            bounds = first.tolist()
            parts = list(zip(bounds[:-1], bounds[1:], strict=True))
            if x.ndim == 1:
                scores = self.features @ x
            else:
                scores = torch.cat([self.features[lo:hi] @ point for (lo, hi), point in zip(parts, x, strict=True)])
            slopes = self._slopes(scores, self.targets)
            of_workers = [self.features[lo:hi].T @ slopes[lo:hi] / (hi - lo) for lo, hi in parts]
            return torch.stack(of_workers) * shares[:, None] + self.regularisation * x
        rows = _drawn(first, self.batch, generator_of(self.seed, 1, step))
        features = self.features[rows]
        scores = features @ x if x.ndim == 1 else torch.einsum("nbd,nd->nb", features, x)
        slopes = self._slopes(scores, self.targets[rows])
        means = torch.einsum("nb,nbd->nd", slopes, features) / self.batch
        return means * shares[:, None] + self.regularisation * x

    def loss(self, x: Tensor) -> float:
        """Returns f(x)."""
        losses = self._losses(self.features @ x, self.targets)
        return float(losses.mean() + self.regularisation / 2 * x.square().sum())

    def _gradient(self, x: Tensor) -> Tensor:
        """Returns the gradient of f, [d]."""
        slopes = self._slopes(self.features @ x, self.targets)
        return self.features.T @ slopes / self.rows + self.regularisation * x

    def _targets(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Returns the targets y for the scores a_rᵀ w and for noise, [rows]."""
        raise NotImplementedError

    def _losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss l(a_rᵀ x, y_r) of each row."""
        raise NotImplementedError

    def _slopes(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Returns the derivative of l with respect to a_rᵀ x."""
        raise NotImplementedError


@dataclass(kw_only=True)
class LeastSquares(_LinearModel):
    """Linear regression, l = ½ (a_rᵀ x - y_r)²; see `_LinearModel` for the arguments.

    Metrics: ``excess``, the loss minus its minimum; ``distance`` to ``truth``, the true weights (the part that all rows
    share); ``gradient_norm``. ``optimum`` and ``smoothness``, the largest eigenvalue of the Hessian, are attributes.
    """

    dimension: int = 256
    rows: int = 10_000
    noise: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        features = self.features.double()
        hessian = features.T @ features / self.rows + self.regularisation * torch.eye(self.dimension).double()
        self.optimum = torch.linalg.solve(hessian, features.T @ self.targets.double() / self.rows).to(self.dtype)
        self.smoothness = float(torch.linalg.eigvalsh(hessian)[-1])

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns ``excess``, the loss minus its minimum, the ``distance`` to ``truth``, and the ``gradient_norm``."""
        away = x - self.optimum
        squares = (self.features @ away).square().mean() + self.regularisation * away.square().sum()
        return {
            "excess": float(squares / 2),
            "distance": float((x - self.truth).norm()),
            "gradient_norm": float(self._gradient(x).norm()),
        }

    def _targets(self, scores: Tensor, noise: Tensor) -> Tensor:
        return scores + noise

    def _losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        return (scores - targets).square() / 2

    def _slopes(self, scores: Tensor, targets: Tensor) -> Tensor:
        return scores - targets


@dataclass(kw_only=True)
class LogisticRegression(_LinearModel):
    """Two classes, y = -1 or 1, l = log(1 + exp(-y_r a_rᵀ x)); see `_LinearModel` for the arguments.

    Metrics: ``accuracy`` on all rows, ``gradient_norm``.
    """

    dimension: int = 100
    rows: int = 1000
    noise: float = 1.0
    regularisation: float = 0.1

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns the ``accuracy`` on the rows, 0 to 1, and the ``gradient_norm``."""
        right = (self.features @ x) * self.targets > 0
        return {"accuracy": float(right.double().mean()), "gradient_norm": float(self._gradient(x).norm())}

    def _targets(self, scores: Tensor, noise: Tensor) -> Tensor:
        return torch.where(scores + noise > 0, 1.0, -1.0).to(self.dtype)

    def _losses(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.softplus(-targets * scores)

    def _slopes(self, scores: Tensor, targets: Tensor) -> Tensor:
        return -targets * torch.sigmoid(-targets * scores)


@dataclass
class DigitsMLP:
    """scikit-learn's digits, 1400 for training and 397 for testing, and a network 64-``hidden``-10 with ReLU.

    Args:
        batch: number of samples of one worker's gradient, drawn from its own samples with replacement.
        hidden: width of the hidden layer.
        by_label: whether to divide the samples among workers in the order of their labels, so that workers differ.
        seed: seed of all random numbers.
        dtype: dtype of x; fp32 or fp64.

    The loss is the cross entropy of the training samples. Metrics: ``accuracy`` on the test samples.

    Raises:
        PackageError: if scikit-learn is missing.
    """

    batch: int = 32
    hidden: int = 128
    by_label: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.float32

    TRAINING = 1400

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch, hidden=self.hidden)
        instead = "take the problem least_squares"
        digits = import_optional("sklearn.datasets", "scikit-learn", "the problem digits", instead).load_digits()
        order = torch.randperm(len(digits.target), generator=generator_of(self.seed, 0))
        images = torch.from_numpy(digits.data).to(self.dtype)[order] / 16
        labels = torch.from_numpy(digits.target).long()[order]
        self._test = images[self.TRAINING :], labels[self.TRAINING :]
        images = images[: self.TRAINING]
        labels = labels[: self.TRAINING]
        if self.by_label:
            order = labels.argsort(stable=True)
            images = images[order]
            labels = labels[order]
        self._images = images
        self._labels = labels
        self._shapes = [(64, self.hidden), (self.hidden,), (self.hidden, 10), (10,)]
        sizes = [math.prod(shape) for shape in self._shapes]
        self.segments = [Segment(number, size, raw=size < MIN_NUMEL) for number, size in enumerate(sizes)]

    def start(self) -> Tensor:
        """Returns weights and biases as `torch.nn.Linear` draws them: uniform up to 1/√(number of inputs)."""
        generator = generator_of(self.seed, 1)
        parts = []
        for shape, inputs in zip(self._shapes, (64, 64, self.hidden, self.hidden), strict=True):
            uniform = torch.rand(math.prod(shape), generator=generator, dtype=self.dtype) * 2 - 1
            parts.append(uniform / math.sqrt(inputs))
        return torch.cat(parts)

    def gradients(self, x: Tensor, step: int, workers: int) -> Tensor:
        """Returns each worker's gradient in a step, [workers, d], at one point [d] or at one for each [workers, d]."""
        first = _dealt(len(self._labels), workers)
        rows = _drawn(first, self.batch, generator_of(self.seed, 2, step))
        each = x.detach().expand(workers, -1).clone().requires_grad_()
        losses = F.cross_entropy(
            self._logits(each, self._images[rows]).flatten(0, 1), self._labels[rows].flatten(), reduction="none"
        )
        shares = first.diff().to(x) * workers / len(self._labels)
        return torch.autograd.grad((losses.view(workers, -1).mean(1) * shares).sum(), each)[0]

    def loss(self, x: Tensor) -> float:
        """Returns the mean cross-entropy of the training samples."""
        return float(F.cross_entropy(self._logits(x[None], self._images[None])[0], self._labels))

    def metrics(self, x: Tensor) -> dict[str, float]:
        """Returns the ``accuracy`` on the test images, 0 to 1."""
        images, labels = self._test
        right = self._logits(x[None], images[None])[0].argmax(1) == labels
        return {"accuracy": float(right.double().mean())}

    def _logits(self, x: Tensor, images: Tensor) -> Tensor:
        """Returns the logits [workers, samples, 10] of parameters [workers, d] and images [workers, samples, 64]."""
        flat = x.split([segment.numel for segment in self.segments], dim=1)
        into, bias, out, last = (part.view(-1, *shape) for part, shape in zip(flat, self._shapes, strict=True))
        return torch.relu(images @ into + bias[:, None]) @ out + last[:, None]


def generator_of(*numbers: int) -> torch.Generator:
    """Returns a separate generator for each tuple of a seed, a use and, optionally, a step.

    Torch's generator on the CPU uses only the low 32 bits of a seed, so these have to depend on the whole tuple: the
    tuple is hashed by the finaliser of SplitMix64 (Steele, Lea, Flood 2014). With seed 0, the uses 0 to 2 are not
    hashed. The step is their seed, and they share their random numbers in a step.
    """
    seed, use, step = (*numbers, 0)[:3]
    number = ((seed * 8 + use) << 32) + step
    return torch.Generator().manual_seed(_hashed(number) if seed or use > 2 else step)


def _hashed(number: int) -> int:
    """Returns 64 bits. Each of them depends on all bits of a number modulo 2⁶⁴."""
    mask = 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def _dealt(rows: int, workers: int) -> Tensor:
    """Returns the first row of each worker, and the number of rows: [workers + 1]."""
    if workers > rows:
        raise ConfigError(f"workers={workers} are more than the {rows} rows of the problem; take at most {rows}")
    return torch.arange(workers + 1) * rows // workers


def _drawn(first: Tensor, batch: int, generator: torch.Generator) -> Tensor:
    """Draws row numbers, ``batch`` of each worker's own rows: [workers, batch]."""
    uniform = torch.rand(len(first) - 1, batch, generator=generator, dtype=torch.float64)
    return first[:-1, None] + (uniform * first.diff()[:, None]).long()
