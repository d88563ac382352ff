"""The flow `paper`: the paper's runs, with common steps computed once, and one report."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_markdown_artifact

from experiments import study
from experiments.paper import Scale
from experiments.paper.report import write_report
from experiments.paper.tables import Findings, paper_rows
from flows.execution.observer import Session
from flows.execution.prefect_api import artifact_key, survives_outage
from flows.execution.stage_flow import stage_flow
from flows.iterate import NOTHING
from flows.pipeline.form import SharedOverrides
from flows.pipeline.presets import store_of_overrides
from flows.sweep import AtOnce, run_all
from stages.contract.errors import GebError
from stages.store.opening import open_store

TITLE = "The paper's tables"
_ALL: list[str] = []


@stage_flow("paper", "paper-{scale}")
def paper(
    scale: Scale = "small",
    only: list[str] = _ALL,
    parallel_runs: AtOnce = 1,
    config: SharedOverrides = NOTHING,
) -> dict[str, Any]:
    """Computes the paper's runs and writes its tables and figures.

    Steps that runs share are computed once. Finished runs are found in the store, so that the
    whole may be computed in parts; the report has all that the store holds.

    Args:
        scale: `small`, tasks that a model trained on this machine can do; `chat`, two that a small
            chat model can, which `inputs.policy` names; `full`, the paper's.
        only: Experiments, settings, methods and divergences to compute; names of one kind are
            alternatives, names of different kinds are conditions; all if empty.
        parallel_runs: Runs at the same time.
        config: Settings that differ from the rows' configurations in all runs.
    """
    rows = paper_rows(scale)
    return compute(f"paper-{scale}", TITLE, rows, only, parallel_runs, config, Session())


def compute(
    name: str,
    title: str,
    rows: Sequence[study.Row],
    only: Sequence[str],
    parallel_runs: int,
    config: Mapping[str, Any],
    session: Session,
) -> dict[str, Any]:
    """Computes rows, and writes the report ``name`` of all with results; within a flow run.

    Arguments are as for :func:`paper`. Returns the report's document.

    Raises:
        GebError: A run failed; the report has the others.
    """
    computed = set(study.selected(rows, only))
    tuning_runs = study.tuning_runs(rows, config)
    errors = _compute(tuning_runs, computed, parallel_runs, session)
    tuning = study.finished(tuning_runs)
    chosen = study.choose(tuning)
    reported_runs = study.reported_runs(rows, config, chosen)
    errors |= _compute(reported_runs, computed, parallel_runs, session)
    reported = study.finished(reported_runs)
    findings = Findings(title, rows, reported, tuning, chosen, errors)
    store = open_store(store_of_overrides(config), create=True)
    document, text = write_report(store, name, findings)
    survives_outage(create_markdown_artifact)(
        f"{text}\n\n```\n{document['page']}\n```\n",
        key=artifact_key(name, "report"),
        description=title,
    )
    if errors:
        first, error = next(iter(errors.items()))
        raise GebError(
            f"{len(errors)} runs failed: {', '.join(errors)}; {first} because {error}; the "
            f"report of the others is {document['page']}"
        )
    return document


def _compute(
    runs: Sequence[study.StudyRun], rows: set[study.Row], parallel_runs: int, session: Session
) -> dict[str, str]:
    """Runs what the store lacks of some rows; the errors of failed runs, by their names."""
    of_rows = [run for run in runs if run.row in rows]
    lacking = {run.config.name: run.config for run in of_rows}
    for run in study.finished(of_rows):
        lacking.pop(run.config.name, None)
    results = run_all(list(lacking.values()), parallel_runs, session)
    return {name: str(result) for name, result in results.items() if isinstance(result, GebError)}
