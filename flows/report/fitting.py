"""A table for a terminal that leaves columns out rather than cutting figures short."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000


@dataclass
class FittedTable:
    """A table whose columns are shown as far as the terminal is wide.

    Attributes:
        title: Title; empty for none.
        header: Titles of the columns.
        rows: Cells as plain text, a line break in a cell being one.
        kept: Number of columns from the left that are always shown.
        dropped_first: Titles of the columns that are left out first, in this order; the others
            follow from the right.
        elsewhere: Place of what is left out, as the note names it.
        left: Number of columns from the left that are aligned to the left, others to the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    kept: int = 1
    dropped_first: Collection[str] = ()
    elsewhere: str = "--json"
    left: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the widest table that fits, and a line with the columns left out."""
        shown = list(range(len(self.header)))
        removable = [self.header.index(each) for each in self.dropped_first if each in self.header]
        removable += [each for each in reversed(shown) if each not in removable]
        removable = [each for each in removable if each >= self.kept]
        table = self._table(shown)
        hidden: list[int] = []
        unlimited = options.update(max_width=_UNLIMITED)
        while removable and Measurement.get(console, unlimited, table).maximum > options.max_width:
            hidden.append(removable.pop(0))
            shown.remove(hidden[-1])
            table = self._table(shown)
        yield table
        if hidden:
            names = ", ".join(self.header[each] for each in sorted(hidden))
            yield Text(f"no room for: {names} (all are in {self.elsewhere})", style="dim")

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for position, each in enumerate(shown):
            right = position >= self.left
            # A column that cannot be left out is folded, not cut.
            table.add_column(
                self.header[each], justify="right" if right else "left", overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(_cell(row[each]) for each in shown))
        return table


def _cell(text: str) -> Text:
    """The first line as it is, others softer: they are intervals."""
    first, *others = text.split("\n")
    return Text("\n").join([Text(first), *(Text(each, style="dim") for each in others)])
