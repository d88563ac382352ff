"""Tables of figures: columns, cells with intervals, and their form on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Imports scipy, which takes a second to load, and most commands do without it.
    from flows.report.statistics import Estimate
from collections.abc import Collection

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Column:
    """A figure of each iteration, where it is found, and whether it is a share, from 0 to 1."""

    title: str
    stage: str
    file: str
    name: str
    form: str = ".3f"
    share: bool = False


COLUMNS = (
    Column("mean reward", "evaluate", "metrics.json", "mean_reward"),
    Column("win rate", "evaluate", "metrics.json", "win_rate", share=True),
    Column("tied", "evaluate", "metrics.json", "tied_prompts", "d"),
    Column("distinct-1", "evaluate", "metrics.json", "distinct_1", share=True),
    Column("distinct-2", "evaluate", "metrics.json", "distinct_2", share=True),
    Column("distinct-3", "evaluate", "metrics.json", "distinct_3", share=True),
    Column("distinct-4", "evaluate", "metrics.json", "distinct_4", share=True),
    Column("log π_ref", "evaluate", "metrics.json", "mean_log_pi_ref", ".2f"),
    Column("pairs", "pair", "metrics.json", "pairs", "d"),
    Column("ties", "pair", "metrics.json", "ties", "d"),
    Column("loss", "train", "summary.json", "loss"),
    Column("bonus ratio", "train", "summary.json", "bonus_ratio", ".3g"),
)

SUITE_COLUMNS = (
    *(each for each in COLUMNS if each.stage == "evaluate"),
    Column("tokens", "evaluate", "metrics.json", "mean_response_tokens", ".1f"),
    Column("cut off", "evaluate", "metrics.json", "truncated_share", share=True),
)

DROPPED_FIRST = (
    *("distinct-2", "distinct-3", "distinct-4", "cut off", "tokens", "loss", "distinct-1"),
    *("pairs", "ties", "log π_ref", "bonus ratio", "tied"),
)
"""Titles of columns that a narrow terminal does without first; components of the oracle stay."""


@dataclass(frozen=True)
class Cell:
    """A figure as a person reads it.

    Attributes:
        text: The figure; a dash where there is none.
        interval: Its 95 % interval; empty where it has none.
    """

    text: str
    interval: str = ""

    @classmethod
    def of(cls, estimate: Estimate, form: str) -> Cell:
        """An estimate as a cell; numbers of prompts are whole, whatever the form."""
        form_of_value = "d" if isinstance(estimate.value, int) else form
        return cls(formatted(estimate.value, form_of_value), interval_text(estimate.interval, form))

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


class Figures:
    """A table of figures: a row for the base and one for each iteration."""

    columns: Sequence[Column]
    rows: list[dict[str, Any]]

    def table(self, title: str) -> FittedTable:
        """The table for a terminal."""
        # Below the figure, an interval does not make the table wider than a terminal.
        rows = [
            [
                "base" if row["iteration"] == 0 else str(row["iteration"]),
                *(f"{each.text}\n{each.interval}".rstrip() for each in self.cells(row).values()),
            ]
            for row in self.rows
        ]
        header = ["iteration", *self.titles()]
        elsewhere = "the report and --json"
        return FittedTable(title, header, rows, dropped_first=DROPPED_FIRST, elsewhere=elsewhere)

    def titles(self) -> list[str]:
        """Titles of the table's columns after the first, which is the iteration."""
        return [each.title for each in self.columns] + self.solved() + self.components()

    def cells(self, row: Mapping[str, Any]) -> dict[str, Cell]:
        """A row of the table by the titles of its columns."""
        intervals = row.get("intervals", {})

        def cell(value: float | None, form: str, name: str) -> Cell:
            return Cell(formatted(value, form), interval_text(intervals.get(name), form))

        known = {
            each.title: cell(row.get(each.name), each.form, each.name) for each in self.columns
        }
        known |= {name: cell(row["solved"].get(name), ".3f", name) for name in self.solved()}
        return known | {
            name: cell(row["components"].get(name), ".3f", f"components.{name}")
            for name in self.components()
        }

    def components(self) -> list[str]:
        """Names of the oracle's components, in which it explains its scores."""
        return sorted({name for row in self.rows for name in row["components"]})

    def solved(self) -> list[str]:
        """Names of the figures of solved problems, the accuracy first."""
        return list(dict.fromkeys(name for row in self.rows for name in row["solved"]))


@dataclass
class SuiteFigures(Figures):
    """Figures of one suite.

    Attributes:
        name: Its name.
        rows: As those of :class:`Summary`, for the iterations after which it was run.
    """

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: Sequence[Column] = SUITE_COLUMNS


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """``[0.921, 0.951]``; empty where there is none."""
    return f"[{', '.join(format(end, form) for end in interval)}]" if interval else ""


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, bars in its cells escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(str(cell).replace('|', '&#124;') for cell in line)} |" for line in lines
    )


def formatted(value: Any, form: str) -> str:
    """A figure for a person; a dash where there is none."""
    return "-" if value is None else format(value, form)


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
