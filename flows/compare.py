"""The flow `compare`: runs side by side, with intervals, tests and curves."""

from prefect.runtime import flow_run

from flows.execution.cancellation import stage_flow
from flows.pipeline.presets import store_of_overrides
from flows.report.comparison import Comparison
from flows.report.comparison_files import compare_runs
from flows.report.prefect_artifacts import publish_comparison
from stages.store.opening import open_store


def _flow_run_name() -> str:
    return flow_run.parameters["name"] or " · ".join(flow_run.parameters["runs"])


@stage_flow("compare", _flow_run_name)
def compare(runs: list[str], name: str = "", store: str = "") -> Comparison:
    """Compares runs of a store after their last iterations; the first is what others stand against.

    Args:
        runs: Names of two or more runs.
        name: Name of the comparison; empty makes one of the runs' names.
        store: The store: a folder, or s3://, gs:// or az://; empty takes GEB_STORE's.
    """
    comparison = compare_runs(open_store(store_of_overrides({"store": store})), runs, name)
    publish_comparison(comparison)
    return comparison
