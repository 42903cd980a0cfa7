"""Tables of ``gqsgd presets`` beside that of the presets: in a terminal, on a page, and one entry in full."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table


@dataclass(frozen=True)
class Listing:
    """A table with a row for each name.

    Attributes:
        title: heading of the table.
        about: a sentence below the heading, on the page.
        headings: of the columns.
        whole: headings of the columns that are not folded where the terminal is narrow.
        note: what the columns mean.
        names: what has a row.
        row: the cells of a name, under the headings.
        to_dict: all facts of a name: texts, and mappings of texts to plain values.
        nothing: what an empty fact is called.
    """

    title: str
    about: str
    headings: tuple[str, ...]
    whole: tuple[str, ...]
    note: str
    names: Collection[str]
    row: Callable[[str], list[str]]
    to_dict: Callable[[str], dict[str, Any]]
    nothing: str

    def table(self) -> Table:
        """The table for a terminal."""
        made = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in self.headings:
            made.add_column(heading, overflow="fold", no_wrap=heading in self.whole)
        for name in self.names:
            made.add_row(*self.row(name))
        return made

    def markdown(self) -> list[str]:
        """The lines of the table's section in docs/presets.md."""
        lines = [list(self.headings), ["---"] * len(self.headings), *(self.row(name) for name in self.names)]
        return [
            f"## {self.title}",
            "",
            self.about,
            "",
            self.note.replace("gqsgd presets NAME", "`gqsgd presets NAME`"),
            "",
            *("| " + " | ".join(cells) + " |" for cells in lines),
            "",
        ]

    def in_full(self, name: str) -> Table:
        """All facts of one name."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for label, value in self.to_dict(name).items():
            plain = value if isinstance(value, str) else ", ".join(f"{key}={given!r}" for key, given in value.items())
            grid.add_row(label, plain or self.nothing)
        return grid
