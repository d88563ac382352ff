"""Circuit breaker: holds requests back while a server is down."""

from __future__ import annotations

import threading
import time

# Failures in a row, of whichever requests, that open the circuit.
FAILURES_TO_OPEN = 5


class CircuitBreaker:
    """Holds requests back while a server fails, and lets one at a time through to try it.

    After :data:`FAILURES_TO_OPEN` failures in a row the circuit is open: :meth:`enter` waits until
    the pause is over and lets one request probe. Its success closes the circuit for all; its
    failure begins a pause of twice the length. After ``max_probes`` failed probes it gives up.

    Args:
        pause_seconds: The first pause.
        max_probes: Failed probes in a row after which :meth:`enter` lets nothing through.
    """

    def __init__(self, pause_seconds: float, max_probes: int) -> None:
        self._pause_seconds = pause_seconds
        self._max_probes = max_probes
        self._changed = threading.Condition()
        self._failures = 0
        self._failed_probes = 0
        # The thread whose request probes; requests from before the circuit opened may fail late.
        self._probe: int | None = None
        self._retry_at = 0.0
        self._closed = False
        self.last_failure = "none"

    def enter(self) -> bool:
        """Waits for leave to send a request; False if the breaker has given up."""
        with self._changed:
            while not self._closed and self._failures >= FAILURES_TO_OPEN:
                if self._failed_probes >= self._max_probes:
                    return False
                pause = self._retry_at - time.monotonic()
                if pause <= 0 and self._probe is None:
                    self._probe = threading.get_ident()
                    return True
                # While another probes, its outcome is what wakes this one.
                self._changed.wait(pause if self._probe is None else None)
            return not self._closed

    def succeeded(self) -> None:
        """The server answered a request."""
        with self._changed:
            self._failures = self._failed_probes = 0
            self._probe = None
            self._changed.notify_all()

    def failed(self, reason: str) -> None:
        """The server did not answer a request, or by an error of its own."""
        with self._changed:
            self.last_failure = reason
            self._failures += 1
            if self._probe == threading.get_ident():
                self._failed_probes += 1
                self._probe = None
            if self._failures >= FAILURES_TO_OPEN:
                self._retry_at = time.monotonic() + self._pause_seconds * 2**self._failed_probes
            self._changed.notify_all()

    def close(self) -> None:
        """Lets nothing through any more, nor keeps anyone waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
