"""The paper's report: one page with every table and figure, and its Markdown, LaTeX and JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.paper.plots import paper_figures
from experiments.paper.tables import PaperTable, paper_tables, statements
from experiments.paper.values import BANDIT, Findings, coverage, headline
from flows.report.comparison_tables import latex
from flows.report.files import json_text, render, write_file
from flows.report.plots import png, svg
from flows.report.table import markdown_table
from stages.contract.store import Artifact, Store

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
        findings: Statements on the methods.
        page: Place of the page; an address where the store is a bucket.
        markdown: The same as Markdown.
        figures: The figures that the Markdown shows, PNG files beside it.
        document: The same for JSON.
    """

    findings: Sequence[str]
    page: str
    markdown: Path
    figures: Sequence[Path]
    document: dict[str, Any]

    def copy_to(self, folder: Path) -> None:
        """Copies the Markdown and its figures into a folder, which is made where it lacks."""
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
    said, shown = statements(found), paper_tables(found)
    drawn = paper_figures(found)
    images = _images(bandit)
    pictures = {file: png(figure) for file, figure in drawn.items()} | images
    for file, picture in pictures.items():
        write_file(folder / f"{file}.png", picture)
    for table in shown:
        write_file(folder / f"{table.name}.tex", latex(table.plain()))
    plots = {file: svg(figure) for file, figure in drawn.items()}
    sections = [_section(key, title, shown, plots, images) for key, title in _ORDER]
    covered = coverage(found)
    head = headline(found, covered)
    values: dict[str, Any] = {
        "scale": found.scale,
        "command": f"geb paper --scale {found.scale}",
        "head": head,
        "statements": said,
        "covered": [each.cells() for each in covered],
        "failed": dict(found.failed),
    }
    written = render("paper.html.jinja", sections=sections, **values)
    page = write_file(folder / "report.html", written)
    tables = {each.name: _markdown(each) for each in shown}
    text = render("paper.md.jinja", sections=sections, rendered=tables, **values)
    markdown = write_file(folder / "report.md", text)
    document = _document(found, shown, said, head)
    write_file(folder / "report.json", json_text(document))
    store.share(folder)
    figures = [folder / f"{file}.png" for file in pictures]
    return WrittenReport(said, store.share(page), markdown, figures, document)


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


def _markdown(table: PaperTable) -> str:
    plain = table.plain()
    return markdown_table(plain.header, plain.rows)


def _document(
    found: Findings, shown: Sequence[PaperTable], said: Sequence[str], headline: str
) -> dict[str, Any]:
    return {
        "scale": found.scale,
        "coverage": headline,
        "statements": list(said),
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
                "run": each.run.name,
                "cell": " · ".join(each.run.row.names()),
                "seed": each.run.cell.config.seed,
                "coefficient": dict(each.run.coefficient),
                "tunes": each.run.tunes,
                "figures": dict(each.row()),
            }
            for each in (*found.tuning, *found.reported)
        ],
    }
