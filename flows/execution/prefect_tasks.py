"""Steps as Prefect tasks, one for each stage call.

Only the store tells what is done, so tasks neither cache nor persist results in Prefect; a step
whose artifact is in the store is shown there as Cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.logging import get_run_logger
from prefect.states import Cancelled, Completed

from flows.execution.cancellation import stops_when_cancelled
from flows.execution.observer import Observer, Session, StepLines
from flows.execution.step_executor import RETRY_SECONDS, StepExecutor
from flows.pipeline.step import Step
from stages.contract.errors import (
    PreemptedError,
    RefusedError,
    StageFailedError,
    StoppedError,
    UserError,
)
from stages.contract.events import Event
from stages.contract.request import Request
from stages.store.base import Artifact

# The server keeps each line in its database.
_PROGRESS_SECONDS = 30.0


# Prefect logs an error for each task whose input failed or was cancelled; their states say so, too.
logging.getLogger("prefect.task_runs").addFilter(
    lambda record: not record.getMessage().startswith("Finished in state NotReady")
)


@contextmanager
def step_tasks(
    executor: StepExecutor, session: Session, on_done: Callable[[Step], None] = lambda step: None
) -> Iterator[StepTasks]:
    """Tasks of the present flow run; no stage is left running at the end of the block.

    Raises:
        RunCancelledError: The flow run was cancelled in Prefect.
    """
    try:
        with stops_when_cancelled(executor.stop, session.stop, f"run {executor.config.name}"):
            yield StepTasks(executor, on_done)
    finally:
        executor.stop()


class StepTasks:
    """Submits steps as Prefect tasks; use it through :func:`step_tasks`.

    ``on_done`` is called within the task of each step when its artifact is there.
    """

    def __init__(self, executor: StepExecutor, on_done: Callable[[Step], None]) -> None:
        self._executor = executor
        self._on_done = on_done
        self._futures: dict[str, PrefectFuture[Any]] = {}
        self._steps: dict[str, Step] = {}

    def submit(self, step: Step) -> None:
        """Submits a step; its task starts when the steps that it waits for have completed.

        A run that stops takes no more; :meth:`wait` tells why.
        """
        if self._executor.stopping:
            return
        self._steps[step.name] = step
        awaited = (*step.upstream(), *step.after)
        upstream = {name: self._futures[name] for name in awaited}
        task: Task[Any, Any] = Task(
            self._execute_step,
            # Prefect shows it, with a suffix, before the task starts.
            name=step.name,
            task_run_name=step.name,
            retries=self._executor.config.execution.retries,
            retry_delay_seconds=RETRY_SECONDS,
            # Prefect takes a method for a value, and never retries.
            retry_condition_fn=lambda _task, _run, state: self._can_be_retried(state),
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        self._futures[step.name] = task.submit(step.name, upstream)

    def wait(self) -> dict[str, Artifact]:
        """Waits for all steps and returns their artifacts.

        Raises:
            Exception: The first failure, as the stage's runner raised it.
        """
        for future in self._futures.values():
            future.wait()
        # A step whose input failed is NotReady, a stopped one Cancelled; another is the cause.
        for future in sorted(
            self._futures.values(),
            key=lambda future: (future.state.is_pending(), future.state.is_cancelled()),
        ):
            future.result()
        if self._executor.stopping:
            raise StoppedError("the run stops")
        return {name: future.result() for name, future in self._futures.items()}

    def _can_be_retried(self, state: State[Any]) -> bool:
        error = state.result(raise_on_failure=False)
        # The executor limits preemptions, and has used up that limit.
        is_final = isinstance(error, UserError | PreemptedError)
        return not is_final and not self._executor.runner.closed.is_set()

    def _execute_step(self, name: str, upstream: dict[str, Artifact]) -> Any:
        try:
            result = self._executor.execute(self._steps[name], upstream, PrefectProgress())
        except RefusedError:
            # The others save and end: no retry helps, and a resumed run goes on with them.
            self._executor.stop()
            raise
        except UserError:
            # Others that are at work end well: nothing more is paid for until a person has seen it.
            self._executor.runner.closed.set()
            raise
        except StageFailedError as error:
            if error.last_lines:
                get_run_logger().error("the stage's last lines:\n%s", "\n".join(error.last_lines))
            raise
        except StoppedError as error:
            return Cancelled(message=str(error), data=error)
        self._on_done(self._steps[name])
        if result.reused:
            return Completed(name="Cached", data=result.artifact, message="found in the store")
        return result.artifact


class PrefectProgress(Observer):
    """Passes what one stage says, and its progress, on to Prefect's log.

    To be made inside the task or flow run that shows it. The log never waits for the server.
    """

    def __init__(self) -> None:
        self._lines = StepLines(_PROGRESS_SECONDS)
        self._logger = get_run_logger()

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        log = self._lines.log_of(event)
        if log is not None:
            getattr(self._logger, log.level)(f"{request.step}: {log.message}")
