"""The flow: T iterations of iterative online RLHF with an exploratory bonus."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import Flow, flow
from prefect.runtime import flow_run

from flows.config import RunConfig
from flows.plan import walk
from flows.report import html
from flows.report.publish import publish
from flows.report.summary import Summary, summarise
from flows.session import Session, Watcher
from flows.steps import Step
from flows.tasks import PrefectExecutor
from flows.watchers import Silent


def _telling_name() -> str:
    """``llama3-geb-arctanh-kl · arctanh · reverse_kl · κ=0.0001 · seed 0``."""
    config: RunConfig = flow_run.parameters["config"]
    train = config.train
    kappa = f"κ={train.kappa:g}" if train.target_ratio is None else f"ratio={train.target_ratio:g}"
    return " · ".join(
        [config.name, train.design, str(train.divergence), kappa, f"seed {config.seed}"]
    )


@flow(name="iterate", flow_run_name=_telling_name, persist_result=False)
def iterate(config: RunConfig) -> None:
    """Runs generate → score → pair → train → evaluate → promote for each iteration.

    Finished stages are found in the store and shown as Cached; a failed one runs again when the
    flow is retried, resumed, or started anew with the same configuration.
    """
    execute(config, Silent())


def watched_flow(
    watcher: Watcher, forced: Callable[[Step], bool]
) -> Flow[[RunConfig], tuple[Summary, Path]]:
    """The same flow for a terminal: it tells ``watcher`` what happens and returns what it found."""

    def run(config: RunConfig) -> tuple[Summary, Path]:
        return execute(config, watcher, forced)

    decorate = flow(name=iterate.name, flow_run_name=_telling_name, persist_result=False)
    return decorate(run)


def execute(
    config: RunConfig, watcher: Watcher, forced: Callable[[Step], bool] = lambda step: False
) -> tuple[Summary, Path]:
    """Runs a configuration to its end; to be called inside a flow.

    Returns:
        What the run found, and its HTML report.
    """
    session = Session(config, watcher, forced)
    session.view.save_config(config)
    executor = PrefectExecutor(session)
    try:
        walk(config, executor.do)
        executor.wait()
    finally:
        session.stop()
    summary = summarise(session.view)
    report = html.write(session.view, summary)
    publish(summary, str(report))
    return summary, report
