"""The flow `sweep`: a grid of settings over seeds, each cell a run of its own, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from typing import Any

from prefect.artifacts import create_table_artifact
from prefect.states import State

from flows.execution.cancellation import interruptible_together, stage_flow
from flows.execution.prefect_progress import artifact_key, survives_outage
from flows.iterate import NOTHING, Preset, Shared, iterate_resolved
from flows.pipeline.external import inputs_resolved_once
from flows.pipeline.grid import Cell, cells, parse_axes
from flows.pipeline.presets import DEFAULT_PRESET, configured
from flows.report.prefect_artifacts import failed, publish_image
from flows.report.sweep import Finding, Sweep, write_sweep
from stages.contract.errors import GebError, RunCancelledError, UserError
from stages.store.opening import open_store

_NO_AXES: list[str] = []
_ONE_SEED = [0]


@stage_flow("sweep", "{name}")
def sweep(
    name: str = "sweep",
    grid: list[str] = _NO_AXES,
    seeds: list[int] = _ONE_SEED,
    parallel_runs: int = 1,
    preset: Preset = DEFAULT_PRESET,
    config: Shared = NOTHING,
) -> Sweep | State[Any]:
    """Runs every combination of the grid under every seed, and tables mean ± standard deviation.

    What runs have in common is computed once; finished runs are found in the store.

    Args:
        name: Name of the sweep; the runs' names begin with it.
        grid: Fields and their values: `train.kappa=0.5,1`.
        seeds: Seeds of each combination.
        parallel_runs: Runs at the same time.
        preset: The configuration to start from.
        config: What is to differ from the preset in all runs. An empty field takes the preset's
            value, or the default if the preset has none.
    """
    try:
        planned = cells(name, configured(preset, config), parse_axes(grid), seeds)
        return _sweep(name, planned, parallel_runs)
    except GebError as error:
        return failed(error, name)


def _sweep(name: str, planned: Sequence[Cell], parallel_runs: int) -> Sweep:
    """Runs all cells, as flow runs below the present one.

    Raises:
        GebError: A run failed; the others went to their ends, and the table shows them.
    """
    with inputs_resolved_once():
        found = Sweep(name, run_cells(planned, parallel_runs))
    store = open_store(planned[0].config.store, create=True)
    written = write_sweep(found, store.run_path(name))
    found = replace(found, files={what: store.share(path) for what, path in written.items()})
    if "plot" in written:
        title = f"Sweep {name}: means with 95 % intervals over seeds, last iteration."
        publish_image(written["plot"].read_bytes(), artifact_key(name, "plot"), title)
    survives_outage(create_table_artifact)(
        found.table().records(),
        key=artifact_key(name, "table"),
        description=f"Sweep {name}: mean ± standard deviation over seeds, and Student's 95 % "
        "interval of the mean, last iteration.",
    )
    if found.failed:
        first = found.failed[0]
        raise GebError(
            f"{len(found.failed)} of {len(planned)} runs failed: "
            f"{', '.join(each.cell.config.name for each in found.failed)}; the first because "
            f"{first.error}; the others are in {found.files['table']}"
        )
    return found


def run_cells(planned: Sequence[Cell], parallel_runs: int) -> list[Finding]:
    """Runs cells as flow runs below the present one; one that fails does not end the others.

    An interrupt or a cancellation starts no further cell, and stops those that run.

    Args:
        planned: The cells, whose runs have names of their own.
        parallel_runs: Runs at the same time.

    Raises:
        UserError: There are to be none.
    """
    if parallel_runs < 1:
        raise UserError(
            f"parallel_runs is {parallel_runs}, and at least one run must be at work",
            "set it to 1 or more",
        )
    if parallel_runs == 1:
        # In this thread, which is the one that signals interrupt.
        return [_run(cell) for cell in planned]
    with (
        interruptible_together() as interrupted,
        ThreadPoolExecutor(max_workers=parallel_runs) as pool,
    ):
        # Each thread needs the flow run's context to be below it.
        futures = [pool.submit(copy_context().run, _run, cell) for cell in planned]
        try:
            return [future.result() for future in futures]
        except BaseException:
            interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _run(cell: Cell) -> Finding:
    try:
        result = iterate_resolved(cell.config)
    except RunCancelledError:
        raise
    except GebError as error:
        return Finding(cell, None, str(error))
    return Finding(cell, result.summary)
