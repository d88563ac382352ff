"""Steps with equal engines: one program computes them in turn, with one start of the engine.

A policy is sampled for its evaluation and for the next iteration's training. On one machine these
steps would load the same weights one after the other, so they are grouped when the steps of a run
are laid out. The first of a group that the store lacks computes the others along with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.execution.step_status import StepStatus
from flows.pipeline.placement import ON_THIS_MACHINE, Execution
from flows.pipeline.step import Step
from flows.runners.attempt_log import AttemptLog, new_log
from flows.runners.base import FailureTail
from stages.contract.errors import PreemptedError, StoppedError
from stages.contract.events import Done, Event, Log
from stages.contract.request import Request, Resources


def shares_engines(execution: Execution, store: str) -> bool:
    """True if steps with equal engines are computed by one program.

    On a cluster other machines are free, and a bucket's inputs come down step by step.
    """
    on_this_machine = execution.runner in ON_THIS_MACHINE
    return execution.share_engines and on_this_machine and "://" not in store


def later_with_engine(
    steps: Sequence[Step], resources: Callable[[str], Resources]
) -> dict[str, list[Step]]:
    """Groups steps that can share one start of an engine.

    A step joins an earlier one with an equal engine if all that it reads comes before that one.

    Args:
        steps: Steps in the order in which they could be computed.
        resources: Resources of a stage, by its name.

    Returns:
        For each step of a group, by name, the steps of the group after it.
    """
    places = {step.name: place for place, step in enumerate(steps)}
    groups: list[tuple[Any, list[Step]]] = []
    for step in steps:
        engine = _engine_of(step, resources(step.stage))
        if engine is None:
            continue
        ready = max((places[name] for name in step.upstream() if name in places), default=-1)
        for shared, members in groups:
            if shared == engine and ready < places[members[0].name]:
                members.append(step)
                break
        else:
            groups.append((engine, [step]))
    return {
        step.name: members[number:]
        for _, members in groups
        for number, step in enumerate(members, 1)
    }


def _engine_of(step: Step, resources: Resources) -> Any:
    """All that the engine of a step depends on, to be compared; None if it cannot be shared."""
    settings = step.params.engine()
    if settings is None:
        return None
    loaded: Mapping[str, Any] = {name: step.inputs.get(name) for name in step.params.engine_inputs}
    return step.stage, settings, loaded, resources


class SharedProgram:
    """Requests that one program computes in turn; each step hears the events of its own turn.

    Args:
        turns: Request and status of each step, in order; the first has been told that it starts.
    """

    def __init__(self, turns: Sequence[tuple[Request, StepStatus]]) -> None:
        self._first = turns[0][0]
        self._left = deque(turns)
        self.request = _joined([request for request, _ in turns])
        """The first request, with the others to be computed after it."""

    @property
    def is_past_first(self) -> bool:
        """True once the first step's artifact is there."""
        return self._left[0][0] is not self._first

    def handle(self, event: Event) -> None:
        """Passes an event on to the step whose turn it is; `Done` begins the next turn."""
        request, status = self._left[0]
        if self.is_past_first and isinstance(event, Log):
            with self._log.open("a", encoding="utf-8") as file:
                AttemptLog(file, FailureTail()).write(f"[{event.level}] {event.message}\n")
        status.event(event)
        if isinstance(event, Done) and event.key == request.key:
            status.ended("done")
            if len(self._left) > 1:
                self._left.popleft()
                self._begin_turn(request.place)

    def fail(self, error: BaseException) -> None:
        """Tells a later step that the program has ended in its turn."""
        _, status = self._left[0]
        if isinstance(error, PreemptedError):
            status.preempted(str(error))
        else:
            stopped = isinstance(error, StoppedError | KeyboardInterrupt)
            status.ended("stopped" if stopped else "failed", str(error))

    def _begin_turn(self, previous: str) -> None:
        request, status = self._left[0]
        self._log = new_log(request)
        status.started()
        self.handle(Log(message=f"goes on with the engine that {previous} has loaded"))


def _joined(requests: Sequence[Request]) -> Request:
    """The first request with those after it, and with the time of all."""
    first, *then = requests
    resources = first.resources
    if resources.timeout_seconds is not None:
        seconds = resources.timeout_seconds * len(requests)
        resources = resources.model_copy(update={"timeout_seconds": seconds})
    return first.model_copy(update={"then": tuple(then), "resources": resources})
