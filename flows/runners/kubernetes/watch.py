"""Pods as the API server tells of them: one watch for all stages of a store, and their logs."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import BAD_REQUEST, FORBIDDEN, NOT_FOUND
from typing import Any

from kubernetes.client.exceptions import ApiException

from flows.runners.kubernetes.client import RELIST, UNREACHABLE, Cluster
from flows.runners.kubernetes.labels import name_of

# A watch ends after so long, and what was missed shows in the list that follows.
_WATCH_SECONDS = 60
_RETRY_SECONDS = 1.0
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class PodChange:
    """State of a pod, as it is now.

    Attributes:
        name: Name of the pod.
        pod: The pod; None where it is gone.
    """

    name: str
    pod: dict[str, Any] | None


class PodWatch:
    """Watches pods and passes on every change of those that a caller asked for.

    Args:
        cluster: The cluster.
        selector: Labels of the pods.
    """

    def __init__(self, cluster: Cluster, selector: str) -> None:
        self._cluster = cluster
        self._selector = selector
        self._lock = threading.Lock()
        self._watched: dict[str, queue.SimpleQueue[Any]] = {}
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._heard_at = time.monotonic()

    def silent_seconds(self) -> float:
        """Time since the API server last answered."""
        return time.monotonic() - self._heard_at

    @contextmanager
    def watched(self, names: list[str], changes: queue.SimpleQueue[Any]) -> Iterator[None]:
        """Puts a :class:`PodChange` for each change of these pods into a queue."""
        with self._lock:
            self._watched |= dict.fromkeys(names, changes)
            if not self._wanted.is_set():
                self._heard_at = time.monotonic()
                self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="pods", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                for name in names:
                    del self._watched[name]
                if not self._watched:
                    self._wanted.clear()

    def _watch(self) -> None:
        rest = threading.Event()
        while True:
            self._wanted.wait()
            try:
                self._watch_once()
            except (ApiException, ValueError, *UNREACHABLE) as error:
                # The API server may be away for a while, and a connection be cut in the middle of
                # an object; the pods go on without it.
                _LOGGER.debug("cannot see pods: %s", error)
                rest.wait(_RETRY_SECONDS)

    def _watch_once(self) -> None:
        found = self._cluster.pods(self._selector)
        self._heard_at = time.monotonic()
        there = {name_of(pod): pod for pod in found.pods}
        with self._lock:
            wanted = list(self._watched)
        for name in wanted:
            # A pod may be younger than the list.
            self._put(name, there.get(name) or self._cluster.pod(name))
        for kind, thing in self._cluster.watch_pods(self._selector, found.version, _WATCH_SECONDS):
            self._heard_at = time.monotonic()
            if kind == "ERROR":
                if thing.get("code") != RELIST:
                    _LOGGER.debug("the watch of pods ended: %s", thing.get("message"))
                return
            self._put(name_of(thing), None if kind == "DELETED" else thing)
            if not self._wanted.is_set():
                return
        self._heard_at = time.monotonic()

    def _put(self, name: str, pod: dict[str, Any] | None) -> None:
        with self._lock:
            if (changes := self._watched.get(name)) is not None:
                changes.put(PodChange(name, pod))


# Overlap of a new connection with the last line, for clocks that differ.
_OVERLAP_SECONDS = 60
# For the rest of a log: of a node that answers, and of one that may be gone, which does not end its
# connections.
_ANSWER_SECONDS = 60.0
_GONE_SECONDS = 10.0
_FRACTION_DIGITS = 9


class LogReader:
    """Reads a pod's log in a thread, from its beginning.

    Args:
        cluster: The cluster.
        pod: Name of the pod, whose container has started.
        sink: Called with each line, in the thread.
    """

    def __init__(self, cluster: Cluster, pod: str, sink: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._pod = pod
        self._sink = sink
        self._ended = threading.Event()
        self._closed = threading.Event()
        self._last = ""
        self._num_at_last = 0
        self._heard_at: float | None = None
        self._thread = threading.Thread(target=self._read, name=f"log-{pod}", daemon=True)
        self._thread.start()

    def finish(self, *, node_answers: bool) -> None:
        """Reads the rest, now that the pod has ended.

        Args:
            node_answers: Whether its node has told of the end.
        """
        self._ended.set()
        self._thread.join(_ANSWER_SECONDS if node_answers else _GONE_SECONDS)
        self._closed.set()

    def _read(self) -> None:
        while not self._ended.is_set():
            self._read_once(follow=True)
            self._ended.wait(_RETRY_SECONDS)
        # The last lines say why a stage failed: an API server that is busy is asked again.
        while not self._read_once(follow=False) and not self._closed.wait(_RETRY_SECONDS):
            pass

    def _read_once(self, *, follow: bool) -> bool:
        """Passes on what is new, until the log or the connection ends.

        Returns:
            Whether there is no more to be had by now: the log has ended, or there is none.
        """
        known, num_known = self._last, self._num_at_last
        since = None
        if self._heard_at is not None:
            since = int(time.monotonic() - self._heard_at) + _OVERLAP_SECONDS
        try:
            for raw in self._cluster.log(self._pod, follow=follow, since_seconds=since):
                when, line = _parse(raw)
                if when < known:
                    continue
                if when == known and num_known:
                    num_known -= 1
                    continue
                self._pass_on(when, line)
        except ApiException as error:
            return error.status in (BAD_REQUEST, FORBIDDEN, NOT_FOUND)
        except UNREACHABLE:
            return False
        return True

    def _pass_on(self, when: str, line: str) -> None:
        self._num_at_last = self._num_at_last + 1 if when == self._last else 1
        self._last = when
        self._heard_at = time.monotonic()
        if not self._closed.is_set():
            self._sink(line + "\n")


def _parse(raw: bytes) -> tuple[str, str]:
    """Time and text of a line; times compare as texts."""
    stamp, _, line = raw.partition(b" ")
    seconds, _, fraction = stamp.decode(errors="replace").rstrip("Z").partition(".")
    return f"{seconds}.{fraction.ljust(_FRACTION_DIGITS, '0')}", line.decode(errors="replace")
