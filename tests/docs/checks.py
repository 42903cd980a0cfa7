"""How sentences and tables of pages are compared with the tables of benchmarks/results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

import pytest

from tests.docs.pages import Table, tables, text_of, without_code

#: What the tables say for each group of a sentence.
Values = Callable[[], Iterable[str | float]]
#: By page, and by sentence, a regular expression.
Sentences = dict[str, dict[str, Values]]

_NUMBER = re.compile(r"(?<![\w.])[+−-]?\d[\d,]*(?:\.\d+)?")


def rounded(value: str | float, like: str) -> str:
    """A value with the decimals of ``like``, halves away from zero, as people round."""
    decimals = Decimal(1).scaleb(-len(like.partition(".")[2]))
    return str(Decimal(plain(str(value))).quantize(decimals, ROUND_HALF_UP))


def plain(number: str) -> str:
    """A number as Python reads it."""
    return number.replace(",", "").replace("−", "-").removeprefix("+")


def numbers(text: str) -> list[str]:
    """All numbers of a cell or a sentence, in order."""
    return [plain(found) for found in _NUMBER.findall(without_code(text))]


def spaced(pattern: str) -> str:
    """A pattern whose spaces may be breaks of lines."""
    return pattern.replace(" ", r"\s+")


def comparison_of(sentences: Sentences) -> Callable[[str, str, Values], None]:
    """Returns the test that each sentence says what the tables say."""
    cases = [(page, pattern, values) for page, found in sentences.items() for pattern, values in found.items()]

    @pytest.mark.parametrize(("page", "pattern", "values"), cases)
    def compare(page: str, pattern: str, values: Values) -> None:
        compare_sentence(page, pattern, values)

    return compare


def ends(values: Iterable[float]) -> list[float]:
    """The least and the largest of some values."""
    ascending = sorted(values)
    return [ascending[0], ascending[-1]]


def compare_sentence(page: str, pattern: str, values: Values) -> None:
    """Assert that a sentence of a page says what the tables say."""
    match = re.search(spaced(pattern), text_of(page), re.DOTALL)
    assert match, f"{page}: the sentence is gone: take its pattern out, too"
    said = [plain(group) for group in match.groups()]
    assert said == [rounded(value, like) for value, like in zip(values(), said, strict=True)], page


@dataclass(frozen=True)
class Checked:
    """A table of a page whose figures are known.

    Attributes:
        page: path of the page from the root.
        heading: the latest heading before the table.
        begin: what the table's first row begins with: names of its columns.
        expected: from a row to what its cells say, in order; None: a cell without a figure, such as a name. A cell of
            the first columns that is empty has that of the row above.
    """

    page: str
    heading: str
    begin: tuple[str, ...]
    expected: Callable[[tuple[str, ...]], Sequence[str | None]]

    @property
    def table(self) -> Table:
        """The table."""
        found = [
            table
            for table in tables(self.page)
            if table.heading == self.heading and table.columns[: len(self.begin)] == self.begin
        ]
        assert len(found) == 1, f"{self.page}: {len(found)} tables under {self.heading!r} begin with {self.begin}"
        return found[0]

    def compare(self) -> None:
        """Assert that every figure of the table is what is expected."""
        for row in filled(self.table.rows):
            expected = self.expected(row)
            assert len(expected) == len(row), row
            for cell, value in zip(row, expected, strict=True):
                if value is not None:
                    said = numbers(cell)
                    like = numbers(value)
                    assert len(said) == len(like), (self.page, row, cell, value)
                    assert said == [rounded(*pair) for pair in zip(like, said, strict=True)], (self.page, row, value)


def filled(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows whose empty first cell is that of the row above."""
    above: tuple[str, ...] = ()
    for row in rows:
        above = row if row[0] else (above[0], *row[1:])
        yield above
