"""The flow `sweep`: a grid of settings over seeds, each cell a run of its own, and their table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.states import State
from rich.table import Table

from flows.execution.cancellation import ends_cancelled
from flows.execution.outage import survives_outage
from flows.execution.prefect_progress import artifact_key
from flows.iterate import NOTHING, Preset, iterate_resolved
from flows.pipeline.config import SET_BY_THE_RUN, RunConfig
from flows.pipeline.form import FormOf
from flows.pipeline.grid import Cell, cells, parse_axes, spread
from flows.pipeline.inputs import inputs_resolved_once
from flows.pipeline.presets import DEFAULT_PRESET, NO_PRESET, configured
from flows.report.between import p_text
from flows.report.failure import failed
from flows.report.statistics import holm, over_seeds, welch
from flows.report.summary import Summary
from flows.report.table import COLUMNS, interval_text
from stages.contract.errors import GebError, RunCancelledError
from stages.contract.stores import open_store

Shared = Annotated[
    dict[str, Any], FormOf(RunConfig, hidden={**SET_BY_THE_RUN, "": ("name", "seed", "model")})
]
_NO_AXES: list[str] = []
_ONE_SEED = [0]
# Figures by which combinations of a grid are tested against each other.
_TESTED = ("mean_reward", "win_rate")
_INTERVAL_FORM = ".3g"


@dataclass(frozen=True)
class Finding:
    """Result of one run, or the error that ended it."""

    cell: Cell
    summary: Summary | None
    error: str = ""


@dataclass(frozen=True)
class Sweep:
    """Results of a sweep."""

    name: str
    findings: Sequence[Finding]

    @property
    def failed(self) -> list[Finding]:
        """Runs that did not come to their end."""
        return [each for each in self.findings if each.summary is None]

    def rows(self) -> list[dict[str, str]]:
        """A row per combination of the grid: mean ± standard deviation over the seeds.

        Behind it is Student's 95 % interval of the mean. Figures are those of the last iteration.
        """
        rows = []
        for label, found in self._groups().items():
            row = {"grid": label, "runs": str(len(found))}
            for column in COLUMNS:
                row[column.title] = _over_seeds([run[column.name] for run in found], column.form)
            for part in ("solved", "components"):
                for name in sorted({name for run in found for name in run[part]}):
                    row[name] = _over_seeds([run[part].get(name) for run in found], ".3f")
            rows.append(row)
        return rows

    def comparisons(self) -> list[dict[str, Any]]:
        """Welch's test of each combination against the first, for mean reward and win rate.

        p-values are also adjusted by Holm, over the combinations, figure by figure. None with one
        combination; a p-value is None where there are fewer than two seeds.
        """
        (first, own), *others = self._groups().items()
        rows: list[dict[str, Any]] = []
        for name in _TESTED:
            found = []
            for label, runs in others:
                before, now = _known(own, name), _known(runs, name)
                if before and now:
                    found.append((label, welch(before, now)))
            adjusted = holm([each.p_value for _, each in found])
            rows += [
                {
                    "figure": name,
                    "grid": label,
                    "against": first,
                    "difference": each.estimate.value,
                    "interval": each.estimate.interval,
                    "p_value": each.p_value,
                    "adjusted_p_value": p_value,
                }
                for (label, each), p_value in zip(found, adjusted, strict=True)
            ]
        return rows

    def _groups(self) -> dict[str, list[dict[str, Any]]]:
        """Figures of the runs of each combination after the last iteration."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for each in self.findings:
            last = [each.summary.rows[-1]] if each.summary else []
            groups.setdefault(each.cell.label(), []).extend(last)
        return groups

    def notes(self) -> list[str]:
        """A line for each comparison of :meth:`comparisons` that has a p-value."""
        return [
            f"{row['grid']} against {row['against']}: {row['figure']} {row['difference']:+.3f} "
            f"{interval_text(row['interval'], '+.3f')}, {p_text(row['adjusted_p_value'])} "
            "(Welch over seeds, Holm)"
            for row in self.comparisons()
            if row["p_value"] is not None
        ]

    def table(self) -> Table:
        """The table that a sweep ends with."""
        rows = self.rows()
        titles = list(dict.fromkeys(title for row in rows for title in row))
        table = Table(title=f"sweep {self.name}", title_justify="left", box=None, pad_edge=False)
        for title in titles:
            table.add_column(title)
        for row in rows:
            table.add_row(*(row.get(title, "-") for title in titles))
        return table

    def to_json(self) -> dict[str, Any]:
        """Values for a JSON document."""
        return {
            "sweep": self.name,
            "table": self.rows(),
            "comparisons": self.comparisons(),
            "runs": [
                {
                    "run": each.cell.config.name,
                    "seed": each.cell.config.seed,
                    "fields": dict(each.cell.fields),
                    "rows": each.summary.rows if each.summary else None,
                    "error": each.error,
                }
                for each in self.findings
            ],
        }


def _over_seeds(values: Sequence[float | None], form: str) -> str:
    known = [each for each in values if each is not None]
    interval = over_seeds(known).interval if known else None
    return f"{spread(values, form)} {interval_text(interval, _INTERVAL_FORM)}".rstrip()


def _known(runs: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [run[name] for run in runs if run[name] is not None]


@flow(name="sweep", flow_run_name="{name}", persist_result=False)
@ends_cancelled
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
            value, or the default where the preset has none.
    """
    try:
        planned = cells(name, configured(preset, config), parse_axes(grid), seeds)
        return _sweep(name, planned, parallel_runs)
    except RunCancelledError:
        raise
    except GebError as error:
        return failed(error, name)


def sweep_resolved(
    name: str, config: RunConfig, grid: list[str], seeds: list[int], parallel_runs: int
) -> Sweep:
    """Calls the flow with a configuration that was read already, for programs.

    Observers are those of the present block.

    Raises:
        GebError: A run failed.
    """
    return sweep(name, grid, seeds, parallel_runs, NO_PRESET, json.loads(config.to_json()))


def _sweep(name: str, planned: Sequence[Cell], parallel_runs: int) -> Sweep:
    """Runs all cells, as flow runs below the present one.

    Raises:
        GebError: A run failed; the others went to their ends, and the table shows them.
    """
    with inputs_resolved_once(), ThreadPoolExecutor(max_workers=parallel_runs) as pool:
        # Each thread needs the flow run's context to be below it.
        futures = [pool.submit(copy_context().run, _run, cell) for cell in planned]
        found = Sweep(name, [future.result() for future in futures])
    store = open_store(planned[0].config.store, create=True)
    path = store.run_path(name) / "sweep.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    store.share(path)
    survives_outage(create_table_artifact)(
        found.rows(),
        key=artifact_key(name, "table"),
        description=f"Sweep {name}: mean ± standard deviation over seeds, and Student's 95 % "
        "interval of the mean, last iteration.",
    )
    if found.failed:
        first = found.failed[0]
        raise GebError(
            f"{len(found.failed)} of {len(planned)} runs failed: "
            f"{', '.join(each.cell.config.name for each in found.failed)}; the first because "
            f"{first.error}"
        )
    return found


def _run(cell: Cell) -> Finding:
    try:
        result = iterate_resolved(cell.config)
    except RunCancelledError:
        raise
    except GebError as error:
        return Finding(cell, None, str(error))
    return Finding(cell, result.summary)
