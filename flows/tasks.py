"""One Prefect task per stage call: request → key → store hit, or runner → artifact.

The store is the only truth about what is done, so tasks neither cache nor persist results in
Prefect; a hit is shown there as the state Cached.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import Task, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Completed

from flows.session import Session
from flows.steps import Output, Step
from flows.throttle import Throttle
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Event, Failure, Log, Metric, Progress
from stages.contract.store import Artifact

# Unfinished tasks above which the flow waits before it submits more: bounds threads and memory.
_MAX_PENDING = 128
# A progress update is a request to the server of about 20 ms.
_PROGRESS_SECONDS = 2.0


class PrefectExecutor:
    """Executes steps as Prefect tasks; use it inside a flow.

    Args:
        session: The run at work.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._futures: dict[str, PrefectFuture[Any]] = {}
        self._steps: dict[str, Step] = {}
        self._pending: list[PrefectFuture[Any]] = []

    def do(self, step: Step) -> Output:
        """Submits a step; its task starts when those of its inputs have completed."""
        while len(self._pending) >= _MAX_PENDING:
            # Steps come in topological order, so the oldest can always go on.
            self._pending.pop(0).wait()
        self._steps[step.name] = step
        upstream = {name: self._futures[name] for name in step.upstream()}
        future = self._task(step).submit(step.name, upstream)
        self._futures[step.name] = future
        self._pending.append(future)
        return Output(step.name)

    def wait(self) -> dict[str, Artifact]:
        """Waits for all steps and returns their artifacts.

        Raises:
            Exception: The first failure, as the stage's runner raised it.
        """
        for future in self._futures.values():
            future.wait()
        failed: list[PrefectFuture[Any]] = [
            future for future in self._futures.values() if not future.state.is_completed()
        ]
        # A step whose input failed is NotReady; the cause is among those that ran.
        failed.sort(key=lambda future: future.state.is_pending())
        for future in failed:
            future.result()
        return {name: future.result() for name, future in self._futures.items()}

    def _task(self, step: Step) -> Task[Any, Any]:
        execution = self._session.config.execution
        decorate = task(
            name=step.stage,
            task_run_name=step.name,
            retries=execution.retries,
            retry_delay_seconds=execution.retry_delay_seconds,
            retry_condition_fn=_can_be_retried,
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        return decorate(self._run)

    def _run(self, name: str, upstream: dict[str, Artifact]) -> Any:
        listener = _Listener(name, self._session)
        try:
            outcome = self._session.obtain(self._steps[name], upstream, listener.hear)
        except StageFailedError as error:
            get_run_logger().error("the stage's last lines:\n%s", "\n".join(error.last_lines))
            raise
        if outcome.reused:
            return Completed(name="Cached", data=outcome.artifact, message="found in the store")
        return outcome.artifact


def _can_be_retried(task: Task[Any, Any], run: TaskRun, state: State[Any]) -> bool:
    error = state.result(raise_on_failure=False)
    return not isinstance(error, UserError)


class _Listener:
    """Passes a stage's events on to Prefect: its log, and a progress artifact."""

    def __init__(self, step: str, session: Session) -> None:
        self._step = step
        self._session = session
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        self._throttle = Throttle(_PROGRESS_SECONDS)
        self._progress: Any = None

    def hear(self, event: Event) -> None:
        match event:
            case Log(level=level, message=message):
                getattr(self._logger, level)(message)
            case Failure(message=message, remedy=remedy):
                self._logger.error("%s%s", message, f"\nremedy: {remedy}" if remedy else "")
            case Metric(step=step, values=values):
                shown = " ".join(f"{name}={value:.4g}" for name, value in values.items())
                self._logger.debug("step %d %s", step, shown)
            case Progress(done=done, total=total, unit=unit):
                # A run that ends may have lost its server already: nothing may wait for it.
                wanted = self._throttle.ready() or done >= total
                if wanted and not self._session.stopping:
                    self._show_progress(100.0 * done / max(total, 1), f"{done}/{total} {unit}")

    def _show_progress(self, percent: float, text: str) -> None:
        if self._progress is None:
            key = "".join(each if each.isalnum() else "-" for each in self._step).strip("-").lower()
            self._progress = create_progress_artifact(percent, key=key, description=text)
        else:
            update_progress_artifact(self._progress, progress=percent, description=text)
