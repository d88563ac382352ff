"""The HTML report of a run: one file, which loads nothing from a network."""

from typing import Any

import yaml

from flows.execution.run_record import RunRecord
from flows.report.files import render
from flows.report.plots import draw, svg
from flows.report.summary import Summary, kappa_label
from flows.report.verdict import verdict
from stages.contract.data_files import read_data_file
from stages.store.base import Artifact


def write(record: RunRecord, summary: Summary) -> str:
    """Writes ``report.html`` with a run's figures into its folder and returns its place."""
    configuration = summary.config.to_values()
    figures = draw({summary.run: summary.rows})
    page = render(
        "report.html.jinja",
        summary=summary,
        tables=summary.tables(),
        verdict=verdict(summary),
        kappa=kappa_label(summary.config.train),
        plots=[svg(figure) for figure in figures.values()],
        samples=_samples(summary.last("evaluate")),
        suite_samples={
            f"suite {name}": _samples(summary.last("evaluate", name)) for name in summary.suites
        },
        gates=summary.made("promote"),
        configuration=yaml.safe_dump(configuration, sort_keys=False, allow_unicode=True),
    )
    return record.write("report.html", page)


def _samples(evaluated: Artifact | None) -> list[dict[str, Any]]:
    """Prompts with samples of both models."""
    if evaluated is None:
        return []
    return [row for _, row in read_data_file(evaluated.file("samples.jsonl"))]
