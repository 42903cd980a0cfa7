"""The smallest experiments of codecs: errors, non-zeros and bits of messages against the papers' bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from lightning_gqsgd.research import theory
from lightning_gqsgd.research.experiments.rows import Row, bias, message, normal, virtual
from lightning_gqsgd.research.simulation import average, relative_error

#: Relative L2 errors of one mean of 8 normal gradients, in percent: docs/preset_errors.md, n = 8.
_ERRORS = {"gqsgd": 0.80, "gqsgd_4bit": 13.6, "gqsgd_3bit": 29.6, "gqsgd_2bit": 51.2, "gqsgd_trellis": 42.5}


def own(name: str) -> Iterator[Row]:
    """The package's own presets: no bias, and the error that the pages have."""
    yield bias(name)
    gradients = [normal(rank, 1 << 16) for rank in range(8)]
    error = 100 * relative_error(average(gradients, preset=name)[0], gradients)
    if name in _ERRORS:
        stated = _ERRORS[name]
        yield Row(f"{stated:.3g} % error on 8 normal gradients", f"{error:.3g} %", error < 1.05 * stated)


def sums() -> Iterator[Row]:
    """Sums of codes under shared scales of blocks."""
    yield bias("gqsgd_sum")
    worst = [torch.ones(1024)] * 8
    mean = torch.stack([average(worst, preset="gqsgd_sum", step=step)[0] for step in range(20)])
    yield Row(
        "sums at the maximum cannot overflow", f"{float(mean.mean()):.4f} of 1", abs(float(mean.mean()) - 1) < 0.01
    )


def exact_exponential() -> Iterator[Row]:
    """Exponential codes with three mantissa bits."""
    yield bias("gqsgd_exponential")
    omega = message(normal(0, 1 << 14), "gqsgd_exponential", 10, reducer="gather")[0]
    bound = theory.omega_exponential(256, 127, 3)
    yield Row(f"ω ≤ {bound:.3g}", f"{omega:.3g}", omega < bound)


def tree(preset: str) -> Iterator[Row]:
    """Powers of two added in pairs, as Global-QSGD's exponential operator adds them: no bias, and noise that does not
    fall with the number of ranks."""
    yield bias(preset, ranks=4)
    x = normal(0, 1 << 14)
    for ranks in (4, 16):
        error = relative_error(average([x] * ranks, preset=preset)[0], [x]) ** 2
        bound = theory.tree_second_moment(ranks, aligned=True)
        yield Row(f"n = {ranks}, equal gradients: θ ≤ {bound:.3g}", f"{error:.3g}", error < bound)


def linear() -> Iterator[Row]:
    """Global-QSGD's linear operator under the norm of all ranks' gradients together."""
    yield bias("global_qsgd_linear")
    dimension = 2048
    for ranks in (4, 16):
        flat = [torch.ones(dimension)] * ranks
        fields = {"levels": 1, "norm": "l2", "norm_over_ranks": "l2"}
        of_all = virtual(ranks, dimension, "global_qsgd_linear", **fields)
        theta = 0.0
        nonzeros = 0.0
        for step in range(20):
            mean = of_all.mean(flat, step).double()
            theta += float((mean - 1).square().sum()) / dimension / 20
            nonzeros += float(mean.sum()) * ranks / math.sqrt(ranks * dimension) / 20  # codes are 0 or 1
        bound = theory.theta_linear(dimension, ranks, 1)
        yield Row(
            f"n = {ranks}, flat gradients, s = 1: θ is √d/(√n s) = {bound:.3g}, √n more than in print",
            f"{theta:.3g}",
            0.9 * bound < theta < 1.1 * bound,
        )
        separate = ranks * message(flat[0], "qsgd", 20, bits=2, levels=1, norm="l2", block_size=dimension)[1]
        yield Row(
            f"up to √n = {math.sqrt(ranks):.3g} times fewer non-zero codes than QSGD at equal s",
            f"{separate / nonzeros:.3g} times fewer",
            0.85 * math.sqrt(ranks) < separate / nonzeros < 1.15 * math.sqrt(ranks),
        )


def qsgd() -> Iterator[Row]:
    """QSGD's variance."""
    yield bias("qsgd")
    dimension = 4096
    for levels, bits in ((1, 2), (4, 4), (16, 6)):
        fields = {"levels": levels, "bits": bits, "block_size": dimension, "norm": "l2"}
        omega = message(normal(0, dimension) ** 3, "qsgd", 20, **fields)[0]
        bound = min(dimension / levels**2, math.sqrt(dimension) / levels)
        yield Row(f"s = {levels}: ω ≤ min(d/s², √d/s) = {bound:.3g}", f"{omega:.3g}", omega < bound)


def qsgd_elias() -> Iterator[Row]:
    """QSGD's sparsity, and the length of its codes."""
    dimension = 4096
    for levels, bits in ((1, 2), (64, 8)):
        fields = {"levels": levels, "bits": bits, "block_size": dimension}
        _, nonzeros, total = message(normal(0, dimension) ** 3, "qsgd_elias", 10, **fields)
        most = levels * (levels + math.sqrt(dimension))
        yield Row(f"s = {levels}: E nnz ≤ s (s + √d) = {most:.0f}", f"{nonzeros:.0f}", nonzeros < most)
        bound = theory.elias_bits_bound(dimension, levels)
        yield Row(f"s = {levels}: at most {bound:.0f} bits (theorem 3.2)", f"{total:.0f}", total < bound)
    yield Row("s = √d: 2.8 bits per coordinate and 32", f"{total / dimension:.2f}", total < 2.8 * dimension + 32)


def natural_compression() -> Iterator[Row]:
    """Natural compression's variance, and its levels."""
    yield bias("natural_compression", reducer="gather")
    x = normal(1, 10_000) * torch.exp(2 * normal(2, 10_000))
    omega = message(x, "natural_compression", 20, reducer="gather")[0]
    yield Row("ω ≤ 1/8", f"{omega:.3g}", 0.05 < omega < 1 / 8)
    found = average([x], preset="natural_compression", reducer="gather")[0]
    below = torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)
    ratios = sorted(set((found.abs() / below).tolist()))
    yield Row("rounds to the power of two below or above", f"ratios to the one below: {ratios}", ratios == [1.0, 2.0])


def natural_dithering() -> Iterator[Row]:
    """Powers of two against uniform levels."""
    dimension = 10_000
    x = normal(1, dimension) * torch.exp(2 * normal(2, dimension))

    def omega(preset: str, levels: int) -> float:
        return message(x, preset, 20, norm="l2", bits=5, levels=levels, block_size=dimension)[0]

    natural = omega("natural_dithering", 8)
    uniform = omega("qsgd", 8)
    yield Row(
        "8 levels: much less variance than 8 uniform ones", f"{natural:.3g}, {uniform:.3g}", uniform > 5 * natural
    )
    natural = omega("natural_dithering", 4)
    most = uniform + 1 / 8
    yield Row(
        f"4 levels: at most 1/8 more than 2³ uniform ones, {most:.3g}", f"{natural:.3g}", 0.9 * uniform < natural < most
    )


def dq_psgd() -> Iterator[Row]:
    """A rotation before stochastic levels."""
    yield bias("dq_psgd", reducer="gather")
    x = normal(0, 1024) ** 3
    for bits in (3, 5):
        fields = {"bits": bits, "levels": 2 ** (bits - 1) - 1, "block_size": 1024, "reducer": "gather"}
        rotated, plain = (message(x, "dq_psgd", 20, rotation=rotation, **fields)[0] for rotation in (True, False))
        yield Row(
            f"{bits} bits, heavy tails: a rotation leaves less error",
            f"{rotated:.3g}, {plain:.3g}",
            rotated < plain / 3,
        )


def eden(name: str) -> Iterator[Row]:
    """EDEN and DRIVE: the same error for every gradient, and no error along the gradient."""
    stated = {"drive": 0.571, "eden": 0.133}[name]
    for kind, x in (("normal", normal(0, 1 << 14)), ("heavy-tailed", normal(0, 1 << 14) ** 3)):
        omega = message(x, name, 8)[0]
        yield Row(f"ω = {stated}, {kind} coordinates", f"{omega:.3g}", abs(omega - stated) < 0.05 * stated)
        found = average([x[:4096].clone()], preset=name)[0].double()
        along = float(found @ x[:4096].double() / x[:4096].double().square().sum())
        yield Row("⟨x̂, x⟩ = |x|² in every message, but for the scale's rounding", f"{along:.4f}", abs(along - 1) < 0.01)


def terngrad() -> Iterator[Row]:
    """TernGrad's three levels, without bias before it clips."""
    yield bias("terngrad", clip=0.0)
    mean = average([normal(0, 4096)], preset="terngrad")[0]
    levels = len(mean.abs().unique())
    yield Row("codes are -1, 0 and 1 times one scale of a layer", f"{levels - 1} magnitude beside 0", levels == 2)
