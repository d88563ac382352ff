"""Choice of the steps that one program computes in turn, with one start of its engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from flows.execution.joined_program import Turn
from flows.pipeline.placement import ON_THIS_MACHINE, Execution
from flows.pipeline.step import Step
from stages.contract.request import Request, Resources
from stages.contract.store import Artifact

BuildRequest = Callable[[Step, Mapping[str, Artifact]], Request]


def shares_engines(execution: Execution, store: str) -> bool:
    """True where steps with equal engines are computed by one program.

    On a cluster other machines are free, and a bucket's inputs come down step by step.
    """
    on_this_machine = execution.runner in ON_THIS_MACHINE
    return execution.share_engines and on_this_machine and "://" not in store


class JoinedSteps:
    """Steps of a run that another step's program may compute. Safe to use from several threads.

    Args:
        build: Request of a step, from the artifacts of the steps that it reads from.
        is_free: Test of a step and its request: still to be computed, and nobody is at it.
    """

    def __init__(self, build: BuildRequest, is_free: Callable[[Step, Request], bool]) -> None:
        self._build = build
        self._is_free = is_free
        self._waiting: dict[str, Step] = {}
        self._taken: dict[str, tuple[Step, Turn]] = {}
        self._made: dict[str, Artifact] = {}
        self._lock = threading.Lock()

    def expect(self, step: Step) -> None:
        """Takes note of a step that will be executed."""
        if step.params.engine() is not None:
            with self._lock:
                self._waiting[step.name] = step

    def note_made(self, artifacts: Mapping[str, Artifact]) -> None:
        """Takes note of artifacts, by the names of their steps."""
        with self._lock:
            self._made.update(artifacts)

    def turn_of(self, step: Step) -> Turn | None:
        """The turn of a step that another one's program has taken."""
        with self._lock:
            return self._taken[step.name][1] if step.name in self._taken else None

    def take_partners(self, step: Step, request: Request) -> list[Turn] | None:
        """Takes the steps that the program of a step about to start shall compute after it.

        Returns:
            Their turns; None where another program has taken the step itself.
        """
        with self._lock:
            if step.name in self._taken:
                return None
            engine = engine_of(step, request.inputs, request.resources)
            if engine is None:
                return []
            self._waiting.pop(step.name, None)
            found = [(each, self._request_with(engine, each)) for each in self._waiting.values()]
            # Only now: an error of the store leaves all steps as they are.
            partners = []
            for other, wanted in found:
                if wanted is not None:
                    turn = Turn(wanted)
                    self._taken[other.name] = other, turn
                    del self._waiting[other.name]
                    partners.append(turn)
            return partners

    def give_back(self, turn: Turn) -> None:
        """Gives a step back that is to be computed on its own after all."""
        with self._lock:
            name = turn.request.step
            step, _ = self._taken.pop(name)
            self._waiting[name] = step

    def _request_with(self, engine: Any, step: Step) -> Request | None:
        """Request of a step that could be computed now with an engine; None of any other."""
        if any(name not in self._made for name in step.upstream()):
            return None
        request = self._build(step, self._made)
        own = engine_of(step, request.inputs, request.resources)
        return request if own == engine and self._is_free(step, request) else None


def engine_of(step: Step, inputs: Mapping[str, Any], resources: Resources) -> Any:
    """All that the engine of a step depends on, to be compared; None where none can be shared.

    Args:
        step: The step.
        inputs: Its inputs by name, as sources or as artifacts.
        resources: Those of its stage.
    """
    settings = step.params.engine()
    if settings is None:
        return None
    loaded = {name: inputs.get(name) for name in step.params.engine_inputs}
    return step.stage, settings, loaded, resources
