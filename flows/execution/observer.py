"""Observers of runs, and the session of a command or flow that has them."""

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from flows.execution.run_record import AT_WORK, RunRecord, State, StepRecord
from flows.pipeline.step import Step
from flows.runners.place import PlaceNotice
from stages.contract.errors import GebError
from stages.contract.events import Event, Log
from stages.contract.request import Request, key_fields


class Observer:
    """Base class of observers: a subclass overrides the calls that it wants.

    Calls come from several threads. The request names run, step and stage.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The block that it observes is over."""

    def run_log(self, run: str, log: Log) -> None:
        """A line about a run, or about a sweep, as a whole."""

    def step_started(self, request: Request) -> None:
        """A stage is started."""

    def stage_event(self, request: Request, event: Event) -> None:
        """A running stage reports something, or lost its machine and will start again."""

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """A step is done, was found in the store, was stopped, or failed; ``message`` says why."""


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

    def wanted(self) -> None:
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

    def ended(self, state: State, message: str = "") -> None:
        """The step has ended; the message says why if that is needed."""
        # Observers before the record: a full disk must not swallow the message.
        for observer in self._observers:
            observer.step_ended(self._request, state, time.time() - self._started, message)
        self._save(state, message)

    def _save(self, state: State, message: str = "") -> None:
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
