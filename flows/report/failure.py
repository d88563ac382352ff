"""Message of a failed run in the Prefect UI: the cause, and how to go on."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Failed, State

from flows.execution.outage import survives_outage
from flows.execution.prefect_progress import artifact_key
from stages.contract.errors import GebError, StageFailedError, UserError

# All of it is in the log file that the message names.
_SHOWN_LINES = 20


@survives_outage
def failed(error: GebError, name: str, command: str | None = None) -> State[Any]:
    """The state of a flow run that ``error`` ended; to be called inside one.

    Retry is offered only to flow runs of a deployment: Prefect has nothing to start others with.

    Args:
        error: The error.
        name: Name of the run, for its message and for the key of the artifact with that message.
        command: Command that resumes it in a terminal.
    """
    lines = _last_lines(error) if isinstance(error, StageFailedError) else []
    context = FlowRunContext.get()
    assert context is not None and context.flow_run is not None
    is_deployed = context.flow_run.deployment_id is not None
    how = _remedy(error, is_deployed, command)
    shown = [f"**{error}**", how.rstrip(":")]
    shown += [f"```\n{command}\n```"] if command else []
    shown += ["What is done stays done."]
    shown += ["The stage's last lines:", "```\n" + "\n".join(lines) + "\n```"] if lines else []
    create_markdown_artifact(
        "\n\n".join(shown),
        key=artifact_key(name, "failure"),
        description=f"Why {name} failed, and how to go on.",
    )
    message = f"{error}\n{how}{f' {command}' if command else ''}. What is done stays done."
    get_run_logger().error("%s", message)
    return Failed(message=message, data=error)


def _remedy(error: GebError, is_deployed: bool, command: str | None) -> str:
    """A sentence without its full stop; with a command, it ends with a colon."""
    ways = ["press Retry"] if is_deployed else []
    ways += ["run:"] if command else []
    again = ", or ".join(ways) or "start it again"
    if isinstance(error, UserError):
        return f"If a parameter is wrong, start a new run; if a file is, correct it and {again}"
    return f"Fix the cause, then {again}"


def _last_lines(error: StageFailedError) -> list[str]:
    """End of the stage's log, without the lines in which Python underlines the one above."""
    telling = [line for line in error.last_lines if line.strip(" ^~")]
    return telling[-_SHOWN_LINES:]
