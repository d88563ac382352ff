"""Steps to compute again although the store has them, set for a block of code by ``--from``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from flows.pipeline.step import Step

StepFilter = Callable[[Step], bool]


def no_step(step: Step) -> bool:
    """Selects no step."""
    return False


_FORCED: ContextVar[StepFilter] = ContextVar("forced steps", default=no_step)


@contextmanager
def recomputing(forced: StepFilter) -> Iterator[None]:
    """Runs of the block compute the steps that ``forced`` selects, whatever the store has."""
    token = _FORCED.set(forced)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced_steps() -> StepFilter:
    """The filter of the present block."""
    return _FORCED.get()
