"""Observers of runs, set for a block of code: each hears of every step that is run in the block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from flows.execution.run_record import State
from stages.contract.events import Event
from stages.contract.request import Request


class Observer:
    """Base class of observers: a subclass overrides the calls that it wants.

    Calls come from several threads. The request names run, step and stage.
    """

    def run_warning(self, run: str, message: str) -> None:
        """A run goes on without something that a person asked for."""

    def step_started(self, request: Request) -> None:
        """A stage is started."""

    def stage_event(self, request: Request, event: Event) -> None:
        """A running stage reports something."""

    def step_preempted(self, request: Request, message: str) -> None:
        """A running stage lost its machine; it starts again, and `step_started` tells when."""

    def step_ended(self, request: Request, state: State, seconds: float, message: str) -> None:
        """A step is done, was found in the store, was stopped, or failed; ``message`` says why."""


Observing = TypeVar("Observing", bound=Observer)

_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())


@contextmanager
def observing(observer: Observing) -> Iterator[Observing]:
    """Adds an observer for the block, and for threads that start with a copy of its context.

    Prefect's task threads do; other threads need ``contextvars.copy_context().run``.
    """
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield observer
    finally:
        _OBSERVERS.reset(token)


def current_observers() -> tuple[Observer, ...]:
    """The observers of the present block, the outermost first."""
    return _OBSERVERS.get()
