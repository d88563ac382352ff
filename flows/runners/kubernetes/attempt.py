"""One attempt at a stage in its pods: their start, their output and their ends.

The first pod runs the stage's program, whose artifact and exit code count. Its end, and the failure
of another one, is the end of all: the others are asked to end, and get their grace period.
"""

import contextlib
import math
import time
from http.client import BAD_REQUEST, FORBIDDEN, NOT_FOUND

from kubernetes.client.exceptions import ApiException

from flows.pipeline.placement import Execution
from flows.runners.command_lines import SUPERVISOR_SECONDS
from flows.runners.ending import Ending, EndingKind, describe_exit, is_killed
from flows.runners.kubernetes.client import UNREACHABLE, Cluster
from flows.runners.kubernetes.diagnosis import (
    Pod,
    disruption_of,
    ending_of,
    has_started,
    is_asked_to_end,
    is_gated,
    is_lost,
)
from flows.runners.kubernetes.manifest import ATTEMPT
from flows.runners.place import PlaceAwayError, StageJob
from stages.contract.errors import EXIT_OK, EXIT_OVERDUE, EXIT_USER, UserError
from stages.contract.events import Failure, parse_event

# Volumes and networks that cannot be had show in a pod's events alone.
_EVENTS_SECONDS = 10.0
_TICK_SECONDS = 2.0
# Seconds of a log that are read again, whose lines are known by their times: clocks are coarse.
_OVERLAP_SECONDS = 5
# The age of a log that is read from its beginning.
_ALL_SECONDS = 1e9
# For the rest of a log, of a busy node or of one that is gone.
_REST_SECONDS = 30.0
# Without an answer for so long the attempt is given up; the next one takes its pods over.
_API_SECONDS = 300.0
# After the end of a pod's grace period: the time for its node to say so.
_REPORT_SECONDS = 20.0
# The node of a killed pod reports the kill after other pods have lost their connections.
_CAUSE_SECONDS = 5.0
_AWAY = (ApiException, *UNREACHABLE)
_LOST = Ending("preempted", None, "its node does not answer")


class _SeenPod:
    """One pod, as far as it was seen and read."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.pod: Pod | None = None
        self.asked_by_us = False
        self.failure: Failure | None = None
        self.read_at = -_ALL_SECONDS
        self.last_stamp = ""
        self.waits_since = time.monotonic()
        self.look_at = self.waits_since + _EVENTS_SECONDS


class PodAttempt:
    """The pods of one attempt."""

    def __init__(self, cluster: Cluster, job: StageJob, execution: Execution, name: str) -> None:
        self._cluster = cluster
        self._selector = f"{ATTEMPT}={name}"
        self._job = job
        self._pending_seconds = execution.kubernetes.pending_seconds
        numbers = range(job.request.resources.nodes)
        self._pods = [_SeenPod(f"{name}-{number}", number) for number in numbers]
        self._endings: dict[_SeenPod, Ending] = {}
        self.title = f"pods {', '.join(seen.name for seen in self._pods)}"
        # A node may be slow to say that a pod has ended, or never do so.
        self._seconds_to_end = execution.grace_seconds + SUPERVISOR_SECONDS + _REPORT_SECONDS
        self._answered_at = time.monotonic()
        self._end_at = math.inf

    def follow(self) -> Ending:
        """See :class:`flows.runners.place.Work`.

        Raises:
            UserError: A pod did not start in time.
        """
        while len(self._endings) < len(self._pods):
            time.sleep(_TICK_SECONDS)
            self._job.check_owner()
            self._look()
            self._end_all()
        return self._ending()

    def remove(self) -> None:
        """Removes the pods, running or not; the next attempt finds the rest."""
        for seen in self._pods:
            grace = 0 if seen.pod is not None and is_lost(seen.pod) else None
            with contextlib.suppress(*_AWAY):
                self._cluster.delete_pod(seen.name, grace_seconds=grace)

    def _read_rest(self, seen: _SeenPod) -> None:
        """Reads the end of a log, which says why a stage failed, from a busy server or node too."""
        deadline = time.monotonic() + _REST_SECONDS
        while not self._read(seen) and time.monotonic() < deadline:
            time.sleep(_TICK_SECONDS)

    def _read(self, seen: _SeenPod) -> bool:
        """Passes on what is new in a pod's log; False if the cluster did not answer."""
        began = time.monotonic()
        since = math.ceil(began - seen.read_at) + _OVERLAP_SECONDS
        try:
            lines = self._cluster.log(seen.name, since)
        except ApiException as error:
            if error.status == FORBIDDEN:
                self._job.notice(f"the log of pod {seen.name} cannot be read: {error.reason}")
            return error.status in (BAD_REQUEST, FORBIDDEN, NOT_FOUND)
        except UNREACHABLE:
            return False
        seen.read_at = began
        # Several lines may have one time, or stand out of order.
        last_read = seen.last_stamp
        for stamped in lines:
            stamp, _, line = stamped.partition(" ")
            # Without their Z, times compare as texts: `…:07` comes before `…:07.5`.
            time_of_line = stamp.rstrip("Z")
            if time_of_line > last_read:
                seen.last_stamp = max(seen.last_stamp, time_of_line)
                self._handle_line(seen, line)
        return True

    def _handle_line(self, seen: _SeenPod, line: str) -> None:
        """Handles a line of a pod.

        The first pod prints the stage's events. Lines of the others go to the log alone, each with
        the number of its node; why one refuses its request is kept.
        """
        if seen.number == 0:
            self._job.handle_line(line)
        else:
            event = parse_event(line)
            if isinstance(event, Failure):
                seen.failure = event
            self._job.log.write(f"[node {seen.number + 1}] {line}")

    def _look(self) -> None:
        """Looks at the pods that have not ended.

        Raises:
            PlaceAwayError: The API server has not answered for long.
        """
        try:
            listed = self._cluster.pods(self._selector)
            pods = {pod["metadata"]["name"]: pod for pod in listed}
        except _AWAY as error:
            silent = time.monotonic() - self._answered_at
            if silent < _API_SECONDS:
                return
            raise PlaceAwayError(
                f"{self._job.request.title}: the API server {self._cluster.server} has not "
                f"answered for {silent:.0f} s; the next attempt takes over what still runs"
            ) from error
        self._answered_at = time.monotonic()
        for seen in self._pods:
            if seen not in self._endings:
                self._see(seen, pods.get(seen.name))

    def _see(self, seen: _SeenPod, pod: Pod | None) -> None:
        """Notes how a pod is, and passes on what it has printed since the last look.

        The log of a pod that has ended is read to its end, for the failure's last lines.
        """
        if pod is None:
            self._endings[seen] = self._preempted_ending(seen)
            return
        seen.pod = pod
        ending = ending_of(pod)
        if is_asked_to_end(pod) and not seen.asked_by_us and _is_preempted(pod, ending):
            ending = self._preempted_ending(seen)
        if has_started(pod):
            where = pod["spec"].get("nodeName", "a node")
            self._job.notice(f"pod {seen.name} runs on {where}")
            if ending is not None:
                self._read_rest(seen)
            elif not is_lost(pod):
                self._read(seen)
        if ending is not None:
            self._endings[seen] = ending
        elif not has_started(pod):
            self._check_start(seen, pod)

    def _preempted_ending(self, seen: _SeenPod) -> Ending:
        """The ending of a pod whose node does not answer, or that somebody else has deleted."""
        if seen.pod is not None and is_lost(seen.pod):
            return _LOST
        reason = seen.pod and disruption_of(seen.pod)
        return Ending("preempted", None, reason or f"its pod was deleted: {self._events_of(seen)}")

    def _end_all(self) -> None:
        """Ends all pods once the first has ended, one has failed, or the run stops.

        A pod that does not end in time has lost its node.
        """
        now = time.monotonic()
        if self._job.stopping.is_set():
            self._end_at = min(self._end_at, now)
        # The first pod still saves what others have helped to train.
        failures = [ending for ending in self._endings.values() if ending.code != EXIT_OK]
        if failures or self._pods[0] in self._endings:
            self._end_at = min(self._end_at, now + _CAUSE_SECONDS)
        if now < self._end_at:
            return
        for seen in self._pods:
            if seen in self._endings:
                continue
            if now > self._end_at + self._seconds_to_end:
                self._endings[seen] = _LOST
            elif not (seen.asked_by_us or (seen.pod and is_asked_to_end(seen.pod))):
                with contextlib.suppress(*_AWAY):
                    # The others that have ended keep their logs.
                    self._cluster.delete_pod(seen.name)
                    seen.asked_by_us = True

    def _ending(self) -> Ending:
        """The ending of the pod whose failure explains the other failures."""
        first = self._endings[self._pods[0]]
        # Those that we asked to end explain nothing, unless their nodes were lost.
        causes = [
            seen for seen in self._pods if not seen.asked_by_us or self._endings[seen] == _LOST
        ]
        cause = min(causes or self._pods, key=lambda seen: _rank(self._endings[seen]))
        ending = self._endings[cause]
        if ending is first or first.code in _LAST_WORDS:
            return first
        if ending.code == EXIT_USER and cause.failure is not None:
            self._job.log.failure = cause.failure
            return ending
        if ending.kind == "out_of_memory":
            return ending
        words = ending.message or f"ended by {describe_exit(ending.code)}"
        kind: EndingKind = "failed" if ending.kind == "exited" else ending.kind
        message = f"node {cause.number + 1} of {len(self._pods)}: {words}"
        return Ending(kind, None, message, ending.remedy)

    def _check_start(self, seen: _SeenPod, pod: Pod) -> None:
        """Shows every few seconds why a pod does not start.

        Raises:
            UserError: It has waited for longer than ``pending_seconds``, outside a queue.
        """
        now = time.monotonic()
        if now < seen.look_at or self._end_at < math.inf:
            return
        seen.look_at = now + _EVENTS_SECONDS
        events = self._events_of(seen)
        self._job.notice(f"waiting: {events}", waits=True)
        if is_gated(pod):
            seen.waits_since = now
        if now - seen.waits_since > self._pending_seconds:
            request = self._job.request
            raise UserError(
                f"{request.title}: the pod has not started for {self._pending_seconds:g} s "
                f"(execution.kubernetes.pending_seconds): {events}",
                f"correct execution.kubernetes, lower resources.{request.stage}, or raise "
                "pending_seconds where the cluster is only busy; `kubectl describe pod` shows more",
            )

    def _events_of(self, seen: _SeenPod) -> str:
        with contextlib.suppress(*_AWAY):
            return self._cluster.last_events(seen.name)
        return "its events cannot be read"


# Codes by which the first pod itself says how the stage ended.
_LAST_WORDS = (EXIT_OK, EXIT_USER, EXIT_OVERDUE)


def _rank(ending: Ending) -> int:
    """Order of explanations: a person's mistakes come first.

    Lost machines and kills come before lost connections.
    """
    if ending.code == EXIT_USER:
        return 0
    if ending.kind != "exited":
        return 1
    if is_killed(ending.code):
        return 2
    return 4 if ending.code == EXIT_OK else 3


def _is_preempted(pod: Pod, ending: Ending | None) -> bool:
    """True if a pod that somebody else deleted was killed for it, never starts, or lost its node.

    Should it still work there, the lease in the store keeps the next attempt waiting.
    """
    if ending is None:
        return is_lost(pod) or not has_started(pod)
    is_kill = ending.kind == "exited" and is_killed(ending.code)
    return is_kill or ending.kind == "preempted"
