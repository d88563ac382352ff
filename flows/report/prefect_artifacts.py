"""Artifacts in the Prefect UI: reports with tables and plots; and tags."""

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.execution.prefect_api import artifact_key, survives_outage
from flows.pipeline.config import RunConfig
from flows.report.comparison import Comparison
from flows.report.plots import draw, png
from flows.report.summary import Summary
from flows.report.table import FigureRow, FittedTable
from flows.report.verdict import verdict

MOST_COLUMNS = 7
"""Columns of a table in the UI, which draws wider ones over its right column."""


@survives_outage
def tag_flow_run(config: RunConfig) -> None:
    """Adds the tag to the flow run by which it is found; to be called inside one."""
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, f"run:{config.name}"}))


@survives_outage
def publish(summary: Summary, report: str) -> None:
    """Creates the report artifact, plots in it; to be called inside a flow run.

    The UI lists a run's artifacts in no order, so that what belongs together is one artifact.
    """
    judged = verdict(summary)
    parts = [f"# {summary.run}", judged.sentence]
    for note in (*judged.reasons, *judged.cautions):
        parts.append(f"- {note}")
    places = "\n".join([*summary.places(), f"report      {report}"])
    parts += _results(summary.tables(), places, {summary.run: summary.rows})
    create_markdown_artifact(
        "\n\n".join(parts),
        key=artifact_key(summary.run, "report"),
        description=f"What run {summary.run} found.",
    )


@survives_outage
def publish_comparison(comparison: Comparison) -> None:
    """Creates the artifact of a comparison: its verdict, tables and drawings."""
    parts = [f"# {comparison.name}", comparison.verdict()]
    parts += _results(comparison.tables(), comparison.page, comparison.rows())
    create_markdown_artifact(
        "\n\n".join(parts),
        key=artifact_key(comparison.name, "report"),
        description=f"Comparison of {', '.join(comparison.methods)}.",
    )


def _results(
    tables: Iterable[FittedTable], places: str, rows: Mapping[str, Sequence[FigureRow]]
) -> Iterator[str]:
    """Tables, places of the results, and curves of each run's rows."""
    for table in tables:
        markdown = table.first_columns(MOST_COLUMNS).markdown()
        yield f"## {table.title}\n\n{markdown}\n\n{table.note}"
    yield f"```\n{places}\n```"
    for title, figure in draw(rows).items():
        image = base64.b64encode(png(figure)).decode()
        yield f"![{title}](data:image/png;base64,{image})"
