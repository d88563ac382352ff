"""The paper's report: one page with every table and figure, and its Markdown and JSON."""

from __future__ import annotations

import base64
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.paper.tables import (
    BASELINE,
    DIVERGENCES,
    PaperTable,
    file_name,
    paper_tables,
)
from experiments.paper.values import BANDIT, Findings, coverage, value_of
from experiments.study import StudyRun
from flows.report.comparison import training_log_pi_ref
from flows.report.files import json_text, render, write_file
from flows.report.plots import Line, course_figure, histogram_figure, png, svg
from flows.report.statistics import over_seeds
from stages.store.base import Artifact, Store

_KAPPA_FIELD = "train.kappa"
_GEB = "GEB"
_BANDIT_FIGURES = ("reference", "policies")
# Places of the tables and figures in the paper's order.
_ORDER = (
    ("log-pi-ref", "Figure 2 · log π_ref of the last iteration's training responses, KL"),
    ("in-domain", "Table 2 · In-domain evaluation"),
    ("out-of-domain", "Table 3 · Out-of-domain evaluation"),
    ("kappa", "Figure 3 · The choice of κ"),
    ("distinct", "Table 4 · Distinct n-grams"),
    ("hard", "Table 5 · Hard prompts"),
    ("bandit", "Figures 4 and 5 · The bandit"),
    ("repeats", "Table 6 · Repeated runs"),
    ("p-values", "Table 7 · p-values against f-DPO"),
    ("coherence", "Table 8 · Coherence"),
    ("responses", "Table 9 · Responses that get the bonus"),
)


@dataclass(frozen=True)
class WrittenReport:
    """The report, and the places of its files.

    Attributes:
        page: Place of the page; an address if the store is a bucket.
        markdown: The same as Markdown.
        figures: The figures that the Markdown shows, PNG files beside it.
        document: The same for JSON.
    """

    page: str
    markdown: Path
    figures: Sequence[Path]
    document: dict[str, Any]

    def copy_to(self, folder: Path) -> None:
        """Copies the Markdown and its figures into a folder, which is made if it lacks."""
        for each in (self.markdown, *self.figures):
            write_file(folder / each.name, each.read_bytes())

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {**self.document, "page": self.page}


def write_report(
    store: Store, name: str, found: Findings, bandit: Artifact | None
) -> WrittenReport:
    """Writes the report into the folder ``name`` of the store's runs.

    Args:
        store: The store.
        name: Name of the folder; files of an earlier report are replaced.
        found: What was computed.
        bandit: Artifact of the bandit experiment; None where it was not run.
    """
    folder = store.run_path(name)
    shown = paper_tables(found)
    drawn = {**_log_pi_ref(found), **kappa_figures(found)}
    images = _images(bandit)
    pictures = {file: png(figure) for file, figure in drawn.items()} | images
    for file, picture in pictures.items():
        write_file(folder / f"{file}.png", picture)
    for table in shown:
        write_file(folder / f"{table.name}.tex", table.plain().latex())
    plots = {file: svg(figure) for file, figure in drawn.items()}
    sections = [_section(key, title, shown, plots, images) for key, title in _ORDER]
    headline, covered = coverage(found)
    values: dict[str, Any] = {
        "scale": found.scale,
        "command": f"geb paper --scale {found.scale}",
        "head": headline,
        "covered": covered,
        "failed": dict(found.failed),
    }
    written = render("paper.html.jinja", sections=sections, **values)
    page = write_file(folder / "report.html", written)
    tables = {each.name: each.plain().markdown() for each in shown}
    text = render("paper.md.jinja", sections=sections, rendered=tables, **values)
    markdown = write_file(folder / "report.md", text)
    document = _document(found, shown, headline)
    write_file(folder / "report.json", json_text(document))
    store.share(folder)
    figures = [folder / f"{file}.png" for file in pictures]
    return WrittenReport(store.share(page), markdown, figures, document)


def _section(
    key: str,
    title: str,
    shown: Sequence[PaperTable],
    plots: Mapping[str, str],
    images: Mapping[str, bytes],
) -> dict[str, Any]:
    """A table or figure of the paper with those of all settings, as the templates take it."""
    own = [each for each in shown if each.name.startswith(f"{key}-")]
    drawn = {name: each for name, each in plots.items() if name.startswith(f"{key}-")}
    pictures = {name: each for name, each in images.items() if name.startswith(f"{key}-")}
    return {
        "title": title,
        "note": own[0].note if own else "",
        "tables": own,
        "plots": list(drawn.values()),
        "images": [
            f"data:image/png;base64,{base64.b64encode(each).decode()}" for each in pictures.values()
        ],
        "files": [f"{name}.png" for name in (*drawn, *pictures)],
    }


def _images(bandit: Artifact | None) -> dict[str, bytes]:
    """The bandit's figures by the names of their files; its artifact has them as PNG."""
    if bandit is None:
        return {}
    return {f"{BANDIT}-{name}": bandit.file(f"{name}.png").read_bytes() for name in _BANDIT_FIGURES}


def _document(found: Findings, shown: Sequence[PaperTable], headline: str) -> dict[str, Any]:
    return {
        "scale": found.scale,
        "coverage": headline,
        "failed": dict(found.failed),
        "tables": [
            {
                **{name: getattr(each, name) for name in ("name", "title", "setting", "header")},
                "rows": [
                    {"method": method, "figures": [asdict(one) for one in figures]}
                    for method, figures in each.rows
                ],
            }
            for each in shown
        ],
        "runs": [
            {
                "run": each.name,
                "cell": " · ".join(each.row.names()),
                "seed": each.cell.config.seed,
                "coefficient": dict(each.coefficient),
                "tunes": each.tunes,
                "figures": dict(each.figures()),
            }
            for each in (*found.tuning, *found.reported)
        ],
    }


def _log_pi_ref(found: Findings) -> dict[str, Figure]:
    """Training responses of the last iteration under KL: each design of GEB beside f-DPO."""
    drawn: dict[str, Figure] = {}
    for experiment in ("main", "hard"):
        for setting in found.settings(experiment):
            base = _samples(found.results((experiment, setting, BASELINE, "KL")))
            for method in found.methods(setting, experiment):
                own = _samples(found.results((experiment, setting, method, "KL")))
                if method.startswith(_GEB) and own and base:
                    drawn[file_name("log-pi-ref", setting, method)] = histogram_figure(
                        f"{setting}, KL: training responses",
                        {BASELINE: base, method: own},
                        "log π_ref",
                    )
    return drawn


def _samples(results: list[StudyRun]) -> list[float]:
    summaries = [each.summary for each in results if each.summary]
    return [value for each in summaries for value in training_log_pi_ref(each)]


def kappa_figures(found: Findings) -> dict[str, Figure]:
    """Mean reward over κ, for each setting and divergence a figure, for each design a line."""
    drawn: dict[str, Figure] = {}
    settings = dict.fromkeys(each.row.setting for each in found.tuning)
    for setting in settings:
        for divergence in DIVERGENCES:
            lines = _kappa_lines(found, setting, divergence)
            if any(len(line.x) > 1 for line in lines.values()):
                drawn[file_name("kappa", setting, divergence)] = course_figure(
                    f"{setting}, {divergence}", lines, "log₁₀ κ", "mean reward"
                )
    return drawn


def _kappa_lines(found: Findings, setting: str, divergence: str) -> Mapping[str, Line]:
    values: dict[str, dict[float, list[float]]] = {}
    for each in found.tuning:
        row = each.row
        # The designs of GEB on rejected responses, as in the paper; ten lines hide each other.
        if not row.method.startswith(_GEB) or row.experiment == "responses":
            continue
        kappa = float(each.coefficient.get(_KAPPA_FIELD, 0.0))
        reward = value_of(each, "AvgR")
        if (row.setting, row.divergence) == (setting, divergence) and kappa > 0 and reward:
            values.setdefault(row.method, {}).setdefault(kappa, []).append(reward.value)
    return {
        method: Line(
            [math.log10(kappa) for kappa in sorted(by_kappa)],
            [statistics.fmean(by_kappa[kappa]) for kappa in sorted(by_kappa)],
            [over_seeds(by_kappa[kappa]).interval for kappa in sorted(by_kappa)],
        )
        for method, by_kappa in values.items()
    }
