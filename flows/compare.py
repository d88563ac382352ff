"""The flow `compare`: runs side by side, with intervals, tests and curves."""

from flows.execution.stage_flow import stage_flow
from flows.pipeline.presets import chosen_store
from flows.report.comparison import Comparison
from flows.report.comparison_files import compare_runs
from flows.report.prefect_artifacts import publish_comparison
from stages.store.opening import open_store


@stage_flow("compare", "{name}")
def compare(runs: list[str], name: str = "comparison", store: str = "") -> Comparison:
    """Compares runs of a store after their last iterations; the first is what others stand against.

    Args:
        runs: Names of two or more runs.
        name: Name of the comparison and of its folder in the store.
        store: The store: a folder, or s3://, gs:// or az://; empty takes GEB_STORE's.
    """
    comparison = compare_runs(open_store(chosen_store(store)), runs, name)
    publish_comparison(comparison)
    return comparison
