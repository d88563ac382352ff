"""One attempt at a stage in its pods: their start, their output and their ends.

The first pod runs the stage's program, whose artifact and exit code count. Its end, and the failure
of another one, is the end of all: the others are asked to end, and get their grace period.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kubernetes.client.exceptions import ApiException

from flows.pipeline.kubernetes import KubernetesSettings
from flows.runners.base import OnEvent
from flows.runners.kubernetes.client import UNREACHABLE, Cluster
from flows.runners.kubernetes.diagnosis import (
    Event,
    Obstacle,
    ending_of,
    has_started,
    is_asked_to_end,
    is_lost,
    obstacle_of,
    why_taken,
)
from flows.runners.kubernetes.labels import Pod, name_of
from flows.runners.kubernetes.manifest import SUPERVISOR_SECONDS
from flows.runners.kubernetes.watch import LogReader, PodChange, PodWatch
from flows.runners.outcome import Ending
from flows.runners.place import PlaceAwayError
from stages.contract.errors import EXIT_OK, EXIT_STOPPED, StageFailedError, UserError
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


_TICK_SECONDS = 1.0
# Without an answer for so long the attempt is given up; the next one takes its pods over.
_API_SECONDS = 300.0
# After the end of a pod's grace period: the time for its node to say so.
_REPORT_SECONDS = 20.0
# A killed pod is heard of from its node, later than those that lost their connection to it.
_CAUSE_SECONDS = 5.0
# An API server that is busy as a pod is to be removed is asked again.
_REMOVE_SECONDS = 10.0
_AWAY = (ApiException, *UNREACHABLE)


class _Node:
    """One pod, and how it ended."""

    def __init__(self, name: str, starting: Starting) -> None:
        self.name = name
        self.starting = starting
        self.pod: dict[str, Any] | None = None
        self.ending: Ending | None = None
        self.reader: LogReader | None = None
        self.is_ended_by_us = False


class PodAttempt:
    """The pods of one attempt.

    Args:
        cluster: The cluster.
        request: What they compute.
        settings: The kubernetes runner's settings.
        grace_seconds: Time between SIGTERM and SIGKILL.
        pods: The pods, as the API server made or found them; the stage's program is in the first.
        on_event: Called with what keeps them from starting.
        on_start: Called with a pod whose container has started.
    """

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        settings: KubernetesSettings,
        grace_seconds: float,
        pods: Sequence[Pod],
        on_event: OnEvent,
        on_start: Callable[[Pod], None] = lambda pod: None,
    ) -> None:
        self._cluster = cluster
        self._on_start = on_start
        self._where = request.place
        self._nodes = {
            name_of(pod): _Node(
                name_of(pod), Starting(request, settings, self._events_of, on_event)
            )
            for pod in pods
        }
        self.num_nodes = len(self._nodes)
        self._numbers = {name: number for number, name in enumerate(self._nodes)}
        self._queue: queue.SimpleQueue[PodChange | tuple[int, str]] = queue.SimpleQueue()
        # A node may be slow to say that a pod has ended, or never do so.
        self._seconds_to_end = grace_seconds + SUPERVISOR_SECONDS + _REPORT_SECONDS
        self._grace_seconds = grace_seconds
        self._asked_at: float | None = None
        self._cause_by: float | None = None

    @property
    def title(self) -> str:
        """Names of the pods."""
        return f"pods {', '.join(self._nodes)}"

    def follow(
        self,
        watch: PodWatch,
        on_line: Callable[[int, str], None],
        check: Callable[[], None],
        stopping: threading.Event,
    ) -> list[Ending]:
        """Passes on what the pods print until all have ended.

        Args:
            watch: Tells of their changes.
            on_line: Called with a pod's number and a line of its log.
            check: Raises where the attempt is another orchestrator's by now.
            stopping: Set when they shall end.

        Returns:
            How each pod ended, the first pod first.

        Raises:
            UserError: A pod cannot start, for a reason that a person has to change.
            StageFailedError: A pod did not start in time.
            PlaceAwayError: The API server does not answer.
        """
        try:
            with watch.watched(list(self._nodes), self._queue):
                while any(node.ending is None for node in self._nodes.values()):
                    self._handle_what_came(on_line)
                    check()
                    self._check_api(watch)
                    if stopping.is_set() or self._is_decided():
                        self._end_all()
                    else:
                        self._check_starts()
        finally:
            self._finish_logs(on_line)
        return [node.ending for node in self._nodes.values() if node.ending is not None]

    def _is_decided(self) -> bool:
        """True once the first pod has ended, or another one failed, and the cause had its time."""
        endings = [node.ending for node in self._nodes.values()]
        failed = [each for each in endings if each is not None and each.code != EXIT_OK]
        if not failed:
            # The first pod still saves what others have helped to train.
            return endings[0] is not None
        now = time.monotonic()
        if self._cause_by is None:
            self._cause_by = now + _CAUSE_SECONDS
        return now > self._cause_by or any(each.is_cause for each in failed)

    def remove(self) -> None:
        """Removes the pods, running or not; without an API server the reaper finds them."""
        for node in self._nodes.values():
            lost = node.pod is not None and is_lost(node.pod)
            deadline = time.monotonic() + _REMOVE_SECONDS
            while not self._is_removed(node.name, 0 if lost else None):
                if time.monotonic() > deadline:
                    break
                time.sleep(_TICK_SECONDS)

    def _is_removed(self, name: str, grace_seconds: int | None) -> bool:
        try:
            self._cluster.delete_pod(name, grace_seconds=grace_seconds)
        except _AWAY:
            return False
        return True

    def _handle_what_came(self, on_line: Callable[[int, str], None]) -> None:
        """Handles all that is in the queue, and waits where it is empty."""
        wait: float | None = _TICK_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get(timeout=wait) if wait else self._queue.get_nowait()
                wait = None
                if isinstance(item, PodChange):
                    self._change(self._nodes[item.name], item.pod)
                else:
                    on_line(*item)

    def _change(self, node: _Node, pod: dict[str, Any] | None) -> None:
        if node.ending is not None:
            return
        if pod is None:
            node.ending = self._ending_without_word(node)
            return
        node.pod = pod
        if node.reader is None and has_started(pod):
            self._on_start(pod)
            number = self._numbers[node.name]
            node.reader = LogReader(
                self._cluster, node.name, lambda line: self._queue.put((number, line))
            )
        node.ending = ending_of(pod)
        deleted = is_asked_to_end(pod)
        if node.ending is None and deleted and is_lost(pod):
            # Its node cannot confirm anything. Should it still work there, the lease in the store
            # keeps the next attempt waiting.
            node.ending = self._ending_without_word(node)
        elif node.ending is not None and deleted and not node.is_ended_by_us:
            node.ending = node.ending.or_taken(lambda: why_taken(pod, self._events_of(node.name)))
        elif node.ending is not None and node.ending.is_killed and self._is_grace_over():
            node.ending = Ending("exited", EXIT_STOPPED)

    def _is_grace_over(self) -> bool:
        return (
            self._asked_at is not None and self._asked_at + self._grace_seconds < time.monotonic()
        )

    def _ending_without_word(self, node: _Node) -> Ending:
        if node.is_ended_by_us:
            return Ending("exited", EXIT_STOPPED)
        return Ending("taken", None, why_taken(node.pod, self._events_of(node.name)))

    def _end_all(self) -> None:
        """Asks those that have not ended to end, and waits for that no longer than it may take."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        for node in self._nodes.values():
            if node.ending is not None:
                continue
            if now > self._asked_at + self._seconds_to_end:
                node.ending = Ending("taken", None, "its node does not answer")
            elif not (node.is_ended_by_us or (node.pod and is_asked_to_end(node.pod))):
                with contextlib.suppress(*_AWAY):
                    self._cluster.delete_pod(node.name)
                    node.is_ended_by_us = True

    def _check_starts(self) -> None:
        for node in self._nodes.values():
            if node.pod is not None and not has_started(node.pod):
                node.starting.check(node.pod)

    def _check_api(self, watch: PodWatch) -> None:
        silent = watch.silent_seconds()
        if silent > _API_SECONDS:
            raise PlaceAwayError(
                f"{self._where}: the API server {self._cluster.server} has not answered for "
                f"{silent:.0f} s; the next attempt takes over what still runs"
            )

    def _events_of(self, name: str) -> list[Event]:
        try:
            return self._cluster.events(name)
        except _AWAY:
            return []

    def _finish_logs(self, on_line: Callable[[int, str], None]) -> None:
        for node in self._nodes.values():
            if node.reader is not None:
                ended = node.ending is not None and node.ending.kind != "taken"
                node.reader.finish(node_answers=ended)
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if not isinstance(item, PodChange):
                    on_line(*item)
