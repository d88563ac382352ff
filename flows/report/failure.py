"""What the Prefect UI says of a run that failed: the cause, and how to go on."""

from __future__ import annotations

import shlex
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.logging import get_run_logger
from prefect.states import Failed, State

from flows.execution.prefect_progress import artifact_key
from flows.pipeline.config import RunConfig
from stages.contract.errors import GebError, StageFailedError, UserError
from stages.contract.stores import location_of

# All of it is in the log file that the message names.
_SHOWN_LINES = 20


def resume_command(config: RunConfig) -> str:
    """The command that goes on with a run, from any folder."""
    return shlex.join(["geb", "resume", config.name, "--store", location_of(config.store)])


def failed(error: GebError, name: str, command: str | None = None) -> State[Any]:
    """The state of a flow run that ``error`` ended; to be called inside one.

    Args:
        error: What ended it.
        name: Of the run, for the key of the artifact that says it, too.
        command: What goes on with it in a terminal.
    """
    lines = _last_lines(error) if isinstance(error, StageFailedError) else []
    how = (
        "If a parameter is wrong, start a new run; if a file is, correct it and press Retry"
        if isinstance(error, UserError)
        else "Mend the cause, then press Retry"
    )
    shown = [f"**{error}**", how + (", or run" if command else "")]
    shown += [f"```\n{command}\n```"] if command else []
    shown += ["What is done stays done."]
    shown += ["The stage's last lines:", "```\n" + "\n".join(lines) + "\n```"] if lines else []
    create_markdown_artifact(
        "\n\n".join(shown),
        key=artifact_key(name, "failure"),
        description=f"Why {name} failed, and how to go on.",
    )
    said = f"{error}\n{how}{f', or: {command}' if command else ''}. What is done stays done."
    get_run_logger().error("%s", said)
    return Failed(message=said, data=error)


def _last_lines(error: StageFailedError) -> list[str]:
    """What the stage said last, without the lines in which Python underlines the one above."""
    telling = [line for line in error.last_lines if line.strip(" ^~")]
    return telling[-_SHOWN_LINES:]
