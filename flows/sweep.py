"""The flow `sweep`: configurations and a grid over seeds, each cell a run, and their comparison."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated

from pydantic import Field

from flows.execution.observer import Session
from flows.execution.stage_flow import stage_flow
from flows.iterate import NOTHING, Preset, run_as_flow
from flows.pipeline.algorithm import check_cells, resolve_run
from flows.pipeline.config import RunConfig
from flows.pipeline.form import SharedOverrides
from flows.pipeline.grid import SweepCell, cells, parse_axes
from flows.pipeline.presets import DEFAULT_PRESET, configured
from flows.report.comparison import Comparison, compare_summaries
from flows.report.comparison_files import write_comparison
from flows.report.prefect_artifacts import publish_comparison
from flows.report.summary import Summary
from stages.contract.errors import GebError, RunCancelledError
from stages.contract.events import Log
from stages.store.opening import open_store

_NO_AXES: list[str] = []
_NO_SEEDS: list[int] = []
_ONE_PRESET: list[Preset] = [DEFAULT_PRESET]
AtOnce = Annotated[int, Field(ge=1)]
"""Number of runs at the same time."""


@stage_flow("sweep", "{name}")
def sweep(
    name: str = "sweep",
    grid: list[str] = _NO_AXES,
    seeds: list[int] = _NO_SEEDS,
    parallel_runs: AtOnce = 1,
    presets: list[Preset] = _ONE_PRESET,
    config: SharedOverrides = NOTHING,
) -> Comparison:
    """Runs every preset with every combination of the grid under every seed.

    They are compared with the first preset's first combination.

    What runs have in common is computed once; finished runs are found in the store.

    Args:
        name: Name of the sweep; the runs' names begin with it.
        grid: Fields and their values: train.kappa=0.5,1.
        seeds: Seeds of each combination; none takes the preset's.
        parallel_runs: Runs at the same time.
        presets: The configurations to start from.
        config: Differences from the presets in all runs. An empty field takes the preset's
            value, or the default if the preset has none.
    """
    configs = [configured(preset, config) for preset in presets]
    planned = cells(name, configs, parse_axes(grid), seeds)
    check_cells(planned)
    return sweep_cells(name, planned, parallel_runs, Session())


def sweep_cells(
    name: str, planned: Sequence[SweepCell], parallel_runs: int, session: Session
) -> Comparison:
    """Runs and compares all cells, within a flow run.

    Raises:
        GebError: A run failed; the others went to their ends, and the comparison has them.
    """
    results = run_all([cell.config for cell in planned], parallel_runs, session)
    summaries = []
    labels = {}
    failed = {}
    for cell in planned:
        result = results[cell.config.name]
        if isinstance(result, GebError):
            failed[cell.config.name] = result
        else:
            summaries.append(result)
            labels[result.run] = cell.method
    others = ""
    if summaries:
        store = open_store(planned[0].config.store, create=True)
        comparison = write_comparison(store, compare_summaries(summaries, labels), name)
        publish_comparison(comparison)
        if not failed:
            return comparison
        others = f"; the others are in {comparison.page}"
    raise GebError(
        f"{len(failed)} of {len(planned)} runs failed: {', '.join(failed)}; the first because "
        f"{next(iter(failed.values()))}{others}"
    )


def run_all(
    configs: Sequence[RunConfig], parallel_runs: int, session: Session
) -> dict[str, Summary | GebError]:
    """Runs configurations as flow runs below the present one; their results, or errors, by name.

    A failure does not end the others. An interrupt or a cancellation starts no further run, and
    stops running ones.
    """

    def run(config: RunConfig) -> Summary | GebError:
        begins = Log(message=f"run {configs.index(config) + 1} of {len(configs)}")
        for observer in session.observers:
            observer.run_log(config.name, begins)
        try:
            return run_as_flow(resolve_run(config), session).summary
        except RunCancelledError:
            raise
        except GebError as error:
            return error

    if parallel_runs == 1:
        # In this thread, which is the one that signals interrupt.
        return {config.name: run(config) for config in configs}
    with ThreadPoolExecutor(max_workers=parallel_runs) as pool:
        # Each thread needs the flow run's context to be below it.
        futures = {config.name: pool.submit(copy_context().run, run, config) for config in configs}
        try:
            return {name: future.result() for name, future in futures.items()}
        except BaseException:
            session.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
