"""Tables of figures: columns, figures with intervals, and their form on a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from stages.evaluate.statistics import UNBOUNDED, Bounds, Estimate

POLICY = "policy"
BASE = "base"


@dataclass(frozen=True)
class FigureColumn:
    """A figure of each iteration.

    Attributes:
        form: Format of its values.
        bounds: Its least and largest value, at which intervals over seeds end.
    """

    title: str
    form: str = ".3f"
    bounds: Bounds = (0.0, math.inf)


_SHARE = (0.0, 1.0)
COLUMNS = {
    "mean_reward": FigureColumn("mean reward", bounds=UNBOUNDED),
    "win_rate": FigureColumn("win rate", bounds=_SHARE),
    "accuracy": FigureColumn("accuracy", bounds=_SHARE),
    "tied_prompts": FigureColumn("tied", ".0f"),
    "mean_log_pi_ref": FigureColumn("log π_ref", ".2f", UNBOUNDED),
    "kl_to_base": FigureColumn("KL", ".2f"),
    "pairs": FigureColumn("pairs", ".0f"),
    "ties": FigureColumn("ties", ".0f"),
    "loss": FigureColumn("loss", bounds=UNBOUNDED),
    "bonus_ratio": FigureColumn("bonus ratio", ".3g"),
    "kappa": FigureColumn("κ", ".3g"),
    "distinct_1": FigureColumn("distinct-1", bounds=_SHARE),
    "mean_response_tokens": FigureColumn("tokens", ".1f"),
    "truncated_share": FigureColumn("cut off", bounds=_SHARE),
    "repetition": FigureColumn("repetition", bounds=_SHARE),
    "refusal_share": FigureColumn("refusals", bounds=_SHARE),
    "distinct_2": FigureColumn("distinct-2", bounds=_SHARE),
    "distinct_3": FigureColumn("distinct-3", bounds=_SHARE),
    "distinct_4": FigureColumn("distinct-4", bounds=_SHARE),
}
"""Columns by figure."""
_PLACES = {name: place for place, name in enumerate(COLUMNS)}
_OTHERS = _PLACES["accuracy"] + 0.5
"""Place of the oracle's components and pass@k."""


def shown(estimate: Estimate, form: str, spread: str = "") -> str:
    """An estimate for a person, with its 95 % interval if it has one: ``0.61 [0.55, 0.67]``.

    A ``spread``, such as a standard deviation, stands before the interval.
    """
    text = f"{estimate.value:{form}}{spread}"
    if estimate.interval is None:
        return text
    low, high = estimate.interval
    return f"{text} [{low:{form}}, {high:{form}}]"


@dataclass(frozen=True)
class FigureRow:
    """Figures after one iteration, by name, as far as they are known; 0 is the base."""

    iteration: int
    figures: dict[str, Estimate] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """The figures without their intervals."""
        return {name: figure.value for name, figure in self.figures.items()}

    def cells(self) -> dict[str, str]:
        """The figures for a person."""
        return {name: shown(figure, column_of(name).form) for name, figure in self.figures.items()}


def column_of(name: str) -> FigureColumn:
    """The column of a figure; the oracle adds columns to :data:`COLUMNS`."""
    title = name.removeprefix("components.")
    if any(column.title == title for column in COLUMNS.values()):
        title = name
    bounds = _SHARE if name.startswith("pass@") else UNBOUNDED
    return COLUMNS.get(name) or FigureColumn(title, bounds=bounds)


Lines = dict[tuple[str, ...], dict[str, str]]
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
    rows = []
    for labels, cells in lines.items():
        figures = [cells.get(name, "-") for name in names]
        rows.append([*labels, *figures])
    titles = [column_of(name).title for name in names]
    return FittedTable(title, [*header, *titles], rows, left=len(header), note=note)


def ordered(names: Iterable[str]) -> list[str]:
    """Figures in a table's order, each once; the order of figures without a place is kept."""
    return sorted(dict.fromkeys(names), key=lambda name: _PLACES.get(name, _OTHERS))


_UNLIMITED = 10_000
# Parts of a table that is wider than a terminal.
_MOST_PARTS = 3


@dataclass
class FittedTable:
    """A table as a person reads it: Markdown, or on a terminal.

    Attributes:
        header: Titles of the columns.
        rows: Its cells.
        left: Number of columns from the left that name the rows; the others are aligned to the
            right.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 0
    note: str = ""

    def records(self) -> list[dict[str, str]]:
        """A record for each row, from the titles of the columns to text."""
        records = []
        for row in self.rows:
            records.append(dict(zip(self.header, row, strict=True)))
        return records

    def markdown(self, most: int | None = None) -> str:
        """The first columns, or all, in Markdown, without title and note; bars are escaped."""
        lines = []
        for row in (self.header, ["---"] * len(self.header), *self.rows):
            cells = [cell.replace("|", "&#124;") for cell in row[:most]]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table; columns for which it is too narrow follow below, in further parts.

        Each part begins with the columns that name the rows. After the third,
        columns are only named.
        """
        if self.title:
            yield Text(self.title, style="table.title")
        parts = list(self._parts(console, options))
        for part in parts[:_MOST_PARTS]:
            if part != parts[0]:
                yield ""
            yield self._table(part)
        if len(parts) > _MOST_PARTS:
            first = parts[_MOST_PARTS][self.left]
            names = ", ".join(self.header[first:])
            yield Text(f"no room for: {names} (--json has all)", style="dim")

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        """The columns of each part, as many as have room."""
        labels = list(range(self.left))
        part = labels
        unlimited = options.update(max_width=_UNLIMITED)
        for column in range(self.left, len(self.header)):
            wider = self._table([*part, column])
            width = console.measure(wider, options=unlimited).maximum
            if width > options.max_width and part != labels:
                yield part
                part = labels
            part = [*part, column]
        yield part

    def _table(self, columns: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in columns:
            justify: Literal["left", "right"] = "left" if column < self.left else "right"
            # A label that has no room is folded, not cut.
            table.add_column(self.header[column], justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(self._cell(row, column) for column in columns))
        return table

    def _cell(self, row: Sequence[str], column: int) -> Text:
        """A cell; its interval stands below, where it does not make the table wider."""
        if column < self.left:
            return Text(row[column])
        cell = Text(row[column].replace(" [", "\n["))
        cell.highlight_regex(r"\n.*", "dim")
        return cell
