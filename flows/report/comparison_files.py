"""Files of a comparison: an HTML page, PNG figures, and tables as LaTeX, CSV and JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from flows.execution.run_record import RunRecord, recorded
from flows.pipeline.names import require_name
from flows.report.comparison import Comparison, compare_summaries
from flows.report.comparison_tables import TextTable, latex, tables
from flows.report.files import csv_text, json_text, render, write_file
from flows.report.last_iteration import last_iteration, training_log_pi_ref
from flows.report.plots import Line, course_figure, histogram_figure, png, svg
from flows.report.summary import summarise
from stages.contract.errors import UserError
from stages.contract.store import Store

_MAX_NAME = 100
_HASH_DIGITS = 8
_CURVES = (
    ("mean_reward", "Mean reward, held-out prompts", "reward", None),
    ("win_rate", "Win rate over the base, ties lost", "share of prompts", (0.0, 1.0)),
    ("mean_log_pi_ref", "log π_ref of the samples", "log π_ref", None),
)


@dataclass(frozen=True)
class WrittenComparison:
    """A comparison, and the place of its files.

    Attributes:
        name: Its name.
        comparison: What was found.
        page: Address of the HTML page; the other files are beside it.
    """

    name: str
    comparison: Comparison
    page: str


def compare_runs(store: Store, runs: Sequence[str], name: str = "") -> WrittenComparison:
    """Compares runs and writes the files into the folder of the comparison in the store.

    Args:
        store: The store.
        runs: Names of two or more runs.
        name: Name of the comparison; empty makes one of the runs' names.

    Raises:
        UserError: There is no such run, nothing to compare, or the name is that of a run.
    """
    found = compare_summaries([summarise(RunRecord.existing(store, run)) for run in runs])
    chosen = _checked(store, name or _name(runs))
    folder = store.run_path(chosen)
    page, *_ = write_files(found, folder)
    store.share(folder)
    return WrittenComparison(chosen, found, store.share(page))


def _name(runs: Sequence[str]) -> str:
    plain = "-".join(["compare", *runs])
    if len(plain) <= _MAX_NAME:
        return plain
    digest = hashlib.sha256(plain.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{plain[: _MAX_NAME - _HASH_DIGITS - 1]}-{digest}"


def _checked(store: Store, name: str) -> str:
    """The name, which becomes that of a folder beside those of runs."""
    require_name(name, "comparison")
    if name in recorded(store):
        raise UserError(f"{name!r} is a run of the store", "give the comparison another name")
    return name


def write_files(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes everything into a folder, which is made, and returns the page first.

    Args:
        comparison: The comparison.
        folder: Where files of an earlier comparison of the same name are replaced.
    """
    shown, drawn = tables(comparison), figures(comparison)
    document = comparison.to_json()
    content: dict[str, str | bytes] = {
        "comparison.html": _page(comparison, shown, drawn),
        "comparison.json": json_text(document),
        **{f"{name}.png": png(figure) for name, figure in drawn.items()},
        **{f"{table.name}.tex": latex(table) for table in shown},
    }
    for name, rows in document.items():
        if isinstance(rows, list) and rows:
            content[f"{name.replace('_', '-')}.csv"] = csv_text(rows, list(rows[0]))
    return [write_file(folder / name, each) for name, each in content.items()]


def figures(comparison: Comparison) -> dict[str, Figure]:
    """Curves by iteration and distributions of log π_ref, by the names of their files."""
    drawn: dict[str, Figure] = {}
    for name, title, ylabel, bounds in _CURVES:
        lines = _curves(comparison, name)
        if any(len(each.x) > 1 for each in lines.values()):
            drawn[f"curve-{name.replace('_', '-')}"] = course_figure(
                title, lines, "iteration (0 = base)", ylabel, bounds=bounds
            )
    last = {run.run: training_log_pi_ref(run) for run in comparison.runs}
    if samples := {name: values for name, values in last.items() if values}:
        title = "log π_ref of the last iteration's training responses"
        drawn["log-pi-ref-of-training"] = histogram_figure(title, samples, "log π_ref")
    return drawn


def _curves(comparison: Comparison, name: str) -> dict[str, Line]:
    lines = {}
    for run in comparison.runs:
        rows = run.rows[: (last_iteration(run) or 0) + 1]
        if known := [row for row in rows if row.get(name) is not None]:
            lines[run.run] = Line(
                [row["iteration"] for row in known],
                [row[name] for row in known],
                [row["intervals"].get(name) for row in known],
            )
    return lines


def _page(comparison: Comparison, shown: Sequence[TextTable], drawn: Mapping[str, Figure]) -> str:
    return render(
        "comparison.html.jinja",
        title=", ".join(comparison.methods),
        comparison=comparison,
        tables=shown,
        plots=[svg(each) for each in drawn.values()],
    )
