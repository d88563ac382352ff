"""Observers that show a run in a terminal."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as Bars,
)

from flows.execution.observer import Observer
from flows.execution.run_record import State
from stages.contract.events import Event, Log, Metric, Progress
from stages.contract.request import Request

# Without a terminal each running stage prints a line about this often.
_LINE_SECONDS = 5.0
# Metrics that tell most at a glance, as far as the stage has them.
_SHOWN_METRICS = ("loss", "bonus_ratio", "accuracy", "grad_norm", "tokens_per_second")
_MARKS = {
    "done": "[green]✓[/]",
    "reused": "[cyan]↺[/]",
    "failed": "[red]✗[/]",
    "stopped": "[yellow]■[/]",
}


class LineObserver(Observer):
    """Prints a line per step, for several runs at once.

    Args:
        console: Where to print; each line begins with the run's name.
    """

    def __init__(self, console: Console) -> None:
        self._console = console

    def run_warning(self, run: str, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        self._console.print(f"{escape(run)}  [yellow]{escape(message)}[/]")

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        how = _how(state, seconds)
        self._console.print(f"{escape(request.run)}  {_MARKS[state]} {request.step} [dim]{how}[/]")
        if state == "failed":
            self._console.print(f"  [red]{escape(message)}[/]")


class ConsoleObserver(Observer):
    """Prints a line per step, and bars (in a terminal) or lines (elsewhere) while it runs.

    Args:
        console: Where to print.
        num_steps: Steps of the run, for the count before each line.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._num_ended = 0
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._tasks: dict[str, TaskID] = {}
        # By step and unit, so that the next phase of a stage has a line at once.
        self._throttles: dict[str, defaultdict[str, Throttle]] = {}
        self._metrics: dict[str, str] = {}
        self._bars = Bars(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[metrics]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> ConsoleObserver:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def run_warning(self, run: str, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            self._say(f"[bold yellow]warning[/] {escape(message)}")

    def step_started(self, request: Request) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            self._throttles[request.step] = defaultdict(lambda: Throttle(_LINE_SECONDS))
            self._metrics[request.step] = ""
            self._tasks[request.step] = self._bars.add_task(
                request.step, total=None, unit="starting", metrics=""
            )
            if not self._console.is_terminal:
                self._say(f"  {request.step}: started")

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            match event:
                case Progress():
                    self._progress(request.step, event)
                case Metric(values=values):
                    shown = [name for name in _SHOWN_METRICS if name in values]
                    self._metrics[request.step] = " ".join(f"{k} {values[k]:.3g}" for k in shown)
                case Log(level=level, message=message):
                    style = {"warning": "[yellow]", "error": "[red]"}.get(level, "[dim]")
                    self._say(f"  {request.step}: {style}{escape(message)}[/]")

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            task = self._tasks.pop(request.step, None)
            if task is not None:
                self._bars.remove_task(task)
            if state in ("done", "reused"):
                self._num_ended += 1
            how = _how(state, seconds)
            count = f"{self._num_ended:>3}/{self._num_steps}"
            self._say(f"{count} {_MARKS[state]} {request.step} [dim]{how}[/]")
            if state == "failed":
                self._say(f"      [red]{escape(message)}[/]")

    def step_preempted(self, request: Request, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            task = self._tasks.pop(request.step, None)
            if task is not None:
                self._bars.remove_task(task)
            self._say(f"  {request.step}: [yellow]preempted: {escape(message)}[/]")

    def _progress(self, name: str, event: Progress) -> None:
        metrics = self._metrics.get(name, "")
        task = self._tasks.get(name)
        if task is not None:
            self._bars.update(
                task, completed=event.done, total=event.total, unit=event.unit, metrics=metrics
            )
        throttles = self._throttles.get(name)
        if self._console.is_terminal or throttles is None:
            return
        if throttles[event.unit].ready():
            share = 100 * event.done / max(event.total, 1)
            self._say(
                f"  {name}: {event.done}/{event.total} {event.unit} ({share:.0f} %) {metrics}"
            )

    def _say(self, text: str) -> None:
        elapsed = time.monotonic() - self._begun
        self._console.print(f"[dim]{elapsed:7.1f} s[/] {text}", highlight=False)


def _how(state: State, seconds: float) -> str:
    match state:
        case "reused":
            return "cached"
        case "stopped":
            return f"stopped after {seconds:.1f} s"
        case _:
            return f"{seconds:.1f} s"


class Throttle:
    """Ready at first, and again ``seconds`` after each call that returned True."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def ready(self) -> bool:
        """True if ``seconds`` have passed since the last True; the wait then begins again."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
