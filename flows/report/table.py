"""Tables of figures: columns, cells with intervals, and their form on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Estimate:
    """A figure and the ends of its 95 % interval; None if there are too few observations.

    A difference has the two-sided p-value of there being none, unless it cannot be tested.
    """

    value: float
    low: float | None = None
    high: float | None = None
    p_value: float | None = None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends, or None."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def within(self, least: float, most: float | None) -> Estimate:
        """The same with an interval that ends at two bounds; None for ``most`` sets none."""
        if self.low is None or self.high is None or most is None or not least <= self.value <= most:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


Model = Literal["policy", "base"]
POLICY: Model = "policy"
BASE: Model = "base"


@dataclass(frozen=True)
class Column:
    """A figure of each iteration, the stage that finds it, and whether it is a share, 0 to 1."""

    title: str
    stage: str
    name: str
    form: str = ".3f"
    share: bool = False


ANSWER_COLUMNS = (
    Column("distinct-1", "evaluate", "distinct_1", share=True),
    Column("distinct-2", "evaluate", "distinct_2", share=True),
    Column("distinct-3", "evaluate", "distinct_3", share=True),
    Column("distinct-4", "evaluate", "distinct_4", share=True),
    Column("tokens", "evaluate", "mean_response_tokens", ".1f"),
    Column("cut off", "evaluate", "truncated_share", share=True),
    Column("repetition", "evaluate", "repetition", share=True),
    Column("refusals", "evaluate", "refusal_share", share=True),
)
"""Figures of the answers themselves, whatever their reward."""

COLUMNS = (
    Column("mean reward", "evaluate", "mean_reward"),
    Column("win rate", "evaluate", "win_rate", share=True),
    Column("tied", "evaluate", "tied_prompts", "d"),
    Column("log π_ref", "evaluate", "mean_log_pi_ref", ".2f"),
    Column("KL", "evaluate", "kl_to_base", ".2f"),
    Column("pairs", "pair", "pairs", "d"),
    Column("ties", "pair", "ties", "d"),
    Column("loss", "train", "loss"),
    Column("bonus ratio", "train", "bonus_ratio", ".3g"),
    *ANSWER_COLUMNS,
)

SUITE_COLUMNS = tuple(column for column in COLUMNS if column.stage == "evaluate")

DROPPED_FIRST = (
    "distinct-2",
    "distinct-3",
    "distinct-4",
    "refusals",
    "repetition",
    "cut off",
    "tokens",
    "loss",
    "distinct-1",
    "pairs",
    "ties",
    "log π_ref",
    "KL",
    "bonus ratio",
    "tied",
    "test",
    "p",
    "evaluation",
)
"""Titles of columns that a narrow terminal does without first; components of the oracle stay."""


@dataclass(frozen=True)
class Cell:
    """A figure as a person reads it, or a dash, and its 95 % interval; empty if it has none."""

    text: str
    interval: str = ""

    @classmethod
    def of(cls, estimate: Estimate | None, form: str) -> Self:
        """An estimate as a cell; numbers of prompts are whole, whatever the form."""
        if estimate is None:
            return cls("-")
        form_of_value = "d" if isinstance(estimate.value, int) else form
        return cls(formatted(estimate.value, form_of_value), interval_text(estimate.interval, form))

    def __str__(self) -> str:
        return f"{self.text} {self.interval}".rstrip()


class Figures:
    """A table of figures: a row for the base and one for each iteration."""

    columns: Sequence[Column]
    rows: list[dict[str, Any]]

    def table(self, title: str = "") -> FittedTable:
        """The figures with their intervals."""
        columns = {column.name: column for column in self.columns}
        for row in self.rows:
            for name in row.get("solved", {}):
                columns[name] = Column(name, "evaluate", name)
        for name in self.components():
            columns[f"components.{name}"] = Column(name, "evaluate", f"components.{name}")
        names = ordered(columns)
        rows: list[list[str | Cell]] = []
        for row in self.rows:
            cells = [Cell.of(figure_of(row, name), columns[name].form) for name in names]
            rows.append([str(row.get("iteration") or "base"), *cells])
        return FittedTable(
            title,
            ["iteration", *(columns[name].title for name in names)],
            rows,
        )

    def components(self) -> list[str]:
        """Names of the oracle's components, in which it explains its scores."""
        return sorted({name for row in self.rows for name in row["components"]})


@dataclass
class SuiteFigures(Figures):
    """Figures of one suite; rows as of :class:`Summary`, if it was run."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: Sequence[Column] = SUITE_COLUMNS


def figure_of(row: Mapping[str, Any], name: str) -> Estimate | None:
    """A figure of one iteration, as :attr:`Summary.rows` has it; None if it is not known."""
    group, _, component = name.partition(".")
    values = row["components"] if group == "components" else row | row.get("solved", {})
    value = values.get(component or name)
    if value is None:
        return None
    return Estimate(value, *(row.get("intervals", {}).get(name) or ()))


def ordered(names: Iterable[str]) -> list[str]:
    """Figures in a table's order: mean reward and win rate, what explains them, all others."""
    first = {column.name for column in COLUMNS[:2]}
    last = {column.name for column in COLUMNS[2:]}
    # False sorts before True, and the order of the names is kept otherwise.
    return sorted(names, key=lambda name: (name not in first, name in last))


def interval_text(interval: Sequence[float] | None, form: str) -> str:
    """``[0.921, 0.951]``; empty if there is none."""
    return f"[{', '.join(format(end, form) for end in interval)}]" if interval else ""


def formatted(value: Any, form: str) -> str:
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
        rows = ([str(cell).replace("\n", ", ") for cell in row] for row in self.rows)
        return [dict(zip(self.header, row, strict=True)) for row in rows]

    def part(self, titles: Collection[str]) -> FittedTable:
        """The same with these columns alone, after those that are always shown."""
        places = [n for n, title in enumerate(self.header) if n < self.kept or title in titles]
        header = [self.header[n] for n in places]
        rows = [[row[n] for n in places] for row in self.rows]
        return replace(self, header=header, rows=rows)

    def markdown(self) -> str:
        """The table in Markdown, without its title and note; bars in its cells are escaped."""
        lines = []
        for row in (self.header, ["---"] * len(self.header), *self.rows):
            cells = [str(cell).replace("|", "&#124;") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the widest table that fits, and a line with the columns left out.

        Columns of :data:`DROPPED_FIRST` are left out first, then others from the right.
        """
        shown = list(range(len(self.header)))
        removable = [self.header.index(title) for title in DROPPED_FIRST if title in self.header]
        removable += [column for column in reversed(shown) if column not in removable]
        removable = [column for column in removable if column >= self.kept]
        table = self._table(shown)
        hidden: list[int] = []
        unlimited = options.update(max_width=_UNLIMITED)
        while removable and Measurement.get(console, unlimited, table).maximum > options.max_width:
            column = removable.pop(0)
            hidden.append(column)
            shown.remove(column)
            table = self._table(shown)
        yield table
        if hidden:
            titles = ", ".join(self.header[column] for column in sorted(hidden))
            yield Text(f"no room for: {titles} (--json has all)", style="dim")

    def _table(self, shown: Sequence[int]) -> Table:
        table = Table(title=self.title or None, title_justify="left", box=None, pad_edge=False)
        for position, column in enumerate(shown):
            justify: Literal["left", "right"] = "left" if position < self.left else "right"
            # A column that cannot be left out is folded, not cut.
            table.add_column(self.header[column], justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(_cell(row[column]) for column in shown))
        return table


def _cell(cell: str | Cell) -> Text:
    """The first line as it is, others softer: they are intervals."""
    # Below the figure, an interval does not make the table wider than a terminal.
    text = f"{cell.text}\n{cell.interval}".rstrip() if isinstance(cell, Cell) else cell
    first, *others = text.split("\n")
    return Text("\n").join([Text(first), *(Text(line, style="dim") for line in others)])
