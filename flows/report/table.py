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
    name: str
    form: str = ".3f"
    whole: float | None = None


# A narrow terminal does without those on the right.
COLUMNS = (
    FigureColumn("mean reward", "mean_reward"),
    FigureColumn("win rate", "win_rate", whole=1.0),
    FigureColumn("accuracy", "accuracy", whole=1.0),
    FigureColumn("tied", "tied_prompts", ".0f"),
    FigureColumn("log π_ref", "mean_log_pi_ref", ".2f"),
    FigureColumn("KL", "kl_to_base", ".2f"),
    FigureColumn("pairs", "pairs", ".0f"),
    FigureColumn("ties", "ties", ".0f"),
    FigureColumn("loss", "loss"),
    FigureColumn("bonus ratio", "bonus_ratio", ".3g"),
    FigureColumn("κ", "kappa", ".3g"),
    FigureColumn("distinct-1", "distinct_1", whole=1.0),
    FigureColumn("tokens", "mean_response_tokens", ".1f"),
    FigureColumn("cut off", "truncated_share", whole=1.0),
    FigureColumn("repetition", "repetition", whole=1.0),
    FigureColumn("refusals", "refusal_share", whole=1.0),
    FigureColumn("distinct-2", "distinct_2", whole=1.0),
    FigureColumn("distinct-3", "distinct_3", whole=1.0),
    FigureColumn("distinct-4", "distinct_4", whole=1.0),
)
_COLUMNS = {column.name: column for column in COLUMNS}
_PLACES = {name: place for place, name in enumerate(_COLUMNS)}
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
        return cls(format(estimate.value, form), interval_text(estimate.interval, form))

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
    whole = 1.0 if name.startswith("pass@") else None
    return _COLUMNS.get(name) or FigureColumn(title, name, whole=whole)


Lines = dict[tuple[str, ...], dict[str, Cell]]
"""Cells by figure, by the labels of their line."""


def figures_table(
    title: str,
    header: Sequence[str],
    lines: Lines,
    *,
    left: int = 0,
    note: str = "",
) -> FittedTable:
    """A table with a column for each figure that some line has.

    Args:
        title: Title of the table.
        header: Titles of the lines' labels.
        lines: The table's lines.
        left: As in :class:`FittedTable`.
        note: As in :class:`FittedTable`.
    """
    names = ordered(itertools.chain.from_iterable(lines.values()))
    rows: list[list[str | Cell]] = []
    for labels, cells in lines.items():
        figures = [cells.get(name, Cell("-")) for name in names]
        rows.append([*labels, *figures])
    titles = [column_of(name).title for name in names]
    return FittedTable(title, [*header, *titles], rows, left=left, note=note)


def ordered(names: Iterable[str]) -> list[str]:
    """Figures in a table's order, each once; the order of figures without a place is kept."""
    return sorted(dict.fromkeys(names), key=lambda name: _PLACES.get(name, _OTHERS))


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """``[0.921, 0.951]``; empty if there is none."""
    if not interval:
        return ""
    low, high = interval
    return f"[{low:{form}}, {high:{form}}]"


def formatted(value: float | None, form: str) -> str:
    """A figure for a person; a dash if there is none."""
    return "-" if value is None else format(value, form)


_UNLIMITED = 10_000


@dataclass
class FittedTable:
    """A table as a person reads it: Markdown, or on a terminal as far as that is wide.

    Attributes:
        header: Titles of the columns.
        rows: Its cells; a line break in a text is one on a terminal.
        kept: Number of columns from the left that are always shown.
        left: Number of columns from the left that are aligned to the left, others to the right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    kept: int = 1
    left: int = 0
    note: str = ""

    def records(self) -> list[dict[str, str]]:
        """A record for each row, from the titles of the columns to text on one line."""
        records = []
        for row in self.rows:
            texts = [str(cell).replace("\n", ", ") for cell in row]
            records.append(dict(zip(self.header, texts, strict=True)))
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
        while shown > self.kept:
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
    """The first line as it is, others softer: they are intervals."""
    # Below the figure, an interval does not make the table wider than a terminal.
    if isinstance(cell, Cell):
        cell = f"{cell.text}\n{cell.interval}".rstrip()
    first, *others = cell.split("\n")
    lines = [Text(line, style="dim") for line in others]
    return Text("\n").join([Text(first), *lines])
