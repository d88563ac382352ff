"""The flow `compare`: runs side by side, with intervals, tests, curves and distributions."""

from __future__ import annotations

import base64
from typing import Any

from prefect import flow
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.runtime import flow_run
from prefect.states import State

from flows.execution.cancellation import ends_cancelled
from flows.execution.outage import survives_outage
from flows.execution.prefect_progress import artifact_key
from flows.pipeline.presets import store_of
from flows.report.comparison_files import WrittenComparison, compare_runs, figures
from flows.report.comparison_tables import tables
from flows.report.failure import failed
from flows.report.plots import png
from flows.report.table import markdown_table
from stages.contract.errors import GebError, RunCancelledError
from stages.contract.stores import open_store


def _flow_run_name() -> str:
    return flow_run.parameters["name"] or " · ".join(flow_run.parameters["runs"])


@flow(name="compare", flow_run_name=_flow_run_name, persist_result=False)
@ends_cancelled
def compare(runs: list[str], name: str = "", store: str = "") -> WrittenComparison | State[Any]:
    """Compares runs of a store after their last iterations; the first is what others stand against.

    Args:
        runs: Names of two or more runs.
        name: Name of the comparison; empty makes one of the runs' names.
        store: The store: a folder, or s3://, gs:// or az://; empty takes that of GEB_STORE.
    """
    try:
        found = compare_runs(open_store(store_of({"store": store})), runs, name)
    except RunCancelledError:
        raise
    except GebError as error:
        return failed(error, name or "comparison")
    _publish(found)
    return found


@survives_outage
def _publish(found: WrittenComparison) -> None:
    parts = [f"# {found.name}"]
    for table in tables(found.comparison):
        rows = markdown_table(table.header, table.rows)
        parts.append(f"## {table.title}\n\n{rows}\n\n{table.note}")
    create_markdown_artifact(
        "\n\n".join([*parts, f"```\n{found.page}\n```\n"]),
        key=artifact_key(found.name, "report"),
        description=f"Comparison of {', '.join(found.comparison.methods)}.",
    )
    for name, figure in figures(found.comparison).items():
        data = base64.b64encode(png(figure)).decode()
        create_image_artifact(f"data:image/png;base64,{data}", key=artifact_key(found.name, name))
