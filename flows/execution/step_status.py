"""State of a step, as the observers of a run and its record are told."""

from __future__ import annotations

import time

from flows.execution.observer import current_observers
from flows.execution.run_record import RunRecord, State, StepRecord
from flows.pipeline.step import Step
from stages.contract.events import Event
from stages.contract.request import Request, key_fields


class StepStatus:
    """Tells the observers of the present block and the run's record how a step goes.

    Args:
        record: The run's record.
        step: The step.
        request: Its request.
    """

    def __init__(self, record: RunRecord, step: Step, request: Request) -> None:
        self._record = record
        self._step = step
        self._request = request
        self._started = time.time()
        self._observers = current_observers()
        self._is_done = False

    def started(self) -> None:
        """The stage starts, or starts again."""
        # Waiting for a slot is not the stage's time.
        self._started = time.time()
        self._save("running")
        for observer in self._observers:
            observer.step_started(self._request)

    def preempted(self, message: str) -> None:
        """The stage lost its machine and waits for another one."""
        for observer in self._observers:
            observer.step_preempted(self._request, message)
        self._save("preempted", message)

    def event(self, event: Event) -> None:
        """The stage reports something."""
        for observer in self._observers:
            observer.stage_event(self._request, event)

    def ended(self, state: State, message: str = "") -> None:
        """The step has ended; the message says why if that is needed.

        Once a step is done, nothing that its program does afterwards changes that.
        """
        if self._is_done:
            return
        self._is_done = state == "done"
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
                ended=None if state in ("running", "preempted") else time.time(),
                message=message,
            )
        )
