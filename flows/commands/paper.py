"""Commands ``geb paper`` and ``geb bandit``: the experiments of the paper."""

from functools import partial
from typing import Annotated

import typer
from rich.markup import escape

from experiments.paper.options import Judge, Scale
from flows.commands.common import (
    AsJson,
    ConfigStore,
    DryRun,
    Out,
    Overrides,
    ParallelRuns,
    answer,
    chosen,
    prefect_session,
    quiet_prefect,
    watched,
)
from flows.pipeline.loading import overrides_of
from flows.pipeline.presets import store_of
from flows.report.files import write_file


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
            "--only", metavar="NAME", help="An experiment, setting, method or divergence alone."
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The first N seeds of each cell alone.")
    ] = None,
    parallel_runs: ParallelRuns = 1,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Judge of AlpacaEval and coherence; both are left out without."
        ),
    ] = None,
    judge_url: Annotated[
        str, typer.Option(metavar="URL", help="Address of the judge's chat completions.")
    ] = Judge.model_fields["url"].default,
    judge_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="Variable that holds the judge's key.")
    ] = None,
    overrides: Overrides = None,
    store: ConfigStore = None,
    dry_run: DryRun = False,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compute the paper's tables and figures; whatever the store has already is reused."""
    from experiments.paper.budget import budget
    from experiments.paper.tables import paper_rows

    laid_over = overrides_of(chosen(overrides, store=store))
    judging = None if judge is None else Judge(model=judge, url=judge_url, key_env=judge_key_env)
    rows = paper_rows(scale, only or (), judging)
    expected = budget(rows, laid_over, seeds, parallel_runs)
    if dry_run:
        answer(as_json, expected.to_json(), *expected.runs, *expected.lines())
        return
    watched(as_json).print(escape("\n".join(expected.lines())))
    quiet_prefect()
    from experiments.paper.flow import compute
    from flows.report.prefect_artifacts import as_flow

    name = f"paper-{scale}"
    make_rows = partial(paper_rows, scale, judge=judging)
    with prefect_session(store_of(laid_over), name, as_json) as session:
        computed = partial(
            compute, name, scale, make_rows, session, only or (), seeds, parallel_runs, laid_over
        )
        written = as_flow("paper", f"paper, {scale} scale", name, computed)
    if out is not None:
        written.copy_to(out)
    document = written.document
    answer(as_json, document, document["coverage"], f"report  {document['page']}")


def bandit(
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions.")] = 10,
    iterations: Annotated[
        int, typer.Option(min=50, metavar="N", help="Updates of each policy.")
    ] = 5000,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Run the paper's toy experiment: does a bonus find the best arm of a bandit?"""
    from experiments.bandit import figure, simulate, table
    from flows.report.plots import png

    with watched(as_json).status("") as status:
        policy, best_mass = simulate(
            seeds, iterations, lambda done: status.update(f"{done} of {iterations} iterations")
        )
    result = table(policy, best_mass)
    if out is not None:
        write_file(out / "table.md", f"{result.markdown()}\n")
        write_file(out / "policies.png", png(figure(policy)))
    answer(as_json, {"cells": result.records()}, result)
