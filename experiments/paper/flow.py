"""The flow `paper`: the paper's cells, what they share computed once, and one report of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from prefect.artifacts import create_markdown_artifact
from prefect.states import State

from experiments.bandit import BanditConfig, bandit_step
from experiments.bandit import bandit as bandit_flow
from experiments.paper.report import WrittenReport, write_report
from experiments.paper.values import BANDIT, SCALES, Findings, paper_rows, value_of
from experiments.study import (
    Row,
    StudyRun,
    by_name,
    choose,
    finished,
    reported_runs,
    tuning_runs,
)
from flows.execution.cancellation import stage_flow
from flows.execution.prefect_progress import artifact_key, survives_outage
from flows.iterate import NOTHING, Shared
from flows.pipeline.external import inputs_resolved_once
from flows.pipeline.form import OneOf
from flows.pipeline.loading import load_settings
from flows.pipeline.presets import configs_folder, store_of
from flows.report.prefect_artifacts import failed
from flows.sweep import run_cells
from stages.contract.digests import sha256_of
from stages.contract.errors import GebError, UserError
from stages.contract.request import key_fields
from stages.store.base import Artifact
from stages.store.opening import open_store

Scale = Annotated[str, OneOf(lambda: SCALES)]
_ALL: list[str] = []


def report_name(scale: str) -> str:
    """Name of the report's folder among the store's runs."""
    return f"paper-{scale}"


@stage_flow("paper", "paper, {scale} scale")
def paper(
    scale: Scale = "small",
    only: list[str] = _ALL,
    seeds: int | None = None,
    parallel_runs: int = 1,
    config: Shared = NOTHING,
) -> WrittenReport | State[Any]:
    """Computes the paper's cells and writes its tables and figures.

    Steps that cells share are computed once. Finished runs are found in the store, so that the
    whole may be computed in parts; the report has all that the store holds.

    Args:
        scale: `small`, tasks that a model trained on this machine can do; `full`, the paper's.
        only: Experiments, settings, methods and divergences to compute; all if empty.
        seeds: Number of seeds of each cell, the first ones; all if unset.
        parallel_runs: Runs at the same time.
        config: What is to differ from the cells' configurations in all runs.
    """
    try:
        return _paper(scale, paper_rows(scale, only), seeds, parallel_runs, config)
    except GebError as error:
        return failed(error, report_name(scale))


def _paper(
    scale: str,
    asked: Sequence[Row],
    most_seeds: int | None,
    parallel_runs: int,
    overrides: Mapping[str, Any],
) -> WrittenReport:
    """Tunes, runs, and reports.

    Raises:
        UserError: No seeds are asked for.
        GebError: A run failed; the others went to their ends, and the report has them.
    """
    if most_seeds is not None and most_seeds < 1:
        raise UserError(f"{most_seeds} seeds are none", "ask for one or more, or leave it empty")
    errors: dict[str, str] = {}
    wanted = [row for row in asked if row.experiment != BANDIT]
    with inputs_resolved_once():
        errors |= _compute(tuning_runs(wanted, overrides, most_seeds), parallel_runs)
        chosen = _tuned(wanted, overrides)[1]
        errors |= _compute(reported_runs(wanted, overrides, chosen, most_seeds), parallel_runs)
        rows = paper_rows(scale)
        known = [row for row in rows if row.experiment != BANDIT]
        artifact = _bandit(rows, asked, overrides)
        tuning, chosen = _tuned(known, overrides)
        reported = finished(reported_runs(known, overrides, chosen))
    store = open_store(store_of(overrides), create=True)
    found = Findings(scale, rows, reported, tuning, chosen, errors)
    written = write_report(store, report_name(scale), found, artifact)
    _publish(scale, written)
    if errors:
        name, error = next(iter(errors.items()))
        raise GebError(
            f"{len(errors)} runs failed: {', '.join(errors)}; {name} because {error}; the report "
            f"of the others is {written.page}"
        )
    return written


def _bandit(
    rows: Sequence[Row], asked: Sequence[Row], overrides: Mapping[str, Any]
) -> Artifact | None:
    """Artifact of the bandit experiment: run where it is asked for, else looked up in the store."""
    known = [each for each in rows if each.experiment == BANDIT]
    if not known:
        return None
    path = configs_folder() / f"{known[0].configuration}.yaml"
    settings = load_settings(path, [f"store={json.dumps(store_of(overrides))}"], BanditConfig)
    if known[0] in asked:
        return bandit_flow(settings)
    step = bandit_step(settings)
    key = sha256_of(key_fields(step.params, step.seed, {}))
    return open_store(settings.store, create=True).load(step.stage, key)


def _compute(runs: Sequence[StudyRun], parallel_runs: int) -> dict[str, str]:
    """Runs what the store lacks; the errors of those that failed, by their names."""
    known = {each.name for each in finished(runs)}
    missing = [each.cell for name, each in by_name(runs).items() if name not in known]
    found = run_cells(missing, parallel_runs)
    return {each.cell.config.name: each.error for each in found if each.summary is None}


def _tuned(
    rows: Sequence[Row], overrides: Mapping[str, Any]
) -> tuple[list[StudyRun], dict[Row, Mapping[str, Any]]]:
    """Finished tuning runs of the store, and the coefficients with the highest mean reward."""
    runs = tuning_runs(rows, overrides)
    found = finished(runs)
    rewards = {each.name: value_of(each, "AvgR") for each in found}
    known = {name: reward.value for name, reward in rewards.items() if reward is not None}
    return found, choose(runs, known)


@survives_outage
def _publish(scale: str, written: WrittenReport) -> None:
    create_markdown_artifact(
        f"{written.markdown.read_text(encoding='utf-8')}\n\n```\n{written.page}\n```\n",
        key=artifact_key(report_name(scale), "report"),
        description=f"The paper's tables and figures, {scale} scale.",
    )
