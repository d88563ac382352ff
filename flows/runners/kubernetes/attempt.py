"""One attempt at a stage in its pods: their start, their output and their ends.

The first pod runs the stage's program, whose artifact and exit code count. Its end, and the failure
of another one, is the end of all: the others are asked to end, and get their grace period.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from kubernetes.client.exceptions import ApiException

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog
from flows.runners.base import SUPERVISOR_SECONDS, Ending, OnEvent, PlaceNotice
from flows.runners.kubernetes.client import UNREACHABLE, Cluster, LogReader
from flows.runners.kubernetes.diagnosis import (
    Event,
    ending_of,
    has_started,
    is_asked_to_end,
    is_gated,
    is_lost,
    why_pending,
    why_taken,
)
from flows.runners.kubernetes.identity import Pod
from flows.runners.place import PlaceAwayError, Poller
from stages.contract.errors import EXIT_OK, EXIT_STOPPED, UserError
from stages.contract.request import Request

# Volumes and networks that cannot be had show in a pod's events alone.
_EVENTS_SECONDS = 10.0
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

    def __init__(self, name: str) -> None:
        self.name = name
        self.pod: Pod | None = None
        self.ending: Ending | None = None
        self.reader: LogReader | None = None
        self.is_ended_by_us = False
        self.waits_since = time.monotonic()
        self.looked_at = -math.inf
        self.reason = ""


class PodAttempt:
    """The pods of one attempt."""

    def __init__(
        self,
        cluster: Cluster,
        request: Request,
        execution: Execution,
        name: str,
        on_event: OnEvent,
    ) -> None:
        self._cluster = cluster
        self._request = request
        self._pending_seconds = execution.kubernetes.pending_seconds
        self._on_event = on_event
        self.num_nodes = request.resources.nodes
        self._nodes = [_Node(f"{name}-{number}") for number in range(self.num_nodes)]
        self._lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
        # A node may be slow to say that a pod has ended, or never do so.
        self._seconds_to_end = execution.grace_seconds + SUPERVISOR_SECONDS + _REPORT_SECONDS
        self._grace_seconds = execution.grace_seconds
        self._began = time.monotonic()
        self._asked_at: float | None = None
        self._cause_by: float | None = None

    @property
    def title(self) -> str:
        """Names of the pods."""
        return f"pods {', '.join(node.name for node in self._nodes)}"

    def follow(
        self,
        poller: Poller[Pod],
        logs: Sequence[AttemptLog],
        check: Callable[[], None],
        stopping: threading.Event,
    ) -> list[Ending]:
        """Passes on what the pods print until all have ended; returns how, the first pod first.

        Events of the first pod alone are told. ``check`` raises if the attempt is another
        orchestrator's by now.

        Raises:
            UserError: A pod did not start in time.
            PlaceAwayError: The API server does not answer.
        """
        try:
            while any(node.ending is None for node in self._nodes):
                self._pass_on(logs, _TICK_SECONDS)
                check()
                self._look(poller)
                if stopping.is_set() or self._is_decided():
                    self._end_all()
                    continue
                for node in self._nodes:
                    if node.ending is None:
                        self._check_start(node)
        finally:
            for node in self._nodes:
                if node.reader is not None:
                    ended = node.ending is not None and node.ending.kind != "taken"
                    node.reader.finish(node_answers=ended)
            self._pass_on(logs)
        return [node.ending for node in self._nodes if node.ending is not None]

    def remove(self) -> None:
        """Removes the pods, running or not; without an API server the reaper finds them."""
        for node in self._nodes:
            grace = 0 if node.pod is not None and is_lost(node.pod) else None
            _insist(partial(self._cluster.delete_pod, node.name, grace_seconds=grace))

    def _pass_on(self, logs: Sequence[AttemptLog], wait: float = 0) -> None:
        """Passes on all lines that have come, and waits for a first one."""
        with contextlib.suppress(queue.Empty):
            while True:
                node, line = self._lines.get(block=bool(wait), timeout=wait or None)
                logs[node].handle_line(line, (lambda event: None) if node else self._on_event)
                wait = 0

    def _look(self, poller: Poller[Pod]) -> None:
        seen_at, pods = poller.look()
        silent = time.monotonic() - max(seen_at, self._began)
        if silent > _API_SECONDS:
            raise PlaceAwayError(
                f"{self._request.place}: the API server {self._cluster.server} has not answered "
                f"for {silent:.0f} s; the next attempt takes over what still runs"
            )
        # Pods may be younger than the list.
        if seen_at > self._began:
            for number, node in enumerate(self._nodes):
                if node.ending is None:
                    self._see(number, node, pods.get(node.name))

    def _see(self, number: int, node: _Node, pod: Pod | None) -> None:
        if pod is None:
            stopped = Ending("exited", EXIT_STOPPED)
            node.ending = stopped if node.is_ended_by_us else self._taken(node)
            return
        node.pod = pod
        if node.reader is None and has_started(pod):
            where = pod["spec"].get("nodeName", "a node")
            self._on_event(PlaceNotice(message=f"pod {node.name} runs on {where}"))
            node.reader = LogReader(
                self._cluster, node.name, lambda line: self._lines.put((number, line))
            )
        ending = ending_of(pod)
        if is_asked_to_end(pod):
            if ending is None and is_lost(pod):
                # Its node cannot confirm anything. Should it still work there, the lease in the
                # store keeps the next attempt waiting.
                ending = self._taken(node)
            elif ending is not None and not node.is_ended_by_us:
                ending = ending.or_taken(lambda: self._why_taken(node))
        killed_at = math.inf if self._asked_at is None else self._asked_at + self._grace_seconds
        if ending is not None and ending.is_killed and killed_at < time.monotonic():
            ending = Ending("exited", EXIT_STOPPED)
        node.ending = ending

    def _taken(self, node: _Node) -> Ending:
        return Ending("taken", None, self._why_taken(node))

    def _why_taken(self, node: _Node) -> str:
        return why_taken(node.pod, self._events_of(node.name))

    def _is_decided(self) -> bool:
        """True once the first pod has ended, or another one failed, and the cause had its time."""
        endings = [node.ending for node in self._nodes]
        failed = [each for each in endings if each is not None and each.code != EXIT_OK]
        if not failed:
            # The first pod still saves what others have helped to train.
            return endings[0] is not None
        now = time.monotonic()
        if self._cause_by is None:
            self._cause_by = now + _CAUSE_SECONDS
        return now > self._cause_by or any(each.is_cause for each in failed)

    def _end_all(self) -> None:
        """Asks active pods to end; a pod that does not in time has lost its node."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        for node in self._nodes:
            if node.ending is not None:
                continue
            if now > self._asked_at + self._seconds_to_end:
                node.ending = Ending("taken", None, "its node does not answer")
            elif not (node.is_ended_by_us or (node.pod and is_asked_to_end(node.pod))):
                with contextlib.suppress(*_AWAY):
                    # The others that have ended keep their logs.
                    self._cluster.delete_pod(node.name)
                    node.is_ended_by_us = True

    def _check_start(self, node: _Node) -> None:
        pod = node.pod
        # A pod of which nothing has been seen yet has time.
        if pod is None or has_started(pod):
            return
        now = time.monotonic()
        if is_gated(pod):
            node.waits_since = now
        if now - node.looked_at > _EVENTS_SECONDS:
            node.looked_at = now
            reason = why_pending(pod, self._events_of(node.name))
            if reason and reason != node.reason:
                self._on_event(PlaceNotice(level="warning", message=f"waiting: {reason}"))
            node.reason = reason
        if now - node.waits_since > self._pending_seconds:
            reason = node.reason or "the pod does not start"
            raise UserError(
                f"{self._request.place}: {reason} (for {self._pending_seconds:g} s, "
                "execution.kubernetes.pending_seconds)",
                f"correct execution.kubernetes, lower resources.{self._request.stage}, or raise "
                "pending_seconds where the cluster is only busy; `kubectl describe pod` shows more",
            )

    def _events_of(self, name: str) -> list[Event]:
        try:
            return self._cluster.events(name)
        except _AWAY:
            return []


def _insist(remove: Callable[[], None]) -> None:
    """Removes something, again and again from an API server that is busy."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(*_AWAY):
            remove()
            break
        time.sleep(_TICK_SECONDS)
