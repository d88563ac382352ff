"""Artifacts of a run in the Prefect UI: configuration, tables, report with plots; and its tags."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_table_artifact,
)
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from flows.execution.outage import survives_outage
from flows.execution.prefect_progress import artifact_key
from flows.pipeline.config import RunConfig
from flows.report.figures import Plot
from flows.report.summary import Summary
from flows.report.table import Figures, markdown_table
from flows.report.verdict import verdict

# Larger artifacts make the UI's lists slow; the HTML report has every plot.
_MAX_IMAGE_BYTES = 200_000


@survives_outage
def label(config: RunConfig) -> None:
    """Adds tags to the flow run by which it is found; to be called inside one."""
    tags = [f"run:{config.name}", config.train.design, str(config.train.divergence)]
    with get_client(sync_client=True) as client:
        client.update_flow_run(flow_run.id, tags=sorted({*flow_run.tags, *tags}))


@survives_outage
def publish_configuration(config: RunConfig, preset: str) -> None:
    """Creates an artifact with every value of a run's configuration."""
    values = yaml.safe_dump(json.loads(config.to_json()), sort_keys=False, allow_unicode=True)
    create_markdown_artifact(
        f"```yaml\n{values}```\n",
        key=artifact_key(config.name, "configuration"),
        description=f"Every value of run {config.name}"
        + (f", which started from preset {preset}." if preset else "."),
    )


@survives_outage
def publish_table(summary: Summary, iteration: int) -> None:
    """Creates the table of the iterations so far; to be called inside a flow run."""
    create_table_artifact(
        list(_rows(summary, iteration)),
        key=artifact_key(summary.run, "iterations"),
        description=f"Run {summary.run} after iteration {iteration}.",
    )


@survives_outage
def publish(summary: Summary, report: str, plots: Sequence[Plot]) -> None:
    """Creates the report artifact, plots in it; to be called inside a flow run.

    The UI lists a run's artifacts in no order, so that what belongs together is one artifact.
    """
    tables = [_markdown(list(_rows(summary, summary.config.iterations)))]
    tables += [
        f"## Suite {each.name}\n\n{_markdown([_row(each, row) for row in each.rows])}"
        for each in summary.suites
    ]
    joined = "\n\n".join(tables)
    places = "\n".join([*summary.places(), f"report      {report}"])
    drawn = "\n\n".join(_drawing(each) for each in plots)
    create_markdown_artifact(
        f"# {summary.run}\n\n{verdict(summary).sentence}\n\n{joined}\n\n```\n{places}\n```\n\n"
        f"{drawn}\n",
        key=artifact_key(summary.run, "report"),
        description=f"What run {summary.run} found.",
    )


@survives_outage
def publish_image(content: bytes, kind: str, key: str, caption: str) -> None:
    """Creates the artifact of an image, unless it is too large for the UI.

    Args:
        content: The image.
        kind: Its media type, after `image/`.
        key: Key of the artifact.
        caption: What it shows.
    """
    data = base64.b64encode(content).decode()
    if len(data) <= _MAX_IMAGE_BYTES:
        create_image_artifact(f"data:image/{kind};base64,{data}", key=key, description=caption)


def _drawing(plot: Plot) -> str:
    # The UI is dark for some, and the plot's letters are black.
    image = plot.svg.replace("<svg ", '<svg style="background: white" ', 1).encode()
    data = base64.b64encode(image).decode()
    if len(data) > _MAX_IMAGE_BYTES:
        return f"### {plot.title}\n\nToo large for this page; it is in the HTML report."
    return f"### {plot.title}\n\n![{plot.title}](data:image/svg+xml;base64,{data})"


def _rows(summary: Summary, last: int) -> Iterator[dict[str, Any]]:
    for row in summary.rows[: last + 1]:
        yield _row(summary, row)


def _row(figures: Figures, row: dict[str, Any]) -> dict[str, Any]:
    cells = {title: str(cell) for title, cell in figures.cells(row).items()}
    return {"iteration": row["iteration"] or "base", **cells}


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    return markdown_table(list(rows[0]), [list(row.values()) for row in rows])
