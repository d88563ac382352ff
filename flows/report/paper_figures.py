"""One figure of the paper's tables: ours with its interval or its test, beside the paper's own."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from flows.report.between import p_text
from flows.report.comparison_tables import TextTable
from flows.report.paper_values import AVERAGE, Findings, whole_of
from flows.report.shares import difference_over_seeds
from flows.report.statistics import Difference, Estimate
from flows.report.table import Cell

DIVERGENCES = ("KL", "Hellinger", "forward KL")
BASELINE = "f-DPO"
MISSING = "–"
_FORMS = {"WR": ".2f", "AvgR": ".4f", "coherence": ".2f"}


@dataclass(frozen=True)
class PaperFigure:
    """One figure of a table.

    Attributes:
        text: Ours; a dash where it is not computed.
        interval: Its 95 % interval.
        paper: The paper's own figure; empty where it gives none.
    """

    text: str = MISSING
    interval: str = ""
    paper: str = ""

    def __str__(self) -> str:
        own = f"{self.text} {self.interval}".rstrip()
        return f"{own} (paper: {self.paper})" if self.paper else own


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper in one setting.

    Attributes:
        name: Name of its files.
        title: Number and title of the table.
        setting: The model or the task.
        note: What its figures are.
        header: Titles of the columns, the first that of the methods.
        rows: For each method its name and its figures.
        computed: True where this project computed at least one of the figures.
    """

    name: str
    title: str
    setting: str
    note: str
    header: Sequence[str]
    rows: Sequence[tuple[str, Sequence[PaperFigure]]] = field(default_factory=list)

    @property
    def computed(self) -> bool:
        """True where this project computed at least one of the figures."""
        return any(each.text != MISSING for _, row in self.rows for each in row)

    def plain(self) -> TextTable:
        """The same for LaTeX and Markdown."""
        rows = [[method, *map(str, figures)] for method, figures in self.rows]
        return TextTable(self.name, f"{self.title}: {self.setting}", self.note, self.header, rows)


@dataclass(frozen=True)
class Place:
    """One figure of one cell."""

    table: str
    setting: str
    method: str
    divergence: str
    figure: str
    experiment: str

    def over_seeds(
        self, found: Findings, divergence: str | None = None
    ) -> tuple[list[float], Estimate | None]:
        """Ours: its value in each run, and their mean.

        Args:
            found: All that was computed.
            divergence: One to take in place of the figure's own.
        """
        where = self.experiment, self.setting, self.method, divergence or self.divergence
        return found.over_seeds(*where, self.figure)

    def in_paper(self, found: Findings) -> str:
        """The paper's own; empty where it gives none."""
        return found.in_paper(self.table, self.setting, self.method, self.divergence, self.figure)


def mean_figure(found: Findings, place: Place) -> PaperFigure:
    """The mean over seeds; under ``average`` the mean over the divergences."""
    paper = place.in_paper(found)
    if place.divergence == AVERAGE:
        means = [place.over_seeds(found, each)[1] for each in DIVERGENCES]
        known = [each.value for each in means if each is not None]
        if len(known) < len(DIVERGENCES):
            return PaperFigure(paper=paper)
        return PaperFigure(format(statistics.fmean(known), form_of(place.figure)), paper=paper)
    return shown_figure(place.over_seeds(found)[1], place.figure, paper)


def spread_figure(found: Findings, place: Place) -> PaperFigure:
    """Mean ± standard deviation over seeds; nothing of one seed."""
    values, _ = place.over_seeds(found)
    form, paper = form_of(place.figure), place.in_paper(found)
    if len(values) < 2:
        return PaperFigure(paper=paper)
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    return PaperFigure(f"{mean:{form}} ± {deviation:{form}} (n = {len(values)})", paper=paper)


def tested_figure(found: Findings, place: Place) -> PaperFigure:
    """Difference from f-DPO under the same divergence, and p of Welch's test over seeds."""
    difference = against_baseline(
        *(found, place.experiment, place.setting, place.method, place.divergence, place.figure)
    )
    paper = place.in_paper(found)
    if difference is None or difference.p_value is None:
        return PaperFigure(paper=paper)
    value = format(difference.estimate.value, f"+{form_of(place.figure)}")
    return PaperFigure(f"{value}, {p_text(difference.p_value)}", paper=paper)


def against_baseline(
    found: Findings, experiment: str, setting: str, method: str, divergence: str, figure: str
) -> Difference | None:
    """A method's figure minus that of f-DPO under its divergence; None where one is missing."""
    own, _ = found.over_seeds(experiment, setting, method, divergence, figure)
    base, _ = found.over_seeds(experiment, setting, BASELINE, divergence, figure)
    return difference_over_seeds(base, own, whole_of(figure)) if own and base else None


def shown_figure(estimate: Estimate | None, figure: str, paper: str) -> PaperFigure:
    """An estimate as it is printed, beside the paper's figure."""
    if estimate is None:
        return PaperFigure(paper=paper)
    cell = Cell.of(estimate, form_of(figure))
    return PaperFigure(cell.text, cell.interval, paper)


def form_of(figure: str) -> str:
    """Format of a figure by its name: as many decimals as the paper gives."""
    return _FORMS.get(figure, ".4f" if figure.startswith("dist-") else ".2f")


def file_name(*words: str) -> str:
    """Name of a table's or figure's files, ``log-pi-ref-front-desk-geb-1-pi``: ASCII, no spaces."""
    text = "-".join(words).lower().replace("π", "pi")
    plain = "".join(each if each.isascii() and each.isalnum() else "-" for each in text)
    return "-".join(filter(None, plain.split("-")))
