"""Shows a run's results in the Prefect UI: the table of its iterations, and where its report is."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.report.summary import COLUMNS, Summary, formatted

_KEY = "iterations"


def publish(summary: Summary, report: str) -> None:
    """Creates the table artifact and the report artifact; to be called inside a flow run."""
    components = summary.components()
    table = [
        {
            "iteration": row["iteration"] or "base",
            **{each.title: formatted(row.get(each.name), each.form) for each in COLUMNS},
            **{name: formatted(row["components"].get(name), ".3f") for name in components},
        }
        for row in summary.rows
    ]
    create_table_artifact(table, key=_KEY, description=f"run {summary.run}")
    places = "\n".join(f"- `{line}`" for line in summary.places())
    create_markdown_artifact(f"# {summary.run}\n\nReport: `{report}`\n\n{places}\n", key="report")
