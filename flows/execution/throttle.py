"""Lets something through at most once in a while."""

from __future__ import annotations

import time


class Throttle:
    """Ready at first, and again ``seconds`` after each time that it said so."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def ready(self) -> bool:
        """Whether enough time has passed; starts the wait anew if so."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
