"""The flow `paper`: the paper's cells, what they share computed once, and one report of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from prefect.artifacts import create_markdown_artifact
from prefect.states import State
from pydantic import Field

from experiments import study
from experiments.paper.options import Judge, Scale
from experiments.paper.report import WrittenReport, write_report
from experiments.paper.tables import Findings, paper_rows
from flows.execution.cancellation import stage_flow
from flows.execution.observer import Session
from flows.execution.prefect_progress import artifact_key, survives_outage
from flows.iterate import NOTHING
from flows.pipeline.form import SharedOverrides
from flows.pipeline.presets import store_of
from flows.report.prefect_artifacts import failed
from flows.sweep import run_cells
from stages.contract.errors import GebError
from stages.store.opening import open_store

_ALL: list[str] = []


@stage_flow("paper", "paper, {scale} scale")
def paper(
    scale: Scale = "small",
    only: list[str] = _ALL,
    seeds: Annotated[int, Field(ge=1)] | None = None,
    parallel_runs: int = 1,
    judge: Judge | None = None,
    config: SharedOverrides = NOTHING,
) -> WrittenReport | State[Any]:
    """Computes the paper's cells and writes its tables and figures.

    Steps that cells share are computed once. Finished runs are found in the store, so that the
    whole may be computed in parts; the report has all that the store holds.

    Args:
        scale: `small`, tasks that a model trained on this machine can do; `chat`, two that a small
            chat model can, which `inputs.policy` names; `full`, the paper's.
        only: Experiments, settings, methods and divergences to compute; all if empty.
        seeds: Number of seeds of each cell, the first ones; all if unset.
        parallel_runs: Runs at the same time.
        judge: The judge of AlpacaEval and coherence; unset, both are left out.
        config: Settings that differ from the cells' configurations in all runs.
    """
    name = f"paper-{scale}"
    try:
        cells = partial(paper_rows, scale, judge=judge)
        return compute(name, scale, cells, Session(), only, seeds, parallel_runs, config)
    except GebError as error:
        return failed(error, name)


def compute(
    name: str,
    scale: Scale,
    cells: Callable[[Sequence[str]], list[study.Row]],
    session: Session,
    only: Sequence[str] = (),
    seeds: int | None = None,
    parallel_runs: int = 1,
    config: Mapping[str, Any] = NOTHING,
    caution: str = "",
) -> WrittenReport:
    """Computes cells, and writes the report ``name`` of all that have results; within a flow run.

    ``cells`` makes the cells of some names, all if there are none; ``caution`` is a sentence at the
    head of the report. The rest is as for :func:`paper`. GebError if a run failed; the report has
    the others.
    """
    store = open_store(store_of(config), create=True)
    computed = cells(only)
    rows = cells(_ALL)
    errors = _compute(study.tuning_runs(computed, config, seeds), parallel_runs, session)
    tuning = study.finished(study.tuning_runs(rows, config))
    chosen = study.choose(tuning, study.mean_rewards(tuning))
    runs = study.reported_runs(computed, config, chosen, seeds)
    errors |= _compute(runs, parallel_runs, session)
    reported = study.finished(study.reported_runs(rows, config, chosen))
    findings = Findings(scale, rows, reported, tuning, chosen, errors, caution)
    written = write_report(store, name, findings)
    page = written.document["page"]
    survives_outage(create_markdown_artifact)(
        f"{written.markdown.read_text(encoding='utf-8')}\n\n```\n{page}\n```\n",
        key=artifact_key(name, "report"),
        description=f"The paper's tables and figures, {scale} scale.",
    )
    if errors:
        first, error = next(iter(errors.items()))
        raise GebError(
            f"{len(errors)} runs failed: {', '.join(errors)}; {first} because {error}; the "
            f"report of the others is {page}"
        )
    return written


def _compute(
    runs: Sequence[study.StudyRun], parallel_runs: int, session: Session
) -> dict[str, str]:
    """Runs what the store lacks; the errors of failed runs, by their names."""
    done = {run.name for run in study.finished(runs)}
    cells = {run.name: run.cell for run in runs if run.name not in done}
    findings = run_cells(list(cells.values()), parallel_runs, session)
    return {
        finding.cell.config.name: finding.error for finding in findings if finding.summary is None
    }
