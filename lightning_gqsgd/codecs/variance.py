"""Constants of single quantisers and of their memories, as plain functions of a few numbers.

ω of an unbiased quantiser Q is the smallest number with E|Q(x) - x|² <= ω |x|² (l2 norms) for all x of d coordinates.
The formulas hold for scales from the maximum norm to the l2 norm, both included, except that of companded codes, which
is for the maximum norm.

Common arguments: ``dimension``, the number d of coordinates that share a scale; ``levels``, s or S, 1 or more, or K,
which is at least 2 for linear codes and 4 for companded ones; ``slope``, s of companded codes, above 0; ``mantissa``,
m, the number of bits between two powers of two, 0 to 52; ``bits``, the bits of a code, 1 to 4. All functions raise
ConfigError for an argument that is not such a number.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from lightning_gqsgd.codecs.scales import NORMS_OVER_RANKS
from lightning_gqsgd.errors import check_at_least, check_one_of, check_positive, check_whole

#: Magnitudes of the Lloyd-Max levels of the standard normal distribution, for each number of bits. The level of an
#: interval is the mean of the distribution over the interval, and intervals end halfway between two levels (J. Max,
#: "Quantizing for Minimum Distortion", IRE Transactions on Information Theory, 1960). The equations were solved to 18
#: digits by Newton's method.
LLOYD_MAX: dict[int, tuple[float, ...]] = {
    1: (0.797884560802865356,),
    2: (0.452780034636492009, 1.51041760849909540),
    3: (0.245094178944221668, 0.756005281205877275, 1.34390927850499988, 2.15194570453698729),
    4: (
        0.128395029851147010,
        0.388048299490290197,
        0.656759118532463381,
        0.942340456486961371,
        1.25623119734717715,
        1.61804638602188263,
        2.06901722653138658,
        2.73258957099516307,
    ),
}


def omega_linear(dimension: int, levels: int) -> float:
    """Returns ω of stochastic rounding to s = ``levels`` uniform levels on each side of zero: min(d/(4s²), sqrt(d)/s).

    Let N be the scale, y = |x_j|/N and f the distance of s y to the integer below. The coordinate's variance is
    f(1-f) N²/s². f(1-f) is at most 1/4 and at most f <= s y, so the variance is at most min(y/s, 1/(4s²)) N². The sum
    over d coordinates is at most d N²/(4s²) and at most N |x|_1/s <= N sqrt(d) |x|/s. N <= |x| gives both terms.

    d = 4s² coordinates y = 1/(2s) under the l2 norm attain the first term. QSGD (arXiv 1610.02132, lemma 3.1) prints
    d/s² for the first term.
    """
    check_whole(dimension=dimension, levels=levels)
    return min(dimension / (4 * levels * levels), math.sqrt(dimension) / levels)


def dimension_together(dimension: int, ranks: int, norm_over_ranks: str) -> int:
    """Returns the dimension m for which ω(m) is the ω of n gradients of d coordinates rounded under one scale: nd, or
    n²d under the sum of the ranks' norms.

    Rounding the n gradients is rounding their concatenation X, of nd coordinates. Let the scale be N <= c |X|. A
    coordinate x_j has the variance |x_j| N/s at most, and N²/(4s²), so the error is at most N/s Σ_j |x_j| <= c
    sqrt(nd)/s |X|², and c² nd/(4s²) |X|². These are the two terms of ω(c² nd), for linear levels; for exponential
    levels, the smallest level l replaces 1/s.

    With a norm q >= 2 of each rank's coordinates, at most |x_i|, and p over ranks: c = 1 for p >= 2, since
    (Σ_i |x_i|^p)^(1/p) <= |X| then; c = sqrt(n) for p = 1, since Σ_i |x_i| <= sqrt(n) |X|, with equality for equal
    norms.

    Args:
        dimension: coordinates d of one rank that share a scale.
        ranks: n.
        norm_over_ranks: ``"max"`` or ``"l2"``, p of infinity or 2; ``"l1"``, p = 1.
    """
    check_whole(dimension=dimension, ranks=ranks)
    check_one_of("norm_over_ranks", norm_over_ranks, NORMS_OVER_RANKS)
    return dimension * ranks * (ranks if norm_over_ranks == "l1" else 1)


def omega_subtractive(dimension: int, levels: int) -> float:
    """Returns ω of subtractive dither with K = ``levels`` levels from -N to N under the maximum norm N: d Δ²/12, Δ =
    2/(K-1).

    The error is uniform on [-Δ/2, Δ/2] N for every coordinate, including zeros, so the errors of d coordinates sum to
    d Δ²/12 N². N <= |x| gives the bound. It is attained if a single coordinate is not zero.
    """
    check_whole(dimension=dimension)
    check_whole(2, levels=levels)
    return dimension * (2 / (levels - 1)) ** 2 / 12


def variance_companded(magnitude: float, levels: int, slope: float) -> float:
    """Returns the mean square error of companded subtractive dither for a coordinate |x| under the scale 1; see
    `codecs.companded.codec`.

    Let y >= 0 be the coordinate on the companded axis, (s y + y²/m)/(1+s) = m |x| with m = (K-1)/2, and e uniform on
    [-1/2, 1/2]. The error is the deviation of d(y + e) from its mean, times 1/m. Around y, the decoder d is a straight
    line with the slope p/(1+s), p = s + 2r/m and r = floor(y + 1/2). Its slope changes by 2/(m (1+s)) at the only
    number r ± 1/2 within the box. With f = |y - r|, the variance of this broken line is (up to the factor (1+s)^-2)

        p²/12 ± p f² (1 - 2f/3)/m + f³ (4/3 - f)/m²,    + for y >= r, and - for y < r.

    Its average over y from k - 1/2 to k + 1/2, k >= 1, is the average of (s + 2y/m)²/12, plus 1/(720 m²). So the error
    is about Δ²/12 (b² + 4 |x|/(1+s)), Δ = 1/m and b = s/(1+s). This is linear in |x|, so the mean magnitude is enough
    to compute it. For blocks of gradients, it is right within 1 % at 3 bits and more, and within 10 % at 2 bits.

    Args:
        magnitude: |x| in units of the scale, 0 to 1.
        levels: K, 4 or more.
        slope: s, above 0.
    """
    check_at_least(0, magnitude=magnitude)
    check_positive(slope=slope)
    check_whole(4, levels=levels)
    middle = (levels - 1) / 2
    y = middle * (math.sqrt(slope * slope / 4 + (1 + slope) * magnitude) - slope / 2)
    nearest = math.floor(y + 0.5)
    f = abs(y - nearest)
    sign = math.copysign(1, y - nearest)
    p = slope + 2 * nearest / middle
    squared = p * p / 12 + sign * p * f * f * (1 - 2 * f / 3) / middle + f**3 * (4 / 3 - f) / middle**2
    return squared / (middle * (1 + slope)) ** 2


def mean_variance_companded(mean_magnitude: float, levels: int, slope: float) -> float:
    """Returns the approximate mean of `variance_companded` over coordinates with this mean magnitude.

    It is Δ²/12 (b² + 4 |x|/(1+s)).

    Args:
        mean_magnitude: mean of |x| in units of the scale, 0 to 1.
        levels: K, 4 or more.
        slope: s, above 0.
    """
    check_at_least(0, mean_magnitude=mean_magnitude)
    check_positive(slope=slope)
    check_whole(4, levels=levels)
    return (2 / (levels - 1)) ** 2 / 12 * ((slope / (1 + slope)) ** 2 + 4 * mean_magnitude / (1 + slope))


def omega_companded(dimension: int, levels: int, slope: float) -> float:
    """Returns ω of companded subtractive dither under the maximum norm: Δ²/24 (A + sqrt(A² + k² (d-1))), A = d b² + k.

    Here k = 16/(3 (1+s)) and b = s/(1+s). On average over neighbours, a coordinate's error is Δ²/12 (b² + 4 |x|/(1+s)),
    see `variance_companded`. The error of a single coordinate is at most this formula with 16/3 instead of 4: the
    factor 4/3 is reached for s = 0 at 2 bits, and is smaller for other slopes (1.2 for s = 3/4) and more bits. Hence k.
    Let the scale be 1, and let one coordinate reach it. The ratio Σ (b² + k |x|) / Σ x² is largest if all other
    coordinates have the same magnitude t. (A + k (d-1) t)/(1 + (d-1) t²) is largest at the t at which its derivative is
    zero. Its value there is k/(2t), which is the bound.
    """
    check_whole(dimension=dimension)
    check_whole(4, levels=levels)
    check_positive(slope=slope)
    linear = 16 / 3 / (1 + slope)
    total = dimension * (slope / (1 + slope)) ** 2 + linear
    return (2 / (levels - 1)) ** 2 / 24 * (total + math.hypot(total, linear * math.sqrt(dimension - 1)))


def smallest_level(levels: int, mantissa: int = 0) -> float:
    """Returns the smallest of S = ``levels`` magnitudes 2^-k (1 + j/2^m) that descend from 1, in units of the scale.

    Code c, 1 to S, stands for 2^e (1 + r/2^m), with e and r quotient and remainder of (c - S)/2^m. The result is the
    magnitude of c = 1, which is 2^(1-S) for m = 0. It is 0.0 if the magnitude is below the smallest float.
    """
    check_whole(levels=levels)
    check_whole(0, 52, mantissa=mantissa)
    exponent, rest = divmod(1 - levels, 2**mantissa)
    return float(2.0**exponent * (1 + rest / 2**mantissa))


def omega_exponential(dimension: int, levels: int, mantissa: int = 0) -> float:
    """Returns ω of stochastic rounding to zero and S = ``levels`` magnitudes 2^-k (1 + j/2^m): h²/(4(1+h)) + u min(1,
    u).

    Between neighbours a < b, y = |x_j|/N has the variance (y-a)(b-y) N². Relative to (y N)², it is largest at
    y = 2ab/(a+b), with the value (b-a)²/(4ab). b/a is largest at a power of two, with the value 1 + h and h = 2^-m.
    This gives h²/(4(1+h)), which is 1/8 for m = 0, as b = 2a.

    Below the smallest level l, the variance is y (l-y) N². It is at most y l N², which sums to at most l sqrt(d) |x| N,
    and at most l² N², which sums to d l² N². With N <= |x| and u = sqrt(d) l, the two bounds are u and u². (The
    variance is also at most l²/4 N², so u²/4 would be a bound, too.) For m = 0 this is the constant of natural
    dithering, arXiv 1905.10988.
    """
    check_whole(dimension=dimension)
    underflow = math.sqrt(dimension) * smallest_level(levels, mantissa)
    return relative_variance(mantissa) + underflow * min(1.0, underflow)


def stability(alpha: float, beta: float, omega: float) -> float:
    """Returns the factor λ = α²ω + (β-α)² by which the squared error memory of ECQ-SGD (arXiv 1806.08054) grows per
    step. The memory is bounded if λ < 1.

    A rank sends Q(g + αh) and keeps h' = βh + g - Q(g + αh) = (β-α)h - e. The rounding error e has mean zero and
    E|e|² <= ω|g + αh|². So E|h'|² <= (β-α)²|h|² + ω|g + αh|², and the factor of |h|² in it is λ. Classic error
    feedback, α = β = 1, has λ = ω, so it may diverge with an unbiased quantiser of ω > 1.

    Args:
        alpha: α, share of the memory that is added to the gradient before it is sent.
        beta: β, share of the memory that is kept.
        omega: ω of the quantiser.
    """
    check_at_least(0, alpha=alpha, beta=beta, omega=omega)
    return alpha * alpha * omega + (beta - alpha) * (beta - alpha)


def best_alpha(beta: float, omega: float) -> float:
    """Returns the α with the smallest `stability`: β/(1+ω), the solution of αω = β - α. Its λ is β²ω/(1+ω), which is
    below 1 for β <= 1.

    Args:
        beta: β, share of the memory that is kept.
        omega: ω of the quantiser.
    """
    check_at_least(0, beta=beta, omega=omega)
    return beta / (1 + omega)


def relative_variance(mantissa: int) -> float:
    """Returns the largest variance of stochastic rounding to numbers 2^k (1 + j/2^m), divided by the square of the
    number that is rounded; see `omega_exponential`."""
    h = 2.0**-mantissa
    return h * h / (4 * (1 + h))


def gaussian_distortion(bits: int) -> float:
    """Returns the mean square error D of Lloyd-Max levels for the standard normal distribution: 1 - E q².

    Every level q is the mean of the numbers z that are rounded to it, so E zq = E q², and E (z - q)² = 1 - E q².
    """
    check_whole(1, max(LLOYD_MAX), bits=bits)
    levels = LLOYD_MAX[bits]
    normal = NormalDist()
    ends = [0.5, *(normal.cdf((below + above) / 2) for below, above in zip(levels[:-1], levels[1:], strict=True)), 1.0]
    shares = (2 * (end - start) for start, end in zip(ends[:-1], ends[1:], strict=True))
    return 1 - sum(share * level * level for share, level in zip(shares, levels, strict=True))


def omega_eden(bits: int) -> float:
    """Returns E|x̂ - x|²/|x|² of EDEN, averaged over rotations: D/(1-D), for long blocks.

    With z = R x, levels q in units of σ = |x|/sqrt(m), and the scale S = |x|²/<z, q>, the decoded block has
    <x̂, x> = |x|², so |x̂ - x|² = S² |q|² - |x|². For Gaussian z, <z, q> is near m σ (1-D) and |q|² is near m (1-D), so
    the error is near |x|² (1/(1-D) - 1). The factor is π/2 - 1 at 1 bit (DRIVE, arXiv 2105.08339, section 4; EDEN,
    arXiv 2108.08842, theorem 2.3). In blocks of 128 coordinates, it is right within 5 %.
    """
    distortion = gaussian_distortion(bits)
    return distortion / (1 - distortion)
