"""The flow: T iterations of iterative online RLHF with an exploratory bonus."""

from __future__ import annotations

from collections.abc import Callable

from prefect import flow

from flows.config import RunConfig
from flows.plan import walk
from flows.session import Session, Watcher
from flows.steps import Step
from flows.tasks import PrefectExecutor
from flows.watchers import Silent


@flow(
    name="iterate",
    flow_run_name="{config.name}",
    persist_result=False,
)
def iterate(config: RunConfig) -> None:
    """Runs generate → score → pair → train → evaluate → promote for each iteration.

    Finished stages are found in the store and shown as Cached; a failed one runs again when the
    flow is retried, resumed, or started anew with the same configuration.
    """
    execute(config, Silent())


def execute(
    config: RunConfig, watcher: Watcher, forced: Callable[[Step], bool] = lambda step: False
) -> None:
    """Runs a configuration to its end; to be called inside a flow."""
    session = Session(config, watcher, forced)
    session.view.save_config(config)
    executor = PrefectExecutor(session)
    try:
        walk(config, executor.do)
        executor.wait()
    finally:
        session.stop()
