"""Log of a pod, read to its end over connections that may break.

Times tell which lines are known already. The API has stdout and stderr in one stream: events are
told from other lines by their form.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.client import BAD_REQUEST, FORBIDDEN, NOT_FOUND

from kubernetes.client.exceptions import ApiException

from flows.runners.kubernetes.client import UNREACHABLE, Cluster

# Overlap of a new connection with the last line, for clocks that differ.
_OVERLAP_SECONDS = 60
_RETRY_SECONDS = 1.0
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
