"""The flow `sweep`: a grid of settings over seeds, each cell a run, and their comparison."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from flows.execution.observer import Session
from flows.execution.stage_flow import stage_flow
from flows.iterate import NOTHING, Preset, run_as_flow
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.form import SharedOverrides
from flows.pipeline.grid import SweepCell, cells, listed, parse_axes
from flows.pipeline.presets import DEFAULT_PRESET, configured
from flows.report.comparison import Comparison, compare_summaries
from flows.report.comparison_files import write_comparison
from flows.report.prefect_artifacts import publish_comparison
from flows.report.summary import Summary
from stages.contract.errors import GebError, RunCancelledError
from stages.store.opening import open_store

_NO_AXES: list[str] = []
_ONE_SEED = [0]
AtOnce = Annotated[int, Field(ge=1)]
"""Number of runs at the same time."""


@stage_flow("sweep", "{name}")
def sweep(
    name: str = "sweep",
    grid: list[str] = _NO_AXES,
    seeds: list[int] = _ONE_SEED,
    parallel_runs: AtOnce = 1,
    preset: Preset = DEFAULT_PRESET,
    config: SharedOverrides = NOTHING,
) -> Comparison:
    """Runs every combination of the grid under every seed, and compares them with the first.

    What runs have in common is computed once; finished runs are found in the store.

    Args:
        name: Name of the sweep; the runs' names begin with it.
        grid: Fields and their values: train.kappa=0.5,1.
        seeds: Seeds of each combination.
        parallel_runs: Runs at the same time.
        preset: The configuration to start from.
        config: Differences from the preset in all runs. An empty field takes the preset's
            value, or the default if the preset has none.
    """
    planned = cells(name, configured(preset, config), parse_axes(grid), seeds)
    return sweep_cells(name, planned, parallel_runs, Session())


def sweep_cells(
    name: str, planned: Sequence[SweepCell], parallel_runs: int, session: Session
) -> Comparison:
    """Runs and compares all cells, within a flow run.

    Raises:
        GebError: A run failed; the others went to their ends, and the comparison has them.
    """
    store = open_store(planned[0].config.store, create=True)
    findings = run_cells(planned, parallel_runs, session)
    summaries = []
    labels = {}
    lost = []
    for finding in findings:
        if finding.summary:
            summaries.append(finding.summary)
            labels[finding.summary.run] = listed(finding.cell.fields) or name
        else:
            lost.append(finding)
    comparison = None
    if summaries:
        comparison = write_comparison(store, compare_summaries(summaries, labels), name)
        publish_comparison(comparison)
    if lost or comparison is None:
        others = f"; the others are in {comparison.page}" if comparison else ""
        raise GebError(
            f"{len(lost)} of {len(planned)} runs failed: "
            f"{', '.join(finding.cell.config.name for finding in lost)}; the first because "
            f"{lost[0].error}{others}"
        )
    return comparison


@dataclass(frozen=True)
class Finding:
    """Result of one run, or the error that ended it."""

    cell: SweepCell
    summary: Summary | None
    error: str = ""


def run_cells(planned: Sequence[SweepCell], parallel_runs: int, session: Session) -> list[Finding]:
    """Runs cells as flow runs below the present one; one that fails does not end the others.

    An interrupt or a cancellation starts no further cell, and stops running ones.
    """

    def run(cell: SweepCell) -> Finding:
        try:
            return Finding(cell, run_as_flow(resolve_run(cell.config), session).summary)
        except RunCancelledError:
            raise
        except GebError as error:
            return Finding(cell, None, str(error))

    if parallel_runs == 1:
        # In this thread, which is the one that signals interrupt.
        return [run(cell) for cell in planned]
    with ThreadPoolExecutor(max_workers=parallel_runs) as pool:
        # Each thread needs the flow run's context to be below it.
        futures = [pool.submit(copy_context().run, run, cell) for cell in planned]
        try:
            return [future.result() for future in futures]
        except BaseException:
            session.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
