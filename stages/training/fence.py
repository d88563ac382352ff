"""Fence: ends a node of a training that is cut off from the first one.

A call of torch's store waits for an answer that a cut network never brings, and the kernel gives a
silent connection up after some fifteen minutes. So long the node would hold its GPUs.
"""

from __future__ import annotations

import os
import threading
import time

from stages.contract.errors import EXIT_FAILED
from stages.contract.events import Emitter, Failure

SECONDS = 60.0
"""Longest time that an answer of the first node may take; it misses this node after half of it."""
_LOOK_SECONDS = 1.0


class Fence:
    """Context manager around each call that waits for the first node's answer.

    When one takes too long this process ends at once, since the thread that calls cannot be
    interrupted. Its supervisor ends the workers.

    Args:
        events: Gets the reason.
    """

    def __init__(self, events: Emitter) -> None:
        self._events = events
        self._called_at: float | None = None
        threading.Thread(target=self._watch, name="fence", daemon=True).start()

    def __enter__(self) -> None:
        self._called_at = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._called_at = None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            called_at = self._called_at
            if called_at is not None and time.monotonic() - called_at > SECONDS:
                # In a thread: what reads this node's words may be cut off, too.
                saying = threading.Thread(target=self._say, daemon=True)
                saying.start()
                saying.join(_LOOK_SECONDS)
                os._exit(EXIT_FAILED)

    def _say(self) -> None:
        said = f"the first node has not answered for {SECONDS:g} s: this one ends"
        self._events.emit(Failure(kind="crash", message=said))
