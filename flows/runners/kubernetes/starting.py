"""Wait of a pod for its place, its image and its volumes: told, and given up in time."""

from __future__ import annotations

import time
from collections.abc import Callable

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.base import OnEvent
from flows.runners.kubernetes.diagnosis import Event, Obstacle, obstacle_of
from flows.runners.kubernetes.labels import Pod, name_of
from stages.contract.errors import StageFailedError, UserError
from stages.contract.events import Log
from stages.contract.request import Request

# A registry that is away, and a secret that is just being made, come back within so long.
_BRIEFLY_SECONDS = 60.0
# Volumes and networks that cannot be had show in a pod's events alone.
_EVENTS_SECONDS = 10.0


class Starting:
    """Start of one pod.

    Args:
        request: What it computes.
        settings: The kubernetes runner's settings.
        events: Asks for a pod's events.
        on_event: Called with what the pod waits for, whenever that changes.
    """

    def __init__(
        self,
        request: Request,
        settings: KubernetesSettings,
        events: Callable[[str], list[Event]],
        on_event: OnEvent,
    ) -> None:
        self._request = request
        self._settings = settings
        self._events = events
        self._on_event = on_event
        self._since = self._events_at = time.monotonic()
        self._told = ""

    def check(self, pod: Pod) -> None:
        """Looks at a pod that has not started.

        Raises:
            UserError: It cannot start, for a reason that a person has to change.
            StageFailedError: It does not start in time.
        """
        now = time.monotonic()
        obstacle = obstacle_of(pod, self._request.stage)
        if obstacle is None and now - self._events_at > _EVENTS_SECONDS:
            self._events_at = now
            obstacle = obstacle_of(pod, self._request.stage, self._events(name_of(pod)))
        if obstacle is None:
            self._give_up_if_late(now)
            return
        if obstacle.message != self._told:
            self._told = obstacle.message
            self._on_event(Log(level="warning", message=f"waiting: {obstacle.message}"))
        self._give_up_if_hopeless(obstacle, now)

    def _give_up_if_hopeless(self, obstacle: Obstacle, now: float) -> None:
        message = f"{self._request.place}: {obstacle.message}"
        waited, limit = now - self._since, self._settings.pending_seconds
        match obstacle.wait:
            case "always":
                self._since = now
            case "never":
                raise UserError(message, obstacle.remedy)
            case "briefly" if waited > min(_BRIEFLY_SECONDS, limit):
                raise StageFailedError(f"{message}; {obstacle.remedy}")
            case "a_while" if waited > limit:
                raise UserError(
                    f"{message} (for {limit:g} s, execution.kubernetes.pending_seconds)",
                    obstacle.remedy,
                )

    def _give_up_if_late(self, now: float) -> None:
        limit = self._settings.pending_seconds
        if now - self._since > limit:
            raise StageFailedError(
                f"{self._request.place}: the pod has not started for "
                f"{limit:g} s (execution.kubernetes.pending_seconds); `kubectl describe pod` "
                "may say why"
            )
