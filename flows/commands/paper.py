"""Commands ``geb paper`` and ``geb bandit``: the experiments of the paper."""

from contextlib import suppress
from functools import partial
from typing import Annotated

import typer

from experiments.paper import Scale
from flows.commands.common import (
    AsJson,
    DryRun,
    Out,
    Overrides,
    ParallelRuns,
    answer,
    prefect_session,
    quiet_prefect,
    watched,
)
from flows.pipeline.algorithm import resolve_run
from flows.pipeline.external import HubUnreachableError
from flows.pipeline.form import SETTINGS
from flows.pipeline.presets import store_of_overrides
from stages.contract.atomic import write_atomically


def paper(
    scale: Annotated[
        Scale,
        typer.Option(
            help="small: tasks for this machine; chat: two for a small chat model "
            "(--set inputs.policy=…); full: the paper's."
        ),
    ] = "small",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="NAME",
            help="An experiment, setting, method or divergence; of one kind any, of several all.",
        ),
    ] = None,
    parallel_runs: ParallelRuns = 1,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Compute the paper's tables and figures; whatever the store has already is reused."""
    from experiments.paper.tables import paper_rows
    from experiments.study import planned_runs, selected

    config = {SETTINGS: overrides or ()}
    names = only or ()
    rows = paper_rows(scale)
    planned = planned_runs(selected(rows, names), config)
    if dry_run:
        answer(
            as_json,
            {"runs": [*planned]},
            *planned,
            f"{len(planned)} runs; a coefficient that is still to be chosen is shown as the first "
            "of its values",
        )
        return
    # A mistake in the settings of all runs ends the command before the first one.
    with suppress(HubUnreachableError):
        resolve_run(next(iter(planned.values())))
    quiet_prefect()
    from experiments.paper.flow import TITLE, compute
    from flows.execution.stage_flow import call_as_flow

    name = f"paper-{scale}"
    with prefect_session(store_of_overrides(config), name, as_json) as session:
        computed = partial(compute, name, TITLE, rows, names, parallel_runs, config, session)
        document = call_as_flow("paper", name, computed)
    answer(as_json, document, document["coverage"], f"report  {document['page']}")


def bandit(
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.")] = 10,
    iterations: Annotated[
        int, typer.Option(min=50, metavar="N", help="Updates of each policy, in steps of 50.")
    ] = 5000,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's toy experiment: does a bonus find the best arm of a bandit?"""
    from experiments.bandit import GAMES, Game, Outcome, figure, simulate, table
    from flows.report.plots import png

    outcomes: dict[Game, Outcome] = {}
    with watched(as_json).status("") as status:
        for game in GAMES:
            status.update(f"{len(outcomes)} of {len(GAMES)} games")
            outcomes[game] = simulate(game, seeds, iterations)
    result = table(outcomes)
    if out is not None:
        write_atomically(out / "table.md", f"{result.markdown()}\n")
        write_atomically(out / "policies.png", png(figure(outcomes)))
    answer(as_json, {"cells": result.records()}, result)
