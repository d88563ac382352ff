"""Observers that show a run in a terminal."""

import math
import threading
import time
from dataclasses import dataclass, field
from typing import Self

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
from rich.progress import Progress as Bars

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
    "cancelled": "[yellow]■[/]",
    "stopped": "[yellow]■[/]",
}


class LineObserver(Observer):
    """Prints a line for each step that has ended, behind its run's name: of several runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def run_warning(self, run: str, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        self._say(run, f"[bold yellow]warning[/] {escape(message)}")

    def sweep_moved(self, sweep: str, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        self._say(sweep, f"[bold]{escape(message)}[/]")

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        how = "cached" if state == "reused" else f"{seconds:.1f} s"
        how = f"{state} after {how}" if state in ("cancelled", "stopped") else how
        head = f"{self._count(state)}{_MARKS[state]}"
        self._say(request.run, f"{head} {request.step} [dim]{how}[/]")
        if state == "failed":
            self._say(request.run, f"      [red]{escape(message)}[/]")

    def _count(self, state: State) -> str:
        return ""

    def _say(self, run: str, text: str) -> None:
        self._console.print(f"{escape(run)}  {text}")


@dataclass
class _Shown:
    """A running step: its bar, its last metrics, and when each of its phases printed a line."""

    bar: TaskID
    metrics: str = ""
    printed: dict[str, float] = field(default_factory=dict)


class ConsoleObserver(LineObserver):
    """Prints a counted line per step, and bars (in a terminal) or lines while it runs."""

    def __init__(self, console: Console, num_steps: int) -> None:
        super().__init__(console)
        self._num_steps = num_steps
        self._num_ended = 0
        self._lock = threading.Lock()
        self._begun = time.monotonic()
        self._running: dict[str, _Shown] = {}
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

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the bars away."""
        self._bars.stop()

    def step_started(self, request: Request) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            bar = self._bars.add_task(request.step, total=None, unit="starting", metrics="")
            self._running[request.step] = _Shown(bar)
        if not self._console.is_terminal:
            self._say(request.run, f"  {request.step}: started")

    def stage_event(self, request: Request, event: Event) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            shown = self._running.get(request.step)
            match event:
                case Progress() if shown is not None:
                    self._progress(request, shown, event)
                case Metric(values=values) if shown is not None:
                    names = [name for name in _SHOWN_METRICS if name in values]
                    shown.metrics = " ".join(f"{name} {values[name]:.3g}" for name in names)
                case Log(level=level, message=message):
                    style = {"warning": "[yellow]", "error": "[red]"}.get(level, "[dim]")
                    self._say(request.run, f"  {request.step}: {style}{escape(message)}[/]")

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            self._forget(request.step)
            super().step_ended(request, state, seconds, message)

    def step_preempted(self, request: Request, message: str) -> None:
        """See :class:`flows.execution.observer.Observer`."""
        with self._lock:
            self._forget(request.step)
            self._say(request.run, f"  {request.step}: [yellow]preempted: {escape(message)}[/]")

    def _forget(self, step: str) -> None:
        if (shown := self._running.pop(step, None)) is not None:
            self._bars.remove_task(shown.bar)

    def _progress(self, request: Request, shown: _Shown, event: Progress) -> None:
        unit = event.unit
        now = time.monotonic()
        self._bars.update(
            shown.bar, completed=event.done, total=event.total, unit=unit, metrics=shown.metrics
        )
        # By unit, so that the next phase of a stage has a line at once.
        if self._console.is_terminal or not event.done:
            return
        if now - shown.printed.get(unit, -math.inf) < _LINE_SECONDS:
            return
        shown.printed[unit] = now
        share = f"({100 * event.done / max(event.total, 1):.0f} %)"
        done = f"{event.done}/{event.total} {unit} {share}"
        self._say(request.run, f"  {request.step}: {done} {shown.metrics}".rstrip())

    def _count(self, state: State) -> str:
        self._num_ended += state in ("done", "reused")
        return f"{self._num_ended:>3}/{self._num_steps} "

    def _say(self, run: str, text: str) -> None:
        elapsed = time.monotonic() - self._begun
        self._console.print(f"[dim]{elapsed:7.1f} s[/] {text}", highlight=False)
