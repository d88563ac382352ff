"""The end of a flow run by an error: its state and the artifact that says how to go on."""

from textwrap import fill
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Failed, State

from flows.execution.prefect_progress import artifact_key, survives_outage
from stages.contract.errors import GebError, StageFailedError, UserError

# Characters of a line in a block of code.
_WIDTH = 64


@survives_outage
def failed(error: GebError) -> State[Any]:
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
