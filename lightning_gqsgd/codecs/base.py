"""The interface of codecs: families of codes at a number of bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.protocol import Quantiser

if TYPE_CHECKING:
    from typing_extensions import Self


class Codec(ABC):
    """A codec: stateless, frozen, and equal to another if its numbers are.

    Attributes:
        name: its name in a configuration.
        fields: the fields of a configuration that are this codec's own affair; other codecs leave them alone.
        default_bits: ``bits`` of a configuration that leaves it out.
        widths: the numbers of bits that its codes can have, at most.
        default_block_size: ``block_size`` of a configuration that leaves it out.
        has_scale: whether each block has a scale.
        takes_norm: whether the scale is what the fields ``norm``, ``clip`` and ``scale_per`` say.
        quantiser_finds_scale: whether the quantiser computes each block's scale while it encodes the block.
        unbiased_over: what the mean of an unbiased codec is taken over, where that is not the dither.
        adds_as_integers: whether an integer sum of codes stands for the sum of the numbers, under a shared scale.
        bits: bits of one code on the wire.
    """

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]] = frozenset()
    default_bits: ClassVar[int] = 8
    widths: ClassVar[range] = range(2, 9)
    default_block_size: ClassVar[int] = 256
    has_scale: ClassVar[bool] = True
    takes_norm: ClassVar[bool] = True
    quantiser_finds_scale: ClassVar[bool] = False
    unbiased_over: ClassVar[str] = ""
    adds_as_integers: ClassVar[bool] = False
    bits: int

    @classmethod
    @abstractmethod
    def of(cls, bits: int) -> Self:
        """Returns the codec with so many bits; codecs with `fields` of their own take those by name.

        Raises:
            ConfigError: the codec cannot have such a number.
        """

    def check_blocks(self, block_size: int, *, rotation: bool) -> None:
        """Checks that the codec goes with blocks of a size, and with a rotation of them if there is one.

        Raises:
            ConfigError: it does not.
        """
        if rotation and block_size & (block_size - 1):
            raise ConfigError(f"rotation=True needs a block_size that is a power of two, not {block_size}")

    @property
    def biased_by(self) -> str:
        """The setting due to which the mean of the decoded coordinates is not what was encoded, so that training needs
        a memory; empty if the codec is unbiased."""
        return ""

    @property
    def adds_in_pairs(self) -> bool:
        """Returns whether codes can be added two at a time, under a shared scale."""
        return False

    @property
    def has_odd_levels(self) -> bool:
        """Returns whether all codes are numbers of an odd number of levels, which Elias codes need."""
        return False

    @property
    def leaves_room_for_sums(self) -> bool:
        """Returns whether a code has bits enough for the sum of two ranks' codes."""
        return True

    @abstractmethod
    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate as text, and words that say what they are."""

    @abstractmethod
    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """Returns the quantiser: the codec at one block size, as kernels see it.

        Args:
            block_size: the largest number of coordinates in a block.
            summed: number of ranks whose codes are added, under scales that all ranks share; None: none are.

        Raises:
            ConfigError: the codes of so many ranks cannot be added.
        """

    @abstractmethod
    def error_variance(self, summed: int = 1) -> float:
        """Returns the mean square error of one rank's coordinate, in units of the squared scale; NaN if it is not
        predicted.

        Args:
            summed: number of ranks whose codes are added before they are decoded.

        Raises:
            ConfigError: the codes of so many ranks cannot be added.
        """

    @abstractmethod
    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale; infinite if the codec
        is biased.

        Args:
            dimension: number of coordinates that share a scale.
            summed: number of ranks whose codes are added before they are decoded; ω is of one rank's codes.

        Raises:
            ConfigError: the codes of so many ranks cannot be added.
        """

    def delta(self, dimension: int) -> float:
        """Returns δ with E|C(x) - x|² <= (1-δ) |x|² for C = Q/(1+ω). A biased codec C has one of its own."""
        return 1 / (1 + self.omega(dimension))


def check_code_bits(codec: str, bits: int, widths: range) -> None:
    """Check the bits of a code where they are those of floating-point numbers, which have a codec of their own.

    Args:
        codec: name of the codec.
        bits: the number of bits; a configuration has checked that it is one that any codec has.
        widths: the numbers of bits that the codec has.

    Raises:
        ConfigError: the number is above that of any code.
    """
    if bits > 8:
        raise ConfigError(
            f"codec={codec!r} has codes of {widths[0]} to {widths[-1]} bits, not bits={bits}; leave codec out, for "
            "floating-point numbers of so many bits"
        )
