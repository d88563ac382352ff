"""Observers that show a run in a terminal."""

import threading
import time
from contextlib import suppress

from rich.console import Console
from rich.markup import escape

from flows.execution.observer import Observer, StepLines
from flows.execution.run_record import StepState
from stages.contract.events import Event, Log
from stages.contract.request import Request

# A running stage prints a line about this often.
_LINE_SECONDS = 5.0
_MARKS = {
    "done": "[green]✓[/]",
    "reused": "[cyan]↺[/]",
    "failed": "[red]✗[/]",
    "cancelled": "[yellow]■[/]",
    "stopped": "[yellow]■[/]",
}


class ConsoleObserver(Observer):
    """Prints a line for each step that has ended; of a single run also lines while a step runs.

    ``num_steps`` are the steps of the single run, by which lines are counted; None for several
    runs, whose names begin the lines.
    """

    def __init__(self, console: Console, num_steps: int | None = None) -> None:
        self._console = console
        self._num_steps = num_steps
        self._num_ended = 0
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._running: dict[str, StepLines] = {}

    def run_log(self, run: str, log: Log) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        head = "[bold yellow]warning[/] " if log.level == "warning" else ""
        self._say(run, f"{head}{escape(log.message)}")

    def step_started(self, request: Request) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        if self._num_steps is None:
            return
        with self._lock:
            self._running[request.step] = StepLines(_LINE_SECONDS)
            self._say(request.run, f"  {request.step}: started")

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        if self._num_steps is None:
            return
        with self._lock:
            lines = self._running.setdefault(request.step, StepLines(_LINE_SECONDS))
            log = lines.log_of(event)
            if log is not None:
                style = {"warning": "[yellow]", "error": "[red]"}.get(log.level, "[dim]")
                self._say(request.run, f"  {request.step}: {style}{escape(log.message)}[/]")

    def step_ended(self, request: Request, state: StepState, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        how = f"{seconds:.1f} s"
        if state == "reused":
            how = "cached"
        elif state in ("cancelled", "stopped"):
            how = f"{state} after {how}"
        with self._lock:
            if state in ("done", "reused"):
                self._num_ended += 1
            count = ""
            if self._num_steps:
                count = f"{self._num_ended:>3}/{self._num_steps} "
            mark = _MARKS[state]
            self._say(request.run, f"{count}{mark} {request.step} [dim]{how}[/]")
            if state == "failed":
                self._say(request.run, f"      [red]{escape(message)}[/]")

    def _say(self, run: str, text: str) -> None:
        name = "" if self._num_steps else f"{escape(run)} "
        clock = f"[dim]{time.monotonic() - self._begun:7.1f} s[/]"
        # A full disk below the output must not end the run.
        with suppress(OSError):
            self._console.print(f"{clock} {name}{text}", highlight=False)
