"""Places of the stages that may run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Slots:
    """A counting semaphore whose wait can be given up.

    Args:
        number: Places.
    """

    def __init__(self, number: int) -> None:
        self._free = number
        self._changed = threading.Condition()

    def acquire(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Waits for a place and takes it.

        Args:
            unless: True where no place is needed; asked first, and after each :meth:`look_again`.

        Returns:
            False where none was needed.
        """
        with self._changed:
            self._changed.wait_for(lambda: unless() or self._free > 0)
            if unless():
                return False
            self._free -= 1
            return True

    def release(self) -> None:
        """Gives a place back."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def look_again(self) -> None:
        """Makes those that wait ask again whether they need a place."""
        with self._changed:
            self._changed.notify_all()
