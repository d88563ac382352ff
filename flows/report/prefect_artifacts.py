"""Artifacts in the Prefect UI: reports with tables and plots."""

import base64
from collections.abc import Iterable, Mapping, Sequence

from prefect.artifacts import create_markdown_artifact

from flows.execution.prefect_api import artifact_key, survives_outage
from flows.report.comparison import Comparison
from flows.report.plots import draw, png
from flows.report.table import FigureRow, FittedTable

# Columns of a table in the UI, which draws wider ones over its right column.
_MOST_COLUMNS = 7


@survives_outage
def publish(
    name: str,
    sentences: Iterable[str],
    tables: Iterable[FittedTable],
    places: Iterable[str],
    rows: Mapping[str, Sequence[FigureRow]],
) -> None:
    """Creates the artifact of a result, to be called inside a flow run.

    The UI lists a run's artifacts in no order, so that what belongs together is one artifact.

    Args:
        name: Run, comparison or evaluation.
        sentences: Verdict and notes.
        tables: Figures.
        places: Addresses of the results.
        rows: Figures by iteration for the curves, by the runs' names.
    """
    parts = [f"# {name}", *sentences]
    for table in tables:
        parts.append(f"## {table.title}\n\n{table.markdown(_MOST_COLUMNS)}\n\n{table.note}")
    addresses = "\n".join(places)
    parts.append(f"```\n{addresses}\n```")
    for title, figure in draw(rows).items():
        image = base64.b64encode(png(figure)).decode()
        parts.append(f"![{title}](data:image/png;base64,{image})")
    create_markdown_artifact("\n\n".join(parts), key=artifact_key(name, "report"))


def publish_comparison(comparison: Comparison) -> None:
    """Creates the artifact of a comparison: its verdict, tables and drawings."""
    sentences = [comparison.verdict()]
    publish(comparison.name, sentences, comparison.tables(), [comparison.page], comparison.rows())
