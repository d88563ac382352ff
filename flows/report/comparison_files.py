"""Comparisons of runs in the store: named, and written as a page with its tables and drawings."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flows.execution.run_record import RunRecord, recorded, run_of
from flows.pipeline.checks import is_name, require_name
from flows.report.comparison import Comparison, compare_summaries
from flows.report.files import csv_text, json_text, render, write_file
from flows.report.plots import png, svg
from flows.report.summary import Summary, last_iteration, summarise
from stages.contract.errors import UserError
from stages.store.base import Store


def compare_runs(store: Store, runs: Sequence[str], name: str = "") -> Comparison:
    """Compares runs and writes the comparison into the store; see :func:`write_comparison`.

    A run may be named by a model of its last iteration. An empty name is made of the runs' names.

    Raises:
        UserError: A run does not exist, there is nothing to compare, or a run has the name.
    """
    summaries = [_summary(store, each) for each in runs]
    names = [each.run for each in summaries]
    if len(set(names)) < 2 or len(set(names)) != len(names):
        raise UserError(
            f"{', '.join(names) or 'nothing'} cannot be compared",
            "name two or more runs, each once; `geb status` lists them",
        )
    chosen = name or _name(names)
    # It becomes the name of a folder next to the folders of runs.
    require_name(chosen, "comparison")
    if chosen in recorded(store):
        raise UserError(f"{chosen!r} is a run of the store", "give the comparison another name")
    return write_comparison(store, compare_summaries(summaries), chosen)


def write_comparison(store: Store, comparison: Comparison, name: str) -> Comparison:
    """Writes a comparison into a folder among the store's runs; returns it with name and page."""
    folder = store.run_path(name)
    named = replace(comparison, name=name)
    page, *_ = write_files(named, folder)
    store.share(folder)
    return replace(named, page=store.share(page))


def _summary(store: Store, name: str) -> Summary:
    run, version = run_of(store, name)
    found = summarise(RunRecord.existing(store, run))
    last = last_iteration(found)
    if version and last and not version.step.startswith(f"iteration-{last}/"):
        raise UserError(
            f"{name} is of {version.step} of the run {run}, whose last iteration is {last}",
            f"runs are compared after their last iterations: name {run}, or compare any two models "
            "with `geb evaluate CONFIG MODEL --base MODEL`",
        )
    return found


def _name(runs: Sequence[str]) -> str:
    plain = "-".join(["compare", *runs])
    digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
    return plain if is_name(plain) else f"{plain[:80]}-{digest}"


def write_files(comparison: Comparison, folder: Path) -> list[Path]:
    """Writes everything into a folder, which is made, and returns the page first.

    Files of an earlier comparison of the same name are replaced.
    """
    drawn = comparison.drawings()
    tables = comparison.tables()
    document = comparison.to_json()
    page = render(
        "comparison.html.jinja",
        title=comparison.name,
        comparison=comparison,
        tables=tables,
        plots=[svg(each) for each in drawn.values()],
    )
    content: dict[str, str | bytes] = {
        "comparison.html": page,
        "comparison.json": json_text(document),
        **{f"{name}.png": png(figure) for name, figure in drawn.items()},
        **{f"{table.name}.tex": table.latex() for table in tables},
    }
    for name, rows in document.items():
        if isinstance(rows, list) and rows:
            content[f"{name.replace('_', '-')}.csv"] = csv_text(rows)
    return [write_file(folder / name, each) for name, each in content.items()]
