"""Passes what a stage says on to Prefect: its log, and a progress artifact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.logging import get_run_logger

from flows.execution.throttle import Throttle
from stages.contract.events import Event, Failure, Log, Metric, Progress

# A progress update is a request to the server of about 20 ms.
_PROGRESS_SECONDS = 2.0


def artifact_key(*parts: str) -> str:
    """A key as Prefect wants it, of lower-case letters, digits and dashes."""
    text = "-".join(parts).lower()
    return "".join(each if each.isascii() and each.isalnum() else "-" for each in text).strip("-")


class PrefectProgress:
    """Hears the events of one stage; to be made inside the task or flow run that shows them.

    Args:
        run: Name of the run.
        step: Name of the step.
        ending: Whether the run ends: it may have lost its server, and nothing must wait for that.
    """

    def __init__(self, run: str, step: str, ending: Callable[[], bool]) -> None:
        self._key = artifact_key(run, step)
        self._ending = ending
        self._logger: logging.Logger | logging.LoggerAdapter[Any] = get_run_logger()
        self._throttle = Throttle(_PROGRESS_SECONDS)
        self._progress: Any = None

    def hear(self, event: Event) -> None:
        """Passes one event on."""
        match event:
            case Log(level=level, message=message):
                getattr(self._logger, level)(message)
            case Failure(message=message, remedy=remedy):
                self._logger.error("%s%s", message, f"\nremedy: {remedy}" if remedy else "")
            case Metric(step=step, values=values):
                shown = " ".join(f"{name}={value:.4g}" for name, value in values.items())
                self._logger.debug("step %d %s", step, shown)
            case Progress(done=done, total=total, unit=unit):
                wanted = self._throttle.ready() or done >= total
                if wanted and not self._ending():
                    try:
                        self._show_progress(100.0 * done / max(total, 1), f"{done}/{total} {unit}")
                    except Exception as error:
                        # A server that is away for a while must not end the stage.
                        self._logger.debug("cannot show progress: %s", error)

    def _show_progress(self, percent: float, text: str) -> None:
        if self._progress is None:
            self._progress = create_progress_artifact(percent, key=self._key, description=text)
        else:
            update_progress_artifact(self._progress, progress=percent, description=text)
