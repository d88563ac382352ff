"""The right to compute one key: held by one process at a time, renewed while it is held.

What is the same wherever a lease lies: waiting for the present holder, renewing it from a thread,
noticing that it was lost. :mod:`stages.contract.file_lease` and :mod:`stages.contract.remote.lease`
hold it in a file and in a bucket.
"""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self

from stages.contract.errors import LeaseLostError, StoppedError

EXPIRY_SECONDS = 120.0


class Lease(ABC):
    """A lease on one name; use :meth:`acquire` and the object as a context manager.

    Args:
        name: What messages call it.

    Attributes:
        poll_seconds: Time between two looks at a lease that another holds.
    """

    poll_seconds: ClassVar[float]

    def __init__(self, name: str) -> None:
        self._name = name
        self._owner = uuid.uuid4().hex
        self._ended = threading.Event()
        self._lost = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def holder(self) -> dict[str, Any] | None:
        """Holder of the lease now (``host``, ``pid``, ``since``), or None."""

    def acquire(
        self,
        *,
        waiting: Callable[[dict[str, Any]], None] | None = None,
        stopping: threading.Event | None = None,
    ) -> bool:
        """Takes the lease, waiting for its present holder.

        Args:
            waiting: Called once with the holder's record before the first wait.
            stopping: Ends the wait.

        Returns:
            True when the lease was free at once, False when a holder was waited for (the artifact
            may be there now).

        Raises:
            StoppedError: ``stopping`` was set.
        """
        stopping = stopping or threading.Event()
        at_once = True
        while (holder := self._try_acquire()) is not None:
            if at_once and waiting is not None:
                waiting(holder)
            at_once = False
            if stopping.wait(self.poll_seconds):
                raise StoppedError(f"stopped while waiting for the lease {self._name}")
        self._thread = threading.Thread(target=self._heartbeat, name="lease", daemon=True)
        self._thread.start()
        return at_once

    def check(self) -> None:
        """Raises LeaseLostError if another process took the lease over."""
        if self._lost.is_set():
            raise LeaseLostError(f"lease {self._name} was taken over by another process")

    def release(self) -> None:
        """Gives the lease back; harmless when it was lost or never taken."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    @abstractmethod
    def _try_acquire(self) -> dict[str, Any] | None:
        """Takes the lease and returns None, or returns its living holder."""

    @abstractmethod
    def _heartbeat(self) -> None:
        """Renews the lease until ``_ended``; sets ``_lost`` and returns if another has it."""

    @abstractmethod
    def _give_back(self) -> None:
        """Frees the lease if it is ours; no heartbeat goes on."""
