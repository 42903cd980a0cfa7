"""`Codec`: the interface of codecs, which are families of codes at a number of bits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning_gqsgd.errors import ConfigError
from lightning_gqsgd.kernels.protocol import Quantiser

if TYPE_CHECKING:
    from typing_extensions import Self


class Codec(ABC):
    """Base class of codecs. A codec is stateless and frozen. Two codecs are equal if their numbers are equal.

    The argument ``summed`` of methods is the number of ranks whose codes are added before they are decoded, under
    scales that all ranks share. The methods raise ConfigError if the codes of so many ranks cannot be added.

    Attributes:
        name: name of the codec in a configuration.
        fields: the fields of a configuration that this codec reads, and most codecs do not. Codecs that do not name a
            field refuse values other than its default.
        default_bits: default of ``bits`` in a configuration with this codec.
        widths: the numbers of bits that codes can have; other fields can restrict them further.
        default_block_size: default of ``block_size`` in a configuration with this codec.
        has_scale: whether each block has a scale.
        takes_norm: whether the fields ``norm``, ``clip`` and ``scale_per`` define the scale.
        quantiser_finds_scale: whether the quantiser computes each block's scale while it encodes the block.
        unbiased_over: the random quantity over which the codec is unbiased, if this is not the dither.
        adds_as_integers: whether the integer sum of codes encodes the sum of the coordinates, under a shared scale.
        bits: bits of one code on the wire.
    """

    name: ClassVar[str]
    fields: ClassVar[frozenset[str]] = frozenset()
    default_bits: ClassVar[int] = 8
    widths: ClassVar[Sequence[int]] = range(2, 9)
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
        """Returns the codec with a number of bits, one of `widths`. Codecs that have `fields` take these as keyword
        arguments, too.

        Raises:
            ConfigError: if the codec cannot have such a field, or not with this number of bits.
        """

    @classmethod
    def check_bits(cls, bits: int) -> None:
        """Raise ConfigError for a number of bits that is none of `widths`."""
        if bits in cls.widths:
            return
        *others, last = map(str, cls.widths)
        words = f"{', '.join(others)} or {last}" if others else last
        if isinstance(cls.widths, range) and others:
            words = f"{others[0]} to {last}"
        raise ConfigError(f"codec={cls.name!r} has bits={words}, not bits={bits}; leave bits out, or codec")

    def check_blocks(self, block_size: int, *, rotation: bool) -> None:
        """Check that the codec works with a block size, and with rotated blocks if ``rotation`` is true.

        Raises:
            ConfigError: if the codec does not work with them.
        """
        if rotation and block_size & (block_size - 1):
            raise ConfigError(
                f"rotation=True needs a block_size that is a power of two, not {block_size}; take e.g. block_size=128, "
                "or rotation=False"
            )

    @property
    def biased_by(self) -> str:
        """The setting that makes the codec biased, so that training needs a memory; empty if the codec is unbiased. A
        codec is biased if the mean of the decoded coordinates differs from the encoded coordinates."""
        return ""

    @property
    def adds_in_pairs(self) -> bool:
        """True if codes can be added in pairs, under a shared scale."""
        return False

    @property
    def has_odd_levels(self) -> bool:
        """True if all blocks have an odd number of levels, which Elias codes need."""
        return False

    def check_room_for_sums(self) -> None:
        """Raise ConfigError if a code has too few bits for the sum of two ranks' codes."""
        if self.bits < 2:
            raise ConfigError(
                f"bits={self.bits} leaves no room to sum the codes of two ranks; take bits=2 or reducer='two_shot'"
            )

    def describe(self) -> tuple[str, list[str]]:
        """Returns the bits per coordinate as text, and a list of words that describe the codec."""
        return f"{self.bits}", [self.name]

    @abstractmethod
    def quantiser(self, block_size: int, summed: int | None = None) -> Quantiser:
        """Returns the quantiser: the codec at one block size, as kernels see it.

        Args:
            block_size: the largest number of coordinates in a block.
            summed: see the class. None: no codes are added.
        """

    @abstractmethod
    def error_variance(self, summed: int = 1) -> float:
        """Returns the mean square error of one rank's coordinate, in units of the squared scale; NaN if it is not
        predicted."""

    @abstractmethod
    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns ω with E|Q(x) - x|² <= ω |x|² for ``dimension`` coordinates that share a scale; infinite if the codec
        is biased.

        Args:
            dimension: number of coordinates that share a scale.
            summed: see the class. ω describes the codes of one rank.
        """

    def delta(self, dimension: int) -> float:
        """Returns δ with E|C(x) - x|² <= (1-δ) |x|² for C = Q/(1+ω). Biased codecs override this with their own δ."""
        return 1 / (1 + self.omega(dimension))


class BiasedCodec(Codec):
    """Base class of codecs whose error is a bias, and no variance. So they have a δ, and no ω."""

    @property
    def biased_by(self) -> str:
        """The setting that makes the codec biased: the codec itself."""
        return f"codec={self.name!r}"

    def error_variance(self, summed: int = 1) -> float:
        """Returns NaN: the error depends on the gradient alone, so it is not predicted."""
        return math.nan

    def omega(self, dimension: int, summed: int = 1) -> float:
        """Returns infinity, because the codec is biased."""
        return math.inf

    @abstractmethod
    def delta(self, dimension: int) -> float:
        """Returns δ with E|C(x) - x|² <= (1-δ) |x|²."""
