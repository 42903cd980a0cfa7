"""`bits="auto"`: finds the fewest bits that the noise of gradients allows, from the noise scale and the rounding error.

`NoiseGauge` is a state machine without processes or tensors. Its inputs are sums that all ranks know, so all ranks get
the same numbers of bits.

Rank i of n has the gradient g_i of its own batch: E g_i = G and E|g_i - G|² = S on all ranks, whose mean is ḡ. With
A = (1/n) Σ |g_i|² and C = (1/n) Σ <g_i, m>, m the decoded mean, the sampling variance E|ḡ - G|² = S/n is estimated by
V = (A - C)/(n-1). The noise scale is B = S/|G|², in batches of one rank; |G|² is estimated by C - V.

Let ρ = E|Q(g) - g|²/|g|² be the relative error of the codec on these gradients, which each rank measures by rounding
its own gradient at every width of ``allow``. N messages of square norm A_N = C + (N-1) V each are averaged: one from
each rank, or one from each of N nodes if means inside a node are exact. Then the variance of rounding is

    gather:     R = ρ A_N / N
    two_shot:   R = u + ρ (|ḡ|² + u),    u = ρ A_N (N-1)/N²        (an owner has its own gradient exactly)

bf16 numbers have ρ = 1.5e-5 and use the first formula; 32 bits have R = 0. With rounding, a training needs at most 1 +
R/V times as many steps, so the fewest bits with 1 + R/V <= 1 + max_slowdown are chosen. docs/theory.md derives all of
this ("How few bits the noise allows", after McCandlish et al., arXiv 1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gqsgd.codecs.variance import relative_variance
from lightning_gqsgd.config import GQSGDConfig
from lightning_gqsgd.config.choosing import between_nodes
from lightning_gqsgd.errors import ConfigError

#: ρ of bf16 numbers, at most: a number is rounded to 7 bits behind its leading one (`codecs.floats`).
_RELATIVE_BF16 = relative_variance(7)
#: Steps from one measurement to the next one.
EVERY = 10
#: Number of measurements before the first change of bits.
LEAST = 5
#: Decay of the exponential moving averages per measurement.
DECAY = 0.9
#: Fewer bits are chosen only if their R/V is at most (1 - this) ``max_slowdown``, so that bits do not alternate.
_MARGIN = 0.2
#: Sums that one rank has measured in one step: |g_i|²; <g_i, m>, m the decoded mean; and |Q(g_i) - g_i|² at each number
#: of bits that has codes, widest first.
NoiseSums = tuple[float, ...]


@dataclass(frozen=True)
class Way:
    """How the messages of one candidate are averaged.

    Attributes:
        reducer: ``"native"``, ``"bf16"``, ``"gather"`` or ``"two_shot"``.
        messages: number of messages that are averaged: of ranks, or of nodes.
    """

    reducer: str
    messages: int

    @classmethod
    def of(cls, config: GQSGDConfig, ranks: int) -> Way:
        """Returns the way of a configuration with the chosen reducer.

        Raises:
            ConfigError: if there is no formula for the rounding error of its reducer.
        """
        reducer = config.reducer
        messages = ranks
        if reducer == "hierarchical":
            reducer = between_nodes(config, ranks).reducer
            messages = ranks // config.node_size
        if reducer not in ("native", "bf16", "gather", "two_shot"):
            raise ConfigError(
                f'bits="auto" does not predict the error of reducer={reducer!r}, which {config.num_bits} bits have '
                f"with {ranks} ranks; give reducer='two_shot', or bits as a number"
            )
        return cls(reducer, messages)

    def variance(self, relative_error: float, mean_square: float, sampling_variance: float) -> float:
        """Returns R, as defined in the module's docstring.

        Args:
            relative_error: ρ; bf16 and native messages use their own ρ instead.
            mean_square: |ḡ|².
            sampling_variance: V.
        """
        if self.reducer == "native":
            return 0.0
        each = mean_square + (self.messages - 1) * sampling_variance
        if self.reducer == "bf16":
            return _RELATIVE_BF16 * each / self.messages
        if self.reducer == "gather":
            return relative_error * each / self.messages
        up = relative_error * each * (self.messages - 1) / self.messages**2
        return up + relative_error * (mean_square + up)


@dataclass
class NoiseGauge:
    """Derives the fewest bits that the noise of gradients allows, by the rule at the top of the module.

    Attributes:
        ways: how each candidate averages, by its bits, widest first.
        ranks: n.
        max_slowdown: the largest R/V.
        decay: see `DECAY`.
        least: see `LEAST`.
        floor: the fewest bits that are allowed; at first the most.
        count: number of measurements so far.
    """

    ways: Mapping[int, Way]
    ranks: int
    max_slowdown: float
    decay: float = DECAY
    least: int = LEAST

    def __post_init__(self) -> None:
        self.floor = max(self.ways)
        self.count = 0
        self._sums = [0.0] * (2 + len(self.coded))

    @property
    def coded(self) -> tuple[int, ...]:
        """The numbers of bits that have codes, widest first."""
        return tuple(bits for bits, way in self.ways.items() if way.reducer not in ("native", "bf16"))

    @property
    def allowed(self) -> tuple[int, ...]:
        """The numbers of bits that the noise allows, widest first."""
        return tuple(bits for bits in self.ways if bits >= self.floor)

    @property
    def sampling_variance(self) -> float:
        """V relative to |g|², smoothed. It is only meaningful in ratios to other smoothed numbers, and may be negative
        by chance."""
        square, inner, *_ = self._sums
        return (square - inner) / max(1, self.ranks - 1)

    @property
    def noise_scale(self) -> float:
        """B = S/|G|², in batches of one rank; NaN before the first measurement, infinite if |G|² is not above 0."""
        if not self.count:
            return math.nan
        signal = self._sums[1] - self.sampling_variance
        return max(0.0, self.ranks * self.sampling_variance) / signal if signal > 0 else math.inf

    def ratio(self, bits: int) -> float:
        """R/V at a number of bits; infinite if V is not above 0 and R is; NaN before the first measurement."""
        if not self.count:
            return math.nan
        square, inner, *errors = self._sums
        relative = dict(zip(self.coded, errors, strict=True)).get(bits, 0.0) / square
        sampling = self.sampling_variance
        rounding = self.ways[bits].variance(relative, max(0.0, inner), max(0.0, sampling))
        if rounding == 0:
            return 0.0
        return rounding / sampling if sampling > 0 else math.inf

    def observe(self, of_ranks: Sequence[NoiseSums]) -> None:
        """Add the measurement of one step; ``of_ranks`` has the sums of every rank, in rank order.

        If the sums of one rank cannot be used, the measurement is ignored: a gradient was not finite, or a state was
        saved before the sums could be exchanged.
        """
        if not all(sums[0] > 0 and all(map(math.isfinite, sums)) for sums in of_ranks):
            return
        # The means over ranks do not depend on the order of the ranks.
        means = [math.fsum(column) / len(of_ranks) for column in zip(*of_ranks, strict=True)]
        keep = self.decay
        # Sums are relative to |g|². Otherwise, measurements of larger gradients would count more, and hide for hundreds
        # of steps what changes as gradients become smaller. Sums start at zero. So all of them are too small by the
        # same factor at first, which does not change ratios.
        fresh = [value / means[0] for value in means]
        self._sums = [keep * old + (1 - keep) * new for old, new in zip(self._sums, fresh, strict=True)]
        self.count += 1
        if self.count >= self.least:
            self._move()

    def _move(self) -> None:
        """Set the fewest bits that are allowed."""
        if self.ratio(self.floor) > self.max_slowdown:
            wider = [bits for bits in self.ways if bits > self.floor and self.ratio(bits) <= self.max_slowdown]
            self.floor = min(wider, default=max(self.ways))
            return
        limit = (1 - _MARGIN) * self.max_slowdown
        self.floor = min([bits for bits in self.ways if bits < self.floor and self.ratio(bits) <= limit] + [self.floor])

    def describe(self) -> str:
        """Returns why these bits are allowed, in a few words."""
        if self.count < self.least:
            return "the noise of gradients is not known yet"
        ratios = ", ".join(f"{bits} bits {self.ratio(bits):.2g}" for bits in self.ways if self.ratio(bits) > 0)
        return f"variance of rounding over sampling variance: {ratios}; at most {self.max_slowdown:g} is allowed"

    def state(self) -> dict[str, Any]:
        """Returns the state for a resumed run, as plain values."""
        return {
            "bits": list(self.ways),
            "floor": self.floor,
            "count": self.count,
            "sums": list(self._sums),
            "is_relative": True,
        }

    def resume(self, state: object, *, is_same_world: bool) -> None:
        """Load a `state`. Start again if it is None or has other numbers of bits.

        Args:
            state: the result of `state`.
            is_same_world: whether the number of ranks equals that of the saved run. If not, earlier measurements are
                ignored, and the bits stay until there are new ones.

        Raises:
            ConfigError: if ``state`` is no such state.
        """
        self.__post_init__()
        if state is None:
            return
        try:
            saved: Mapping[str, Any] = dict(state)  # type: ignore[call-overload]
            bits = [int(value) for value in saved["bits"]]
            floor = int(saved["floor"])
            count = int(saved["count"])
            sums = [float(value) for value in saved["sums"]]
            if not saved.get("is_relative", False):  # earlier versions saved sums of absolute numbers
                sums = self._relative(sums, count)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the gqsgd state's entry 'auto' has a 'noise' that cannot be read ({type(error).__name__}: {error}); "
                "load what state_dict has written, or drop the entry to measure anew"
            ) from None
        if bits != list(self.ways) or len(sums) != len(self._sums) or floor not in self.ways or count < 0:
            return
        self.floor = floor
        if is_same_world:
            self.count = count
            self._sums = sums

    def _relative(self, sums: Sequence[float], count: int) -> list[float]:
        """Returns sums of absolute numbers as sums relative to |g|², after ``count`` measurements."""
        if not count or not sums or sums[0] <= 0:
            return list(sums)
        weight = 1 - self.decay**count
        return [weight * value / sums[0] for value in sums]
