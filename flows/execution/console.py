"""Observers that show a run in a terminal."""

import math
import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from flows.execution.observer import Observer
from flows.execution.run_record import State
from stages.contract.events import Event, Log, Metric, Progress
from stages.contract.request import Request

# A running stage prints a line about this often.
_LINE_SECONDS = 5.0
# Metrics that tell most at a glance, as far as the stage has them.
_SHOWN_METRICS = ("loss", "bonus_ratio", "accuracy", "grad_norm", "tokens_per_second")
_MARKS = {
    "done": "[green]✓[/]",
    "reused": "[cyan]↺[/]",
    "failed": "[red]✗[/]",
    "cancelled": "[yellow]■[/]",
    "stopped": "[yellow]■[/]",
}


@dataclass
class _Shown:
    """A running step: its last metrics, and the time of each phase's last line."""

    metrics: str = ""
    printed: dict[str, float] = field(default_factory=dict)


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
        self._running: dict[str, _Shown] = {}

    def run_log(self, run: str, log: Log) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        head = "[bold yellow]warning[/] " if log.level == "warning" else ""
        self._say(run, f"{head}{escape(log.message)}")

    def step_started(self, request: Request) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        if self._num_steps is None:
            return
        with self._lock:
            self._running[request.step] = _Shown()
            self._say(request.run, f"  {request.step}: started")

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        if self._num_steps is None:
            return
        with self._lock:
            shown = self._running.setdefault(request.step, _Shown())
            match event:
                case Progress():
                    self._progress(request, shown, event)
                case Metric(values=values):
                    names = [name for name in _SHOWN_METRICS if name in values]
                    shown.metrics = " ".join(f"{name} {values[name]:.3g}" for name in names)
                case Log(level=level, message=message):
                    style = {"warning": "[yellow]", "error": "[red]"}.get(level, "[dim]")
                    self._say(request.run, f"  {request.step}: {style}{escape(message)}[/]")

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        how = f"{seconds:.1f} s"
        if state == "reused":
            how = "cached"
        elif state in ("cancelled", "stopped"):
            how = f"{state} after {how}"
        with self._lock:
            self._num_ended += state in ("done", "reused")
            count = f"{self._num_ended:>3}/{self._num_steps} " if self._num_steps else ""
            self._say(request.run, f"{count}{_MARKS[state]} {request.step} [dim]{how}[/]")
            if state == "failed":
                self._say(request.run, f"      [red]{escape(message)}[/]")

    def _progress(self, request: Request, shown: _Shown, event: Progress) -> None:
        now = time.monotonic()
        # By unit, so that the next phase of a stage has a line at once.
        last = shown.printed.get(event.unit, -math.inf)
        if not (event.done or event.note) or now - last < _LINE_SECONDS:
            return
        shown.printed[event.unit] = now
        share = f"({100 * event.done / max(event.total, 1):.0f} %)"
        done = f"{event.done}/{event.total} {event.unit} {share}"
        self._say(
            request.run, f"  {request.step}: {done} {shown.metrics or escape(event.note)}".rstrip()
        )

    def _say(self, run: str, text: str) -> None:
        head = f"{escape(run)} "
        if self._num_steps:
            head = f"[dim]{time.monotonic() - self._begun:7.1f} s[/]"
        self._console.print(f"{head} {text}", highlight=False)
