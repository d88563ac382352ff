"""Watch of a store's pods: one connection of the orchestrator for all of its stages."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kubernetes.client.exceptions import ApiException

from flows.runners.kubernetes.client import RELIST, UNREACHABLE, Cluster
from flows.runners.kubernetes.labels import name_of

# A watch ends after so long, and what was missed shows in the list that follows.
_WATCH_SECONDS = 60
_RETRY_SECONDS = 2.0
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
