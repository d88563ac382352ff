"""Comparisons of runs in the store: named, and written as a page and a JSON document."""

from collections.abc import Sequence
from dataclasses import replace

from flows.execution.run_record import RunRecord, recorded
from flows.pipeline.names import require_name
from flows.report.comparison import Comparison, compare_summaries
from flows.report.files import json_text, render
from flows.report.summary import summarise
from stages.contract.errors import UserError
from stages.store.base import Store


def compare_runs(store: Store, runs: Sequence[str], name: str = "") -> Comparison:
    """Compares runs; with a name, :func:`write_comparison` writes the comparison into the store.

    Raises:
        UserError: A run does not exist, there is nothing to compare, or a run has the name.
    """
    summaries = [summarise(RunRecord.existing(store, run)) for run in runs]
    if len(runs) < 2 or len(set(runs)) != len(runs):
        raise UserError(
            f"{', '.join(runs) or 'nothing'} cannot be compared",
            "name two or more runs, each once; `geb status` lists them",
        )
    comparison = compare_summaries(summaries)
    if not name:
        return comparison
    # It becomes the name of a folder next to the folders of runs.
    require_name(name, "comparison")
    if name in recorded(store):
        raise UserError(f"{name!r} is a run of the store", "give the comparison another name")
    return write_comparison(store, comparison, name)


def write_comparison(store: Store, comparison: Comparison, name: str) -> Comparison:
    """Writes a comparison into a folder among the store's runs; returns it with name and page."""
    # It takes a second to load, which a comparison in the terminal does without.
    from flows.report.plots import draw, svg

    folder = store.run_path(name)
    page = render(
        "comparison.html.jinja",
        title=name,
        comparison=comparison,
        tables=comparison.tables(),
        plots=[svg(figure) for figure in draw(comparison.rows()).values()],
    )
    store.write(folder / "comparison.json", json_text(comparison.to_json()))
    return replace(comparison, name=name, page=store.write(folder / "comparison.html", page))
