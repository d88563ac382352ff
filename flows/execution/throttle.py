"""Rate limiter for progress updates."""

from __future__ import annotations

import time


class Throttle:
    """Ready at first, and again ``seconds`` after each call that returned True."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def ready(self) -> bool:
        """True if ``seconds`` have passed since the last True; the wait then begins again."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
