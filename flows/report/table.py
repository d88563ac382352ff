"""Tables of figures: columns, cells with intervals, and their form on a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stages.evaluate.statistics import Estimate

POLICY = "policy"
BASE = "base"


@dataclass(frozen=True)
class FigureColumn:
    """A figure of each iteration.

    ``whole`` is the largest share; None if the figure has no upper bound.
    """

    title: str
    form: str = ".3f"
    whole: float | None = None


# A narrow terminal does without those on the right.
COLUMNS = {
    "mean_reward": FigureColumn("mean reward"),
    "win_rate": FigureColumn("win rate", whole=1.0),
    "accuracy": FigureColumn("accuracy", whole=1.0),
    "tied_prompts": FigureColumn("tied", ".0f"),
    "mean_log_pi_ref": FigureColumn("log π_ref", ".2f"),
    "kl_to_base": FigureColumn("KL", ".2f"),
    "pairs": FigureColumn("pairs", ".0f"),
    "ties": FigureColumn("ties", ".0f"),
    "loss": FigureColumn("loss"),
    "bonus_ratio": FigureColumn("bonus ratio", ".3g"),
    "kappa": FigureColumn("κ", ".3g"),
    "distinct_1": FigureColumn("distinct-1", whole=1.0),
    "mean_response_tokens": FigureColumn("tokens", ".1f"),
    "truncated_share": FigureColumn("cut off", whole=1.0),
    "repetition": FigureColumn("repetition", whole=1.0),
    "refusal_share": FigureColumn("refusals", whole=1.0),
    "distinct_2": FigureColumn("distinct-2", whole=1.0),
    "distinct_3": FigureColumn("distinct-3", whole=1.0),
    "distinct_4": FigureColumn("distinct-4", whole=1.0),
}
"""Columns by figure."""
_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_OTHERS = _PLACES["accuracy"] + 0.5
"""Place of the oracle's components and pass@k."""


@dataclass(frozen=True)
class Cell:
    """A figure as a person reads it, or a dash, and its 95 % interval; empty if it has none."""

    text: str
    interval: str = ""

    @classmethod
    def of(cls, estimate: Estimate | None, form: str) -> Self:
        """An estimate as a cell; a dash if it is not known."""
        if estimate is None:
            return cls("-")
        text = format(estimate.value, form)
        if estimate.interval is None:
            return cls(text)
        low, high = estimate.interval
        return cls(text, f"[{low:{form}}, {high:{form}}]")

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


@dataclass(frozen=True)
class FigureRow:
    """Figures after one iteration, by name, as far as they are known; 0 is the base."""

    iteration: int
    figures: dict[str, Estimate] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The figures without their intervals."""
        return {name: figure.value for name, figure in self.figures.items()}

    def cells(self) -> dict[str, Cell]:
        """The figures for a person."""
        cells = {}
        for name, figure in self.figures.items():
            cells[name] = Cell.of(figure, column_of(name).form)
        return cells


def column_of(name: str) -> FigureColumn:
    """The column of a figure; the oracle adds columns to :data:`COLUMNS`."""
    title = name.removeprefix("components.")
    if any(column.title == title for column in COLUMNS.values()):
        title = name
    whole = 1.0 if name.startswith("pass@") else None
    return COLUMNS.get(name) or FigureColumn(title, whole=whole)


Lines = dict[tuple[str, ...], dict[str, Cell]]
"""Cells by figure, by the labels of their line."""


def figures_table(
    title: str,
    header: Sequence[str],
    lines: Lines,
    note: str = "",
) -> FittedTable:
    """A table with a column for each figure that some line has.

    Args:
        title: Title of the table.
        header: Titles of the lines' labels.
        lines: The table's lines.
        note: As in :class:`FittedTable`.
    """
    names = ordered(itertools.chain.from_iterable(lines.values()))
    rows: list[list[str | Cell]] = []
    for labels, cells in lines.items():
        figures = [cells.get(name, Cell("-")) for name in names]
        rows.append([*labels, *figures])
    titles = [column_of(name).title for name in names]
    return FittedTable(title, [*header, *titles], rows, kept=1, left=len(header), note=note)


def ordered(names: Iterable[str]) -> list[str]:
    """Figures in a table's order, each once; the order of figures without a place is kept."""
    return sorted(dict.fromkeys(names), key=lambda name: _PLACES.get(name, _OTHERS))


_UNLIMITED = 10_000


@dataclass
class FittedTable:
    """A table as a person reads it: Markdown, or on a terminal as far as that is wide.

    Attributes:
        header: Titles of the columns.
        rows: Its cells.
        kept: Number of columns from the left that are always shown; None for all.
        left: Number of columns from the left that are aligned to the left, others to the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kept: int | None = None
    left: int = 0
    note: str = ""

    def records(self) -> list[dict[str, str]]:
        """A record for each row, from the titles of the columns to text."""
        records = []
        for row in self.rows:
            records.append(dict(zip(self.header, map(str, row), strict=True)))
        return records

    def first_columns(self, count: int) -> Self:
        """The table without the columns right of the first ``count``."""
        rows = [row[:count] for row in self.rows]
        return replace(self, header=self.header[:count], rows=rows)

    def markdown(self) -> str:
        """The table in Markdown, without its title and note; bars in its cells are escaped."""
        lines = []
        for row in (self.header, ["---"] * len(self.header), *self.rows):
            cells = [str(cell).replace("|", "&#124;") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the widest table that fits, and a line with the columns left out.

        Columns are left out from the right.
        """
        shown = len(self.header)
        unlimited = options.update(max_width=_UNLIMITED)
        while shown > (self.kept or shown):
            table = self._table(shown)
            if Measurement.get(console, unlimited, table).maximum <= options.max_width:
                break
            shown -= 1
        yield self._table(shown)
        if shown < len(self.header):
            titles = ", ".join(self.header[shown:])
            yield Text(f"no room for: {titles} (--json has all)", style="dim")

    def _table(self, shown: int) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for position, title in enumerate(self.header[:shown]):
            justify: Literal["left", "right"] = "left" if position < self.left else "right"
            # A column that cannot be left out is folded, not cut.
            table.add_column(title, justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(_cell(cell) for cell in row[:shown]))
        return table


def _cell(cell: str | Cell) -> Text:
    """A cell's text, and below it, where it does not make the table wider, its interval."""
    if isinstance(cell, str) or not cell.interval:
        return Text(str(cell))
    return Text.assemble(cell.text, "\n", (cell.interval, "dim"))
