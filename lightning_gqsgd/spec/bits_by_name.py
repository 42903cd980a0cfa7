"""`BitsByName`: bits per coordinate by patterns of parameter names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_gqsgd.errors import ConfigError, plain_integer

_EXAMPLE = 'bits={"*": 4, "head.*": 8}'


class BitsByName(Mapping[str, int]):
    """Bits per coordinate by shell-style patterns of parameter names, in order.

    The last pattern that matches a name decides, as in a .gitignore file. The order decides because users can see it,
    and because there is no common measure of how specific a pattern is. Equal objects have the same patterns in the
    same order.

    Args:
        patterns: a mapping from patterns to bits, or pairs of a pattern and its bits.

    Raises:
        ConfigError: if there is no pattern, if a pattern is not a string or occurs twice, or if bits are not an
            integer.
    """

    def __init__(self, patterns: Mapping[str, int] | Iterable[Sequence[Any]]) -> None:
        try:
            given = list(patterns.items() if isinstance(patterns, Mapping) else patterns)
            pairs = [tuple(map(plain_integer, pair)) for pair in given]
        except TypeError:  # no pairs, so no patterns
            pairs = []
        if not pairs or not all(len(pair) == 2 and isinstance(pair[0], str) and type(pair[1]) is int for pair in pairs):
            raise ConfigError(f"bits={patterns!r} must give each pattern a number of bits, e.g. {_EXAMPLE}")
        self._pairs = tuple(pairs)
        self._bits = dict(self._pairs)
        if len(self._bits) < len(self._pairs):
            raise ConfigError(f"bits={list(self._pairs)!r} has a pattern twice; give each pattern once")

    def __getitem__(self, pattern: str) -> int:
        return self._bits[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._bits)

    def __len__(self) -> int:
        return len(self._bits)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BitsByName) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(self._bits)

    def __reduce__(self) -> Any:
        return BitsByName, (self._pairs,)

    def pairs(self) -> list[list[Any]]:
        """Returns the patterns and their bits as a list of pairs, which keeps its order in JSON."""
        return [list(pair) for pair in self._pairs]

    def bits_of(self, name: str) -> int | None:
        """Returns the bits of a parameter, or None if no pattern matches its name."""
        pattern = self._deciding(name)
        return None if pattern is None else self._bits[pattern]

    def check(self, names: Sequence[str], raw: Iterable[str]) -> None:
        """Check the patterns against a model.

        Args:
            names: the names of all parameters.
            raw: the names of the parameters that are sent uncompressed. They need no bits.

        Raises:
            ConfigError: if a pattern decides for no parameter, or if no pattern matches a parameter that needs bits.
        """
        check_matched("bits", self, names)
        deciding = {self._deciding(name) for name in names}
        for pattern in self:
            if pattern not in deciding:
                raise ConfigError(
                    f"bits: the pattern {pattern!r} decides for no parameter, because the last pattern that matches a "
                    f"name wins, and later ones match the same names; put general patterns first, e.g. {_EXAMPLE}"
                )
        uncompressed = set(raw)
        missing = [name for name in names if self._deciding(name) is None and name not in uncompressed]
        if missing:
            pattern, bits = self._pairs[0]
            raise ConfigError(
                f"bits: no pattern matches parameter {missing[0]!r} ({len(missing)} of {len(names)} have none); begin "
                f'with a pattern for all, e.g. bits={{"*": 8, {pattern!r}: {bits}}}'
            )

    def _deciding(self, name: str) -> str | None:
        """Returns the last pattern that matches a name, or None."""
        return next((pattern for pattern, _ in reversed(self._pairs) if fnmatch.fnmatchcase(name, pattern)), None)


def check_matched(field: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Check that each pattern matches at least one name.

    Args:
        field: the name of the configuration's field, for the error message.
        patterns: shell-style patterns.
        names: the names of all parameters of the model.

    Raises:
        ConfigError: if a pattern matches no name. The error message lists similar names.
    """
    unmatched = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unmatched:
        plain = unmatched[0].strip("*.?!")
        near = difflib.get_close_matches(plain, names, n=3, cutoff=0.5) or list(names)[:3]
        inside = [name for name in names if plain in name][:3]
        raise ConfigError(
            f"{field} patterns {unmatched} match no parameter; names look like {', '.join(inside or near)}"
        )
