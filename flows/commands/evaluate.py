"""Commands ``geb evaluate`` and ``geb sweep``: comparisons of models, and of settings."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from flows.commands.common import (
    AsJson,
    ConfigPath,
    ConfigStore,
    DryRun,
    Overrides,
    ParallelRuns,
    RunnerName,
    answer,
    answer_comparison,
    config_of_command,
    prefect_session,
    quiet_prefect,
)
from flows.execution.plan import plan
from flows.pipeline.algorithm import check_cells, resolve_run
from flows.pipeline.grid import SweepCell, cells, parse_axes
from flows.pipeline.inputs import ComparedModels
from flows.report.table import FittedTable
from stages.contract.errors import UserError

PolicyArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Registered model (NAME:VERSION, NAME@ALIAS, or NAME: what its alias production "
        "means, else the newest), folder (./NAME), or hub id.",
    ),
]


def evaluate(
    config: ConfigPath,
    policy: PolicyArgument,
    base: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with it, not with what CONFIG starts from."),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A suite of CONFIG: its prompts, sampling and oracle."),
    ] = None,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    as_json: AsJson = False,
) -> None:
    """Compare a model with a base on held-out prompts, by the sampling and the oracle of CONFIG.

    Other prompts: --set inputs.test_prompts=FILE.
    """
    settings = config_of_command(config, overrides, runner, store)
    models = ComparedModels(policy, base, suite)
    quiet_prefect()
    from flows.evaluate import compare_models, resolve_comparison
    from flows.execution.stage_flow import call_as_flow

    run = resolve_comparison(settings, models)
    with prefect_session(settings.store, run.config.name, as_json, len(run.steps)) as session:
        comparison = call_as_flow("evaluate", policy, lambda: compare_models(run, models, session))
    answer(
        as_json,
        comparison.to_json(),
        Text(comparison.verdict()),
        comparison.table(),
        f"metrics  {comparison.artifact}",
    )


def sweep(
    configs: Annotated[
        list[Path], typer.Argument(metavar="CONFIG", help="Configuration files (YAML).")
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="NAME=VALUE,VALUE", help="A field and its values."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="SEED,SEED", help="Seeds of each combination; CONFIG's if unset."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the sweep; the first CONFIG's if unset."),
    ] = None,
    parallel_runs: ParallelRuns = 1,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run configurations and a grid of settings over seeds, and test them against the first."""
    bases = [config_of_command(config, overrides, runner, store) for config in configs]
    title = name or f"{bases[0].name}-sweep"
    planned = cells(title, bases, parse_axes(grid or ()), _seeds(seeds))
    if len(planned) == 1:
        raise UserError(
            f"the sweep {title} has one run",
            "give several CONFIGs, --grid FIELD=VALUE,VALUE or several --seeds",
        )
    if dry_run:
        _show_runs(planned, as_json)
        return
    check_cells(planned)
    with prefect_session(bases[0].store, title, as_json) as session:
        from flows.execution.stage_flow import call_as_flow
        from flows.sweep import sweep_cells

        comparison = call_as_flow(
            "sweep", title, lambda: sweep_cells(title, planned, parallel_runs, session)
        )
    answer_comparison(as_json, comparison)


def _seeds(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise UserError(
            f"--seeds {text!r} is not SEED,SEED", "write for example --seeds 0,1,2"
        ) from None


def _show_runs(planned: list[SweepCell], as_json: bool) -> None:
    document = []
    rows = []
    for cell in planned:
        actions = Counter(line.action for line in plan(resolve_run(cell.config)))
        row = {
            "run": cell.config.name,
            "seed": cell.config.seed,
            "reuse": actions["reuse"],
            "compute": actions["run"],
            "method": cell.method,
        }
        document.append(row)
        rows.append([*map(str, row.values())])
    answer(
        as_json,
        document,
        FittedTable("", ("run", "seed", "in the store", "to compute", "method"), rows, left=5),
    )
