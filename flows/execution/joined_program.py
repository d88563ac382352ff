"""Programs that compute several steps in turn: samplings of one policy start one engine.

A policy is sampled for its evaluation and for the next iteration's training. On one machine these
steps would load the same weights one after the other; here the program of the first goes on with
the others, and each step ends when its own artifact is there.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from queue import SimpleQueue

from flows.runners.attempt_log import AttemptLog, new_log
from flows.runners.base import FailureTail, OnEvent, Runner
from stages.contract.errors import PreemptedError, StageFailedError, UserError
from stages.contract.events import Done, Event, Log
from stages.contract.request import Request


class Turn:
    """One step's part of a joined program: from the program's thread to the step's.

    Args:
        request: The step's request.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._is_made = False

    def pass_on(self, event: Event) -> None:
        """Passes an event to the step's thread."""
        self._events.put(event)

    def end(self, *, made: bool, error: BaseException | None = None) -> None:
        """Ends the turn.

        Args:
            made: True if the artifact was made.
            error: Error for the step to raise; without one the step is to be computed on its own.
        """
        self._is_made, self._error = made, error
        self._events.put(None)

    def events(self) -> Iterator[Event]:
        """Yields the events of the step as they come, until the turn ends."""
        return iter(self._events.get, None)

    def result(self) -> bool:
        """Result of a turn that has ended: True if the step's artifact was made.

        Raises:
            GebError: The error with which the program ended.
        """
        if self._error is not None:
            raise self._error
        return self._is_made


def follow_partner(turn: Turn, on_start: Callable[[], None], on_event: OnEvent) -> bool:
    """Follows the turn of a step that another one's program computes, with a log of its own.

    Args:
        turn: The turn.
        on_start: Called when the program comes to the step.
        on_event: Called with every event of the step.

    Returns:
        True if the artifact was made; False if the step is to be computed on its own.
    """
    events = turn.events()
    first = next(events, None)
    if first is None:
        return turn.result()
    on_start()
    log = new_log(turn.request)
    with log.open("w", encoding="utf-8") as file:
        lines = AttemptLog(file, FailureTail())
        for event in chain([first], events):
            if isinstance(event, Log):
                lines.write(f"[{event.level}] {event.message}\n")
            on_event(event)
    lines.warn_if_incomplete(log, on_event)
    return turn.result()


class JoinedProgram:
    """A program that computes several requests in turn, run by a thread of its own.

    Args:
        runner: Starts it.
        request: Request of the first step.
        partners: Turns of the others, in their order.
        on_release: Called with each step that is to be computed on its own after all.
    """

    def __init__(
        self,
        runner: Runner,
        request: Request,
        partners: Sequence[Turn],
        on_release: Callable[[Turn], None],
    ) -> None:
        self._runner = runner
        self._first = Turn(request)
        self._left = [self._first, *partners]
        self._on_release = on_release
        self._is_started = False

    @property
    def is_needed(self) -> bool:
        """True before its start, where there are steps to be computed along with the first."""
        return not self._is_started and len(self._left) > 1

    @property
    def is_started(self) -> bool:
        """True once it was started."""
        return self._is_started

    def run_first(self, slot: AbstractContextManager[object], on_event: OnEvent) -> None:
        """Starts the program; returns when the first step's artifact is there.

        Args:
            slot: Place among the stages at work, which the program holds until its end.
            on_event: Called in this thread with every event of the first step.

        Raises:
            GebError: As the runner raised it.
        """
        self._is_started = True
        # With the context of the present block, out of which the runner reads the flow run.
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._run, slot), daemon=True).start()
        for event in self._first.events():
            on_event(event)
        self._first.result()

    def release_if_not_started(self) -> None:
        """Releases the other steps if there was no start."""
        if not self._is_started:
            self._release(self._left[1:])

    def _run(self, slot: AbstractContextManager[object]) -> None:
        error: BaseException | None = None
        with slot:
            try:
                self._runner.run(_joined(self._first.request, self._left[1:]), self._handle)
            except BaseException as caught:
                # Of the step whose turn it is: its own thread raises it.
                error = caught
        present, *others = self._left
        if error is None or present is self._first:
            present.end(made=error is None, error=error)
        else:
            # Its retry is computed on its own, and at once where only the machine was lost.
            self._on_release(present)
            lost = isinstance(error, PreemptedError)
            place = f"{present.request.place}, after {self._first.request.place} in one program"
            present.end(made=False, error=None if lost else _at(error, place))
        self._release(others)

    def _release(self, turns: Iterable[Turn]) -> None:
        for each in turns:
            self._on_release(each)
            each.end(made=False)

    def _handle(self, event: Event) -> None:
        present = self._left[0]
        present.pass_on(event)
        # The last ends with the program.
        if isinstance(event, Done) and event.key == present.request.key and len(self._left) > 1:
            self._left.pop(0)
            present.end(made=True)
            place = present.request.place
            self._left[0].pass_on(Log(message=f"goes on with the engine that {place} has loaded"))


def _at(error: BaseException, place: str) -> BaseException:
    """The error of a program, which names its first step, with the place of the one it is of."""
    if isinstance(error, UserError):
        return error.at(place)
    if isinstance(error, StageFailedError):
        return type(error)(f"{place}: {error}", error.last_lines)
    return error


def _joined(request: Request, others: Iterable[Turn]) -> Request:
    """The first request of a program, with those that it computes afterwards."""
    then = tuple(each.request for each in others)
    resources = request.resources
    if resources.timeout_seconds is not None:
        seconds = resources.timeout_seconds * (1 + len(then))
        resources = resources.model_copy(update={"timeout_seconds": seconds})
    return request.model_copy(update={"then": then, "resources": resources})
