"""Error constants, message sizes and lower bounds, as plain functions of a few numbers.

Notation: n ranks with gradients x_1 to x_n of d coordinates, mean x̄, A = (1/n) Σ_i |x_i|² (l2 norms), so that
|x̄|² <= A, with equality for equal gradients. Roundings of different ranks, and of different stages, are independent.

* ω of one unbiased quantiser: E|Q(x) - x|² <= ω |x|².
* θ of an unbiased estimate G of the mean: E|G - x̄|² <= θ A (the class U^{n,d}(θ) of Global-QSGD, arXiv 2305.18627,
  which writes A as |x|²_{2,2}/n).

Formulas without a source are derived in the docstring of their function. The formulas for ω need a scale between the
largest magnitude and the l2 norm of the scaled numbers: the maximum norm, the l2 norm, or any norm in between.
`dimension_together` also covers a larger scale, the sum of all ranks' norms.
"""

from __future__ import annotations

import math

from lightning_gqsgd.codecs.variance import (
    best_alpha,
    dimension_together,
    gaussian_distortion,
    mean_variance_companded,
    omega_companded,
    omega_eden,
    omega_exponential,
    omega_linear,
    omega_subtractive,
    relative_variance,
    smallest_level,
    stability,
    variance_companded,
)
from lightning_gqsgd.errors import ConfigError, check_at_least, check_positive, check_whole

__all__ = [
    "bits_at",
    "ceo_rate",
    "convergence_factor",
    "dimension_together",
    "distortion_of_rate",
    "elias_bits_bound",
    "expected_nonzeros",
    "gap",
    "independent_rate",
    "rate_distortion",
    "sum_bits_exponential",
    "sum_bits_linear",
    "theta_exponential",
    "theta_independent",
    "theta_linear",
    "theta_two_shot",
    "tree_second_moment",
    "best_alpha",
    "gaussian_distortion",
    "mean_variance_companded",
    "omega_companded",
    "omega_eden",
    "omega_exponential",
    "omega_linear",
    "omega_subtractive",
    "smallest_level",
    "stability",
    "variance_companded",
]


def theta_linear(dimension: int, ranks: int, levels: int, norm_over_ranks: str = "max") -> float:
    """Returns θ of linear dithering under one scale for all ranks: ω(nd)/n = min(d/(4s²), sqrt(d)/(sqrt(n) s)).

    Under a shared scale, rounding the n gradients is rounding their concatenation X, of nd coordinates:
    G = (1/n) Σ_i [Q(X)]_i. The blocks' errors are independent with mean zero, so
    E|G - x̄|² = (1/n²) Σ_i E|[Q(X)]_i - x_i|² = (1/n²) E|Q(X) - X|² <= ω(nd)/n² |X|². Since |X|² = n A, θ = ω(nd)/n:
    sqrt(nd)/(n s) = sqrt(d)/(sqrt(n) s), and nd/(4s² n).

    The published constant of this operator, sqrt(d)/(n s), lacks the n under the root: it is ω(d)/n, the constant of n
    quantisers that each have their own scale (QSGD; `theta_independent`). It is too small here: with nd equal
    magnitudes and s = 1 under the l2 norm, y = (nd)^-½ for each and the error is (sqrt(nd) - 1)/n A exactly. At d =
    10⁴, n = 64 that is 12.48, below 12.50 from this function and well above sqrt(d)/n = 1.56.

    Under the sum of the ranks' norms, it is ω(n²d)/n = min(nd/(4s²), sqrt(d)/s); see `dimension_together`.

    Args:
        dimension: coordinates d of one rank that share a scale.
        ranks: n.
        levels: s on each side of zero.
        norm_over_ranks: ``"max"``, ``"l2"`` or ``"l1"``.

    Raises:
        ConfigError: if an argument is no integer or below 1.
    """
    return omega_linear(dimension_together(dimension, ranks, norm_over_ranks), levels) / ranks


def theta_exponential(
    dimension: int, ranks: int, levels: int, mantissa: int = 0, norm_over_ranks: str = "max"
) -> float:
    """Returns θ of exponential dithering under one scale for all ranks, codes summed exactly: ω(nd)/n, as in
    `theta_linear`.

    h²/(4(1+h))/n + u min(1, u)/n with u = sqrt(nd) l, l the smallest level. The published form of u/n is sqrt(d) l/n,
    again without the n under the root. If partial sums are rounded, θ is larger: `tree_second_moment`.

    Args:
        dimension: coordinates d of one rank that share a scale.
        ranks: n.
        levels: number of non-zero magnitudes S.
        mantissa: m, bits between two powers of two, 0 to 52.
        norm_over_ranks: ``"max"``, ``"l2"`` or ``"l1"``; see `dimension_together`.

    Raises:
        ConfigError: if an argument is no integer or out of range.
    """
    return omega_exponential(dimension_together(dimension, ranks, norm_over_ranks), levels, mantissa) / ranks


def theta_independent(omega: float, ranks: int) -> float:
    """Returns θ of the exact mean of n gradients, each quantised separately: ω/n.

    (1/n²) Σ_i E|Q_i(x_i) - x_i|² <= (1/n²) ω Σ_i |x_i|² = (ω/n) A.

    Args:
        omega: ω of one quantiser in the dimension d of one block.
        ranks: n.

    Raises:
        ConfigError: if ``omega`` is negative or not finite, or if ``ranks`` is no integer or below 1.
    """
    check_at_least(0, omega=omega)
    check_whole(ranks=ranks)
    return omega / ranks


def theta_two_shot(omega_up: float, omega_down: float, ranks: int) -> float:
    """Returns θ of quantising n gradients, averaging them exactly and quantising the mean again: ω_up/n + ω_down (1 +
    ω_up/n).

    Let m be the mean of the quantised gradients: E m = x̄ and E|m - x̄|² <= (ω_up/n) A. The second rounding adds
    E|Q(m) - m|² <= ω_down E|m|² <= ω_down (|x̄|² + (ω_up/n) A), and no cross term, since its mean given m is zero:

        E|Q(m) - x̄|² <= (1 + ω_down) (ω_up/n) A + ω_down |x̄|².

    A rank that averages a shard knows its own gradient exactly. The bound ignores this; if all ranks' gradients have
    the same norm, it would multiply the first term by (n-1)/n.

    |x̄|² <= A gives θ. It is attained only if |x̄|² = A, so for equal gradients. For independent gradients with mean
    zero, |x̄|² is about A/n, and the whole error is of the order of A/n. For n to infinity, θ tends to ω_down.

    Args:
        omega_up: ω of the ranks' quantisers.
        omega_down: ω of the quantiser of the mean.
        ranks: n.

    Raises:
        ConfigError: if an ω is negative or not finite, or if ``ranks`` is no integer or below 1.
    """
    check_at_least(0, omega_up=omega_up, omega_down=omega_down)
    up = theta_independent(omega_up, ranks)
    return up + omega_down * (1 + up)


def convergence_factor(theta: float, ranks: int) -> float:
    """Returns the factor 1 + θn by which SGD's noise floor, and at most its number of steps to a given accuracy, grow.

    Stated for U^{n,d}(θ) by Global-QSGD (arXiv 2305.18627). Let f = (1/n) Σ f_i be L-smooth, g_i unbiased with
    variance σ², (1/n) Σ|∇f_i|² <= |∇f|² + ζ². With E|G|² = E|ḡ|² + E|G - ḡ|² and E|ḡ|² <= |∇f|² + σ²/n,
    E|G|² <= (1+θ)|∇f|² + θζ² + (1/n + θ)σ². The descent lemma with steps γ <= 1/(L(1+θ)) then gives

        min_t E|∇f(x_t)|² <= 2(f_0 - f*)/(γT) + γL (θζ² + (1/n + θ)σ²).

    (1/n + θ)σ² is 1 + θn times the σ²/n without compression, and the largest step shrinks by 1 + θ <= 1 + θn, so T
    grows by at most 1 + θn. This holds for ζ = 0, i.e. one distribution on all ranks; otherwise, the floor's factor is
    1 + θn (1 + ζ²/σ²).

    Args:
        theta: θ of the estimate of the mean.
        ranks: n.

    Raises:
        ConfigError: if ``theta`` is negative or not finite, or if ``ranks`` is no integer or below 1.
    """
    check_at_least(0, theta=theta)
    check_whole(ranks=ranks)
    return 1 + theta * ranks


def tree_second_moment(ranks: int, aligned: bool, mantissa: int = 0) -> float:
    """Returns θ of a balanced tree of L = log2(n) pairwise sums, each rounded to 2^k (1 + j/2^m), leaves rounded as
    well.

    Each rounding of a partial sum S adds at most r S², r = h²/(4(1+h)), h = 2^-m (`omega_exponential`): it multiplies
    the second moment by 1 + r, not the variance. Underflow and overflow are left out.

    * aligned, equal gradients: let v be a partial sum's variance over its squared mean. The sum of two has v/2, and
      rounding it adds r (1 + v/2), hence v' = (1+r) v/2 + r, L times from v = r at the leaves. It tends to
      2r/(1-r), 2/7 for m = 0: more ranks do not average this noise away. It bounds all gradients, since the square
      of a sum of 2^k gradients, to which each rounding's error is relative, is at most 2^k times their squares' sum.
    * independent gradients with mean zero: the second moment doubles with each sum and gains 1 + r with each of the
      1 + L roundings, so that the mean's is (1+r)^(1+L) A/n, of which A/n is the mean's own: θ = ((1+r)^(1+L) - 1)/n.

    Args:
        ranks: n, a power of two.
        aligned: equal gradients, the worst case; otherwise independent ones with mean zero, on average over them.
        mantissa: m, 0 to 52.

    Raises:
        ConfigError: if ``ranks`` is no power of two, or if an argument is no integer or out of range.
    """
    check_whole(ranks=ranks)
    check_whole(0, 52, mantissa=mantissa)
    if ranks & (ranks - 1):
        below = 2 ** (ranks.bit_length() - 1)
        raise ConfigError(
            f"ranks={ranks} is not a power of two, so the tree is not balanced; take {below} or {2 * below}"
        )
    depth = ranks.bit_length() - 1
    rounding = relative_variance(mantissa)
    if not aligned:
        return ((1 + rounding) ** (1 + depth) - 1) / ranks
    variance = rounding
    for _ in range(depth):
        variance = (1 + rounding) * variance / 2 + rounding
    return variance


def expected_nonzeros(dimension: int, ranks: int, levels: int, *, shared: bool, exponential: bool = False) -> float:
    """Returns the bound of the expected number of non-zero codes of all n ranks together, under l2 norms.

    In units of the norm of m coordinates: at most 1/l² of them reach the smallest level l, and each of the others is
    rounded up with probability y/l, which sums to at most sqrt(m)/l. So at most 1/l² + sqrt(m)/l, and at most m. 1/l is
    s for uniform levels and 2^(s-1) for powers of two. With one norm of all ranks, m = nd, once. With a norm of each
    rank (QSGD, arXiv 1610.02132, lemma 3.1), m = d, n times.

    At equal s, a shared norm has up to sqrt(n) times fewer non-zeros, but its θ is sqrt(n) times larger
    (`theta_linear`); at equal θ, the numbers of non-zeros are about equal. None of this holds for maximum norms.

    Args:
        dimension: coordinates d of one rank that share a scale.
        ranks: n.
        levels: s, levels on each side of zero.
        shared: one l2 norm over all ranks rather than one for each.
        exponential: levels are powers of two rather than uniform.

    Raises:
        ConfigError: if an argument is no integer or below 1.
    """
    check_whole(dimension=dimension, ranks=ranks, levels=levels)
    norms, coordinates = (1, ranks * dimension) if shared else (ranks, dimension)
    smallest = smallest_level(levels) if exponential else 1 / levels
    if smallest * smallest * coordinates <= 1:  # the bound is above m, and perhaps above the largest float
        return float(norms * coordinates)
    return norms * min(coordinates, (1 / smallest + math.sqrt(coordinates)) / smallest)


def sum_bits_linear(levels: int, ranks: int) -> int:
    """Returns the bits per coordinate of an all-reduce that adds n codes from -s to s: 1 + ceil(log2(s+1)) + ceil(log2
    n).

    This is Global-QSGD's count: bits for the sign, for s and for the n-fold sum. The sum, -ns to ns, fits in 1 +
    ceil(log2(ns+1)) bits of two's complement, which is the same or one less.

    Args:
        levels: s on each side of zero.
        ranks: n.

    Raises:
        ConfigError: if an argument is no integer or below 1.
    """
    check_whole(levels=levels, ranks=ranks)
    return 1 + _ceil_log2(levels + 1) + _ceil_log2(ranks)


def sum_bits_exponential(levels: int, ranks: int) -> int:
    """Returns the bits per coordinate of an all-reduce that adds n codes of zero and s powers of two: 1 +
    ceil(log2(s+1+log2 n)).

    The sign, and a number for zero, for each of the s powers and for each of the log2 n, rounded up, by which the
    largest grows. The sum stays there in a balanced tree (a sum of two numbers up to 2^k is at most 2^(k+1), a level);
    in another order, roundings up may carry it further.

    Args:
        levels: number of non-zero magnitudes s.
        ranks: n.

    Raises:
        ConfigError: if an argument is no integer or below 1.
    """
    check_whole(levels=levels, ranks=ranks)
    return 1 + _ceil_log2(levels + 1 + _ceil_log2(ranks))


def elias_bits_bound(dimension: int, levels: int) -> float:
    """Returns the bound of the expected bits of a block of d coordinates in QSGD's sparse Elias code under the l2 norm,
    including 32 bits of scale.

    (3 + (3/2 + o(1)) log2(2(s²+d)/(s(s+sqrt d)))) s(s+sqrt d) + 32 (arXiv 1610.02132, theorem 3.2), computed without
    the o(1), which vanishes for large blocks. So strictly, it is no bound for small blocks. At s = sqrt(d) it is 9 d +
    32 bits; for this s, QSGD uses a code without gaps, with 2.8 d + 32 bits.

    Args:
        dimension: d.
        levels: s on each side of zero.

    Raises:
        ConfigError: if an argument is no integer or below 1.
    """
    check_whole(dimension=dimension, levels=levels)
    nonzeros = levels * (levels + math.sqrt(dimension))
    return (3 + 1.5 * math.log2(2 * (levels * levels + dimension) / nonzeros)) * nonzeros + 32


def ceo_rate(distortion: float, ranks: int, signal: float, noise: float) -> float:
    """Returns the smallest number of bits per coordinate, of all ranks together, with which the true gradient is known
    up to a mean square error.

    The quadratic Gaussian CEO problem (sum rate: Oohama, IEEE T-IT 1998; Prabhakaran, Tse and Ramchandran, ISIT 2004).
    X is normal with variance σx², and rank i knows Y_i = X + N_i, the N_i independent with variance σn². Let each send
    Y_i to within an independent normal error of variance q: 1/D = 1/σx² + n/(σn² + q). The messages' joint information
    is ½ log2(1 + nσx²/(σn²+q)) + (n/2) log2((σn²+q)/q), which with q put in terms of D is

        R(D) = ½ log2(σx²/D) - (n/2) log2(1 - (σn²/n)(1/D - 1/σx²)).

    It is 0 for D >= σx², which needs no message, and infinite at 1/(1/σx² + n/σn²), the error if all Y_i are known.
    Estimates that scale the mean down to the least error are included; if σn²/n > σx², the plain mean of the
    uncompressed gradients has D > σx², hence R = 0.

    Args:
        distortion: D, E(estimate - X)² per coordinate, about the true gradient.
        ranks: n.
        signal: σx², variance of the true gradient's coordinates.
        noise: σn², variance of one rank's gradient about the true one; may be 0.

    Raises:
        ConfigError: if ``distortion`` is not above the error of exact messages, or if a variance is out of range.
    """
    _check_source(ranks, signal, noise)
    check_positive(distortion=distortion)
    return _reachable("distortion", distortion, _ceo_rate(distortion, ranks, signal, noise), ranks, signal, noise)


def independent_rate(distortion: float, ranks: int, signal: float, noise: float) -> float:
    """Returns the smallest number of bits per coordinate of all ranks together, if each rank's message is decoded
    separately.

    The same messages, without use of their common information: q follows from 1/D = 1/σx² + n/(σn² + q), and each rank
    pays ½ log2(1 + (σx²+σn²)/q), the information of its message on a source of variance σx² + σn². Dithered scalar
    quantisers with an entropy coder come within ½ log2(2πe/12) = 0.254 bits per rank of it, if the coder knows the
    dither.

    Args:
        distortion: D, E(estimate - X)² per coordinate, about the true gradient.
        ranks, signal, noise: see `ceo_rate`.

    Raises:
        ConfigError: if ``distortion`` is not above the error of exact messages, or if a variance is out of range.
    """
    _check_source(ranks, signal, noise)
    check_positive(distortion=distortion)
    if distortion >= signal:
        return 0.0
    error = ranks * distortion / (1 - distortion / signal) - noise
    rate = ranks / 2 * math.log1p((signal + noise) / error) / math.log(2) if error > 0 else math.inf
    return _reachable("distortion", distortion, rate, ranks, signal, noise)


def distortion_of_rate(bits: float, ranks: int, signal: float, noise: float) -> float:
    """Returns the smallest mean square error about the true gradient, per coordinate, for a sum rate: the inverse of
    `ceo_rate`.

    By bisection between 1/(1/σx² + n/σn²), where the rate is infinite, and σx², where it is 0, to the last bit.

    Args:
        bits: bits per coordinate of all ranks together.
        ranks, signal, noise: see `ceo_rate`.

    Raises:
        ConfigError: if ``bits`` is negative or not finite, or if a variance is out of range.
    """
    _check_source(ranks, signal, noise)
    check_at_least(0, bits=bits)
    low = _least_distortion(ranks, signal, noise)
    high = signal
    while low < (middle := (low + high) / 2) < high:
        if _ceo_rate(middle, ranks, signal, noise) > bits:
            low = middle
        else:
            high = middle
    return high


def gap(bits: float, error: float, ranks: int, signal: float, noise: float) -> float:
    """Returns the bits per coordinate and rank above the CEO bound: ``bits`` - `ceo_rate` (``error``)/n.

    It is at least 0 for messages from the ranks to a decoder that has no gradient itself, on normal coordinates with
    the given variances. Each message is counted once: an all-reduce of codes of b bits counts as b, not as the 2b
    (n-1)/n that a rank sends to reduce and to distribute. The error is about the true gradient; if only e, the codec's
    error about the mean of the ranks' gradients, is known, and the codec is unbiased, it is e + σn²/n.

    Args:
        bits: bits per coordinate that one rank spends, scales included.
        error: E(estimate - X)² per coordinate, about the true gradient.
        ranks, signal, noise: see `ceo_rate`.

    Raises:
        ConfigError: if ``bits`` is negative, if ``error`` is not above the error of exact messages, or if a variance is
            out of range.
    """
    _check_source(ranks, signal, noise)
    check_at_least(0, bits=bits)
    check_positive(error=error)
    return bits - _reachable("error", error, _ceo_rate(error, ranks, signal, noise), ranks, signal, noise) / ranks


def rate_distortion(relative_error: float) -> float:
    """Returns the smallest number of bits per coordinate and rank for the mean of n independent normal gradients, at a
    relative *squared* error.

    Rate-distortion function of a normal source: R bits leave it with at least 2^-2R of its variance, so a relative
    squared error D needs R = ½ log2(1/D). The mean of n such sources, variance 1 and R_i bits each, has the variance
    1/n; given the messages the sources stay independent, so its error is at least (1/n²) Σ 2^(-2 R_i), which by
    convexity is at least 2^-2R/n, R the mean of R_i. Relative to 1/n: 2^-2R, for every n. The same R = ½ log2(1/D).

    Args:
        relative_error: D = E|estimate - x̄|²/E|x̄|²; for D >= 1, no bits are needed.

    Raises:
        ConfigError: if ``relative_error`` is not above 0, or not finite.
    """
    check_positive(relative_error=relative_error)
    return max(0.0, -math.log2(relative_error) / 2)


def bits_at(relative_l2: float) -> float:
    """Returns the smallest number of bits per coordinate and rank for a relative L2 error r of the mean: log2(1/r),
    `rate_distortion` (r²).

    This holds for independent normal gradients with equal variances, and for a decoder that knows none of them. A rank
    that decodes knows its own part of the mean exactly, which saves at most ½ log2(n/(n-1)) bits.

    This also holds for a second rounding, as in `two_shot`: a mean that is sent in a message of R_down bits has a
    relative error of at least 2^-R_down, so each of the two messages needs log2(1/r) bits. Two independent roundings at
    the bound leave r² = 1 - (1 - 2^-2R_up)(1 - 2^-2R_down), for equal rates about ½ bit more on both.

    Args:
        relative_l2: r = |estimate - x̄|/|x̄|, root mean square; for r >= 1, no bits are needed.

    Raises:
        ConfigError: if ``relative_l2`` is not above 0, or not finite.
    """
    check_positive(relative_l2=relative_l2)
    return max(0.0, -math.log2(relative_l2))


def _ceil_log2(value: int) -> int:
    """Returns log2 of a positive integer, rounded up, exactly."""
    return (value - 1).bit_length()


def _ceo_rate(distortion: float, ranks: int, signal: float, noise: float) -> float:
    """Returns `ceo_rate` of checked arguments; infinite if the distortion is unreachable."""
    if distortion >= signal:
        return 0.0
    share = noise / ranks / distortion * (1 - distortion / signal)
    if share >= 1:
        return math.inf
    return (math.log2(signal) - math.log2(distortion) - ranks * math.log1p(-share) / math.log(2)) / 2


def _least_distortion(ranks: int, signal: float, noise: float) -> float:
    """Returns the mean square error about the true gradient of the best estimate from the uncompressed gradients."""
    return 1 / (1 / signal + ranks / noise) if noise else 0.0


def _reachable(name: str, value: float, rate: float, ranks: int, signal: float, noise: float) -> float:
    """Returns ``rate``. Raise ConfigError if it is infinite, because no message has so small an error."""
    if rate < math.inf:
        return rate
    raise ConfigError(
        f"{name}={value:g} is not above {_least_distortion(ranks, signal, noise):g}, which the uncompressed gradients "
        f"reach (ranks={ranks}, signal={signal:g}, noise={noise:g}); give the error about the true gradient, not about "
        "the mean of the ranks' gradients"
    )


def _check_source(ranks: int, signal: float, noise: float) -> None:
    check_whole(ranks=ranks)
    check_positive(signal=signal)
    check_at_least(0, noise=noise)
