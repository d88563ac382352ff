"""Observers of runs, and the session of a command or flow that has them."""

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flows.execution.run_record import AT_WORK, RunRecord, StepRecord, StepState
from flows.pipeline.step import Step
from flows.runners.place import PlaceNotice
from stages.contract.errors import GebError
from stages.contract.events import Event, Log, Metric, Progress
from stages.contract.request import Request, key_fields

# Metrics that tell most at a glance, as far as the stage has them.
_SHOWN_METRICS = ("loss", "bonus_ratio", "accuracy", "grad_norm", "tokens_per_second")


class Observer:
    """Base class of observers: a subclass overrides the calls that it wants.

    Calls come from several threads. The request names run, step and stage.
    """

    def run_log(self, run: str, log: Log) -> None:
        """A line about a run as a whole."""

    def step_started(self, request: Request) -> None:
        """A stage is started."""

    def stage_event(self, request: Request, event: Event) -> None:
        """A running stage reports something, or lost its machine and will start again."""

    def step_ended(self, request: Request, state: StepState, seconds: float, message: str) -> None:
        """A step is done, was found in the store, was stopped, or failed; ``message`` says why."""


class StepLines:
    """Lines for people on a running step: what it says, and its progress once in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._metrics = ""
        self._shown_at: dict[str, float] = {}

    def log_of(self, event: Event) -> Log | None:
        """The line for an event, if it has one."""
        match event:
            case Log():
                return event
            case Metric(values=values):
                shown = []
                for name in _SHOWN_METRICS:
                    if name in values:
                        shown.append(f"{name} {values[name]:.3g}")
                self._metrics = " ".join(shown)
            case Progress(unit=unit) if event.done or event.note:
                now = time.monotonic()
                # By unit, so that the next phase of a stage has a line at once.
                if now - self._shown_at.get(unit, -math.inf) >= self._seconds:
                    self._shown_at[unit] = now
                    return self._progress(event)
        return None

    def _progress(self, event: Progress) -> Log:
        done = event.done
        total = event.total
        share = 100 * done / max(total, 1)
        more = self._metrics or event.note
        text = f"{done}/{total} {event.unit} ({share:.0f} %) {more}"
        return Log(message=text.rstrip())


@dataclass(frozen=True)
class Session:
    """Observers of the runs that a command or a flow starts, and the event that stops them all.

    A signal interrupts the main thread alone, and there its exception may end in a destructor or a
    callback, which only print it.
    """

    observers: Sequence[Observer] = ()
    stop: threading.Event = field(default_factory=threading.Event)


class StepReporter:
    """Tells observers and the run's record how a step goes."""

    def __init__(
        self, record: RunRecord, step: Step, request: Request, observers: Sequence[Observer]
    ) -> None:
        self._record = record
        self._step = step
        self._request = request
        self._started = time.time()
        self._observers = observers
        self._waits = False

    def looked_up(self) -> None:
        """The artifact is about to be looked for: `geb gc` leaves alone what a record names."""
        recorded = self._record.step(self._step.name)
        if recorded is None or recorded.key != self._request.key:
            self._save("waiting")

    def started(self) -> None:
        """The stage starts, or starts again."""
        # Waiting for a slot is not the stage's time.
        self._started = time.time()
        self._save("running")
        for observer in self._observers:
            observer.step_started(self._request)

    def preempted(self, message: str) -> None:
        """The stage lost its machine and waits for another one."""
        self.event(Log(level="warning", message=f"preempted: {message}"))
        self._save("preempted", message)

    def event(self, event: Event) -> None:
        """The stage reports something."""
        if isinstance(event, PlaceNotice):
            self._waits = event.waits
            # The stage goes on if its record cannot be written now.
            with contextlib.suppress(GebError, OSError):
                self._save("waiting" if event.waits else "running", event.message)
        elif self._waits:
            self._waits = False
            self._save("running")
        for observer in self._observers:
            observer.stage_event(self._request, event)

    def ended(self, state: StepState, message: str = "") -> None:
        """The step has ended; the message says why if that is needed."""
        # Observers before the record: a full disk must not swallow the message.
        for observer in self._observers:
            observer.step_ended(self._request, state, time.time() - self._started, message)
        self._save(state, message)

    def _save(self, state: StepState, message: str = "") -> None:
        self._record.save_step(
            StepRecord(
                step=self._step.name,
                stage=self._step.stage,
                key=self._request.key,
                key_fields=key_fields(self._step.params, self._step.seed, self._request.inputs),
                state=state,
                started=self._started,
                ended=None if state in AT_WORK else time.time(),
                message=message,
            )
        )
