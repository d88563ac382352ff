"""Count of the stages at work, for a runner that stops and waits until there are none."""

from __future__ import annotations

import threading


class Running:
    """Number of blocks of code that are entered; threads enter and leave as they like."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._number = 0

    def __enter__(self) -> None:
        with self._ended:
            self._number += 1

    def __exit__(self, *error: object) -> None:
        with self._ended:
            self._number -= 1
            self._ended.notify_all()

    def wait_for_none(self, seconds: float | None = None) -> None:
        """Waits until no block is entered, for ``seconds`` at the most."""
        with self._ended:
            self._ended.wait_for(lambda: not self._number, seconds)
