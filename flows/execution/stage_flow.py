"""Flows that start stages, and their ends: a state, and an artifact that says how to go on."""

import functools
import inspect
import logging
from collections.abc import Callable
from textwrap import fill
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Flow, flow
from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Cancelled, Failed, State
from prefect.task_runners import ThreadPoolTaskRunner

from flows.execution.prefect_api import artifact_key, survives_outage
from stages.contract.errors import GebError, RunCancelledError, StageFailedError, UserError

P = ParamSpec("P")
R = TypeVar("R")

# Characters of a line in a block of code.
_WIDTH = 64
# Steps are submitted in topological order, so the oldest thread can always go on.
_MOST_THREADS = 128

# Under a worker Prefect repeats, with a traceback, an error that the flow run has logged.
logging.getLogger("prefect.flow_runs").addFilter(
    lambda record: not record.exc_info or not isinstance(record.exc_info[1], GebError)
)


def stage_flow(
    name: str, run_name: str | Callable[[], str]
) -> Callable[[Callable[P, R | State[Any]]], Flow[P, R]]:
    """Makes a function a flow, which ends as Cancelled or as Failed with an artifact that says why.

    ``run_name`` names flow runs: a text with their parameters in braces, or a function. A state
    that the function returns is the flow run's own: Prefect raises its error at the caller, who
    gets results only.
    """

    def decorate(function: Callable[P, R | State[Any]]) -> Flow[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return cast(R, function(*args, **kwargs))
            except RunCancelledError as error:
                return cast(R, Cancelled(message=str(error), data=error))
            except GebError as error:
                return cast(R, _failed(error))

        # Prefect reads parameters' types off the signature, and would look for them in this module.
        vars(run)["__signature__"] = inspect.signature(function, eval_str=True)
        threads: Any = ThreadPoolTaskRunner(max_workers=_MOST_THREADS)
        return flow(
            name=name,
            flow_run_name=run_name,
            persist_result=False,
            task_runner=threads,
        )(run)

    return decorate


def call_as_flow(name: str, run_name: str, call: Callable[[], R | State[Any]]) -> R:
    """Calls a function as a flow run of this process; the call's GebError is raised."""
    return stage_flow(name, lambda: run_name)(call)()


@survives_outage
def _failed(error: GebError) -> State[Any]:
    """The state of the present flow run, which ``error`` has ended; its artifact is made here.

    Notes of the error are commands that resume the run in a terminal.
    """
    lines = error.last_lines if isinstance(error, StageFailedError) else ()
    remedy = f"{_remedy(error)}. Finished steps are kept."
    # Markdown would join its lines, and draw a long path over the page's right column.
    wrapped = fill(
        str(error), _WIDTH, replace_whitespace=False, break_long_words=False, break_on_hyphens=False
    )
    shown = [f"```\n{wrapped}\n```", remedy]
    if lines:
        shown.append("\n".join(["The stage's last lines:", "", "```", *lines, "```"]))
    name = flow_run.name
    create_markdown_artifact(
        "\n\n".join(shown),
        key=artifact_key(name, "failure"),
        description=f"Why {name} failed, and how to go on.",
    )
    message = f"{error}\n{remedy}"
    get_run_logger().error("%s", message)
    return Failed(message=message, data=error)


def _remedy(error: GebError) -> str:
    """A sentence without its full stop."""
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    # Prefect has nothing to start other flow runs with, such as the cells of a sweep.
    ways = ["press Retry"] if context.flow_run.deployment_id else []
    ways += [f"run: {command}" for command in getattr(error, "__notes__", ())]
    again = ", or ".join(ways) or "start it again"
    if isinstance(error, UserError):
        return f"If a parameter is wrong, start a new run; if a file is, correct it and {again}"
    return f"Fix the cause, then {again}"
