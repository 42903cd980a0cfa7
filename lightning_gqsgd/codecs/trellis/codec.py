"""The trellis codec: EDEN whose allowed levels of a coordinate depend on the codes of the three coordinates before it.

Blocks are rotated and scaled as in `codecs.eden`. EDEN rounds each rotated coordinate to the nearest of 2^b levels. The
trellis codec has twice as many levels, and allows half of them for each coordinate. The levels, from the lowest on,
belong to the subsets 0, 1, 2, 3, 0, 1, ..., and the level of a coordinate is from one of two subsets. The bit u of its
code selects the subset, and the other bits select the level of the subset. The two subsets follow from the bits u of
the three coordinates before it:

    subset = 2 (u_t ^ u_{t-2} ^ u_{t-3}) + u_{t-1}

The encoder chooses the bits of a whole sequence together, so that the sum of squared errors is smallest. This is
trellis coded quantisation (Marcellin, Fischer, "Trellis coded quantization of memoryless and Gauss-Markov sources",
IEEE Transactions on Communications 38, 1990). It uses a convolutional code of 8 states and Viterbi's algorithm. A code
has b bits as in EDEN, nothing else is sent, and the decoder is a table, whose index is the window u_{t-3} u_{t-2}
u_{t-1} u_t and the rest of the code. QTIP (arXiv 2406.11235) quantises weights in this way, with more states.

Normal numbers are rarely large, so an outer level is rarely used. For each sign, one of the windows with the outermost
level has this level farther out than the other windows: u_t ≠ u_{t-1} = u_{t-2} ≠ u_{t-3}. This makes the mean square
error at 3 bits 7 % smaller. Different levels in each window would make it only 1 % smaller still. `benchmarks.trellis`
finds the levels by Lloyd's algorithm.

A block of n coordinates has 16 sequences of T = n/16 steps, and a vector holds the same step of all sequences. Each
block of each message has a random word w of 32 bits. It determines the order of rotated coordinates in the sequences:
step t of sequence l is the coordinate

    16 (a t mod T) + (l ^ h),   a = w | 1,   h = floor(w t mod 2^32 / 2^28).

This order makes the codec unbiased. Two rounds of a Hadamard transform are not a uniform rotation. If only two
coordinates x_i and x_k of a block are not zero, the rotated coordinates j and j ^ i ^ k have the correlation
±2 x_i x_k/(x_i² + x_k²), with one random sign for all j. EDEN rounds one coordinate at a time, so the correlation does
not matter there. In a trellis, it matters if both coordinates are near each other in one sequence, because the level of
each then also depends on the other and on the sign. If sequence l had the coordinates l, l + 16, l + 32, ..., the mean
of x_k would be wrong by up to 4 % if i ^ k is 16, 32 or 48. Any other fixed order has such pairs, too. In the order
above, any two coordinates follow each other in about as many messages as any other two, at most 6 of n. So the mean of
a coordinate is right within a share of 1/(3n) (`tests/statistics/test_trellis.py`).

All bits before the first step are 0, so the first steps have fewer choices. The mean square error is about D + a/T
after T steps. Blocks are therefore longer than in `codecs.eden`.

All kernels have to find the same bits, so costs are integers. Let x be a rotated coordinate in units of the root mean
square, an fp32 number within ±`FARTHEST`. Its cost at a level c is

    K (c² - 2 c x),  K = `COST_UNIT`,

rounded to an integer. Up to a term without c, this is K times the squared error. The word of a state is 2^`PATH` times
the cost of the best sequence that ends in the state, plus the bits of this sequence: the three bits before a segment of
`SEGMENT` steps, and then one bit for each step. So the smallest word has the bits of the best sequence, even if two
sequences have the same cost. After each segment, the bits are stored, and the cost of state 0 is subtracted from all
costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from lightning_gqsgd.codecs.eden.codec import EdenCodec, RotatingQuantiser
from lightning_gqsgd.kernels.dither import words
from lightning_gqsgd.kernels.layout import LENGTH
from lightning_gqsgd.kernels.protocol import Kind
from lightning_gqsgd.kernels.rotation import SHORTEST
from lightning_gqsgd.kernels.wire import ORDER_PLACE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_gqsgd.kernels.wire import Key

#: Magnitudes of the levels for each number of bits, ascending, in units of the root mean square. The last two are both
#: the outermost level: in most windows, and in `FAR_WINDOWS`.
MAGNITUDES: dict[int, tuple[float, ...]] = {
    1: (0.3715, 1.1257, 1.3547),
    2: (0.1913, 0.5815, 1.0512, 1.6299, 2.3598),
    3: (0.1038, 0.2957, 0.5132, 0.7295, 0.9836, 1.2693, 1.6514, 2.1645, 2.8734),
    4: (
        0.0538,
        0.1478,
        0.2569,
        0.3544,
        0.4675,
        0.5726,
        0.6925,
        0.8109,
        0.9440,
        1.0839,
        1.2421,
        1.4221,
        1.6370,
        1.8978,
        2.2275,
        2.6529,
        3.2664,
    ),
}
#: D and a for each number of bits: the mean square error of T steps of normal numbers is about D + a/T. Measured by
#: `benchmarks.trellis`.
DISTORTION: dict[int, tuple[float, float]] = {
    1: (0.3029, 0.547),
    2: (0.0820, 0.181),
    3: (0.02137, 0.0572),
    4: (0.005663, 0.0158),
}

#: Number of sequences of a block.
LANES = 16
#: Number of earlier bits u on which the subsets of a code depend, and the number of values of these bits.
MEMORY = 3
STATES = 1 << MEMORY
WINDOWS = 2 * STATES
#: Number of steps of a segment, and the number of bits of a word that are below the cost.
SEGMENT = 8
PATH = MEMORY + SEGMENT
#: Windows whose outermost level is farther out.
FAR_WINDOWS = (0b0110, 0b1001)
#: Rotated coordinates are clamped to this magnitude before costs are computed, in units of the root mean square. The
#: second constant is the unit of costs. Costs of a segment differ by less than 2^20: a step's cost is between -19 and
#: 13 in units of the mean square, and three steps lead from every state to every other.
FARTHEST = 4.5
COST_UNIT = 4096
#: The cost of states other than 0 before the first step, because all sequences begin in state 0.
NEVER = 128 * COST_UNIT


def subset_of(window: int) -> int:
    """Returns the subset of levels of a window. A window has four bits, and u_t is the highest."""
    u = [window >> place & 1 for place in range(MEMORY + 1)]
    return 2 * (u[3] ^ u[1] ^ u[0]) + u[2]


def alphabets(magnitudes: Iterable[float]) -> np.ndarray:
    """Returns the levels of each window, ascending, [`WINDOWS`, 2^(b-1)].

    Args:
        magnitudes: magnitudes of the levels, as in `MAGNITUDES`.
    """
    *inner, near, far = magnitudes
    rows = []
    for window in range(WINDOWS):
        half = np.array([*inner, far if window in FAR_WINDOWS else near])
        rows.append(np.concatenate([-half[::-1], half])[subset_of(window) :: 4])
    return np.array(rows)


def costs_of(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns K c² and 2 K c of levels c, in fp32. The cost of x at c is the first minus x times the second."""
    return np.float32(COST_UNIT * levels * levels), np.float32(2 * COST_UNIT * levels)


def thresholds_of(levels: np.ndarray) -> np.ndarray:
    """Returns the smallest number that is rounded to each level, except for the lowest level of each row, in fp32. Each
    row of ``levels`` is ascending."""
    return np.float32((levels[..., :-1] + levels[..., 1:]) / 2)


@dataclass(frozen=True)
class TrellisQuantiser(RotatingQuantiser):
    """A trellis codec at one block size.

    The lower bits of a code are the number of the level in the alphabet of its window. The highest bit is u.
    """

    kind: ClassVar[Kind] = Kind("trellis", __package__, is_padded=True)

    @property
    def alphabets(self) -> np.ndarray:
        """Levels of each window, fp64 [`WINDOWS`, 2^(b-1)]."""
        return alphabets(MAGNITUDES[self.bits])

    def arranged(self, rotated: Tensor, whole: Tensor, key: Key) -> Tensor:
        """Returns rotated coordinates in the order of the sequences; see `RotatingQuantiser.arranged`."""
        return rotated.gather(1, orders(whole, key, rotated.shape[1]))

    def put_back(self, levels: Tensor, whole: Tensor, key: Key) -> Tensor:
        """Returns levels in the order of rotated coordinates; see `RotatingQuantiser.put_back`."""
        return torch.empty_like(levels).scatter_(1, orders(whole, key, levels.shape[1]), levels)

    def rounded(self, rotated: Tensor, deviations: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns codes and levels; see `RotatingQuantiser.rounded`."""
        inverse = 1 / deviations
        x = (rotated * inverse[:, None]).float().clamp(-FARTHEST, FARTHEST).unflatten(1, (-1, LANES))
        windows = best_windows(x, lengths // LANES, self.alphabets)
        thresholds = torch.from_numpy(thresholds_of(self.alphabets)).to(x.device)[windows]
        numbers = (x[..., None] >= thresholds).sum(dim=-1)
        levels = torch.from_numpy(self.alphabets).to(rotated)[windows, numbers]
        codes = numbers | windows >> MEMORY << (self.bits - 1)
        return codes.flatten(1), levels.flatten(1)

    def levels(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the levels of codes; see `RotatingQuantiser.levels`."""
        steps = codes.unflatten(1, (-1, LANES))
        bits = steps >> (self.bits - 1)
        windows = bits << MEMORY
        for back in range(1, MEMORY + 1):
            windows[:, back:] |= bits[:, :-back] << (MEMORY - back)
        alphabet = torch.from_numpy(self.alphabets).to(codes.device, dtype)
        return alphabet[windows, steps & ((1 << (self.bits - 1)) - 1)].flatten(1)


def orders(whole: Tensor, key: Key, width: int) -> Tensor:
    """Returns the number of the rotated coordinate at each place of a block's sequences, int64 [B, width].

    Place 16 t + l is step t of sequence l. Places beyond the end of a block get their own number.

    Args:
        whole: block table, with the lengths of blocks including the zeros at their ends.
        key: the message's key.
        width: the largest length.
    """
    places = torch.arange(width, device=whole.device)
    steps, lanes = places // LANES, places % LANES
    random = words(whole, key, torch.full((1,), ORDER_PLACE, device=whole.device))
    lengths = whole[:, LENGTH, None]
    step = (random | 1) * steps % (lengths // LANES)
    lane = lanes ^ ((random * steps & 0xFFFFFFFF) >> 28)
    return torch.where(places < lengths, LANES * step + lane, places)


def best_windows(x: Tensor, steps: Tensor, levels: np.ndarray) -> Tensor:
    """Returns the windows of the sequences with the smallest costs, int64 [B, T, `LANES`].

    Args:
        x: numbers within ±`FARTHEST`, fp32 [B, T, `LANES`].
        steps: number of steps of each block, a multiple of `SEGMENT` and at most T, int64 [B].
        levels: levels of each window.
    """
    constant, slope = (torch.from_numpy(numbers).to(x.device) for numbers in costs_of(levels))
    states = torch.arange(STATES, device=x.device)
    words = torch.where(states == 0, 0, NEVER << PATH | states).expand(len(x), LANES, STATES)
    last_bits = torch.zeros(len(x), LANES, dtype=torch.int64, device=x.device)
    bits_of_segments = []
    for t, numbers in enumerate(x.unbind(1)):
        step = t % SEGMENT
        cost = (constant - numbers[..., None, None] * slope).amin(dim=-1).round().long()
        # A window's lower bits are the state before, its upper bits are the state after.
        through = torch.cat([words, words], dim=-1) + (cost << PATH)
        words = through.unflatten(-1, (STATES, 2)).amin(dim=-1) | states >> (MEMORY - 1) << (MEMORY + step)
        if step == SEGMENT - 1:
            is_last = (steps == t + 1)[:, None]
            last_bits = torch.where(is_last, words.amin(dim=-1), last_bits)
            bits_of_segments.append(words & ((1 << PATH) - 1))
            words = _renewed(words, states)
    return _windows(bits_of_segments, last_bits & ((1 << PATH) - 1), steps)


def _renewed(words: Tensor, states: Tensor) -> Tensor:
    """Returns the words at the start of a segment, from the words at the end of the segment before."""
    costs = words >> PATH
    return (costs - costs[..., :1] << PATH) | states


def _windows(bits_of_segments: Sequence[Tensor], last_bits: Tensor, steps: Tensor) -> Tensor:
    """Returns the windows of all steps, [B, T, `LANES`]. The best sequence is traced back from the last segment.

    Args:
        bits_of_segments: for each segment, the bits of the best sequence to each state at its end, [B, `LANES`,
            `STATES`].
        last_bits: the bits of the best sequence in a block's last segment, [B, `LANES`].
        steps: number of steps of each block, [B].
    """
    windows = []
    bits = last_bits
    for number in reversed(range(len(bits_of_segments))):
        state = bits & (STATES - 1)
        before = bits_of_segments[number].gather(-1, state[..., None])[..., 0]
        bits = torch.where((steps == (number + 1) * SEGMENT)[:, None], last_bits, before)
        windows += [bits >> step & (WINDOWS - 1) for step in reversed(range(SEGMENT))]
    return torch.stack(windows[::-1], dim=1)


@dataclass(frozen=True)
class TrellisCodec(EdenCodec):
    """EDEN with a trellis, at a number of bits per coordinate.

    Attributes:
        bits: bits of a code on the wire, 1 to 4.
    """

    name: ClassVar[str] = "trellis"
    default_block_size: ClassVar[int] = 1024

    def quantiser(self, block_size: int, summed: int | None = None) -> TrellisQuantiser:
        """Returns the quantiser; see `EdenCodec.quantiser`."""
        super().quantiser(block_size, summed)  # refuses sums of codes
        return TrellisQuantiser(self.bits, block_size)

    def distortion(self, dimension: int) -> float:
        """Returns the mean square error of normal numbers that are rounded to the levels, in blocks of ``dimension``
        coordinates."""
        longest, of_start = DISTORTION[self.bits]
        rotated = max(SHORTEST, 1 << (dimension - 1).bit_length())
        return longest + of_start * LANES / rotated
