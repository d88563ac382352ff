"""Queue of an orchestrator's jobs: one call of squeue a round, for all that ask."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from flows.runners.slurm import client
from flows.runners.slurm.client import QueuedJob, SlurmUnavailableError

_LOGGER = logging.getLogger(__name__)


class QueuePoller:
    """Polls the queue while somebody waits for a job, and answers questions between two rounds.

    Args:
        poll_seconds: Time between two calls of squeue.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._changed = threading.Condition()
        self._num_watchers = 0
        self._thread: threading.Thread | None = None
        self._jobs: dict[str, QueuedJob] = {}
        self._seen_at = -math.inf
        self._asking = threading.Lock()
        self._hurry = threading.Event()

    @contextmanager
    def polling(self) -> Iterator[None]:
        """Within the block the queue is polled."""
        with self._changed:
            self._num_watchers += 1
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="squeue", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                self._num_watchers -= 1

    def look(self, job: str, since: float) -> tuple[bool, QueuedJob | None]:
        """The job as the queue last showed it.

        Args:
            job: Its number.
            since: Of `time.monotonic`: what was seen before does not count.

        Returns:
            Whether the queue was seen since then, and the job if it was in it.
        """
        with self._changed:
            return self._seen_at > since, self._jobs.get(job)

    def recent(self, since: float = -math.inf) -> list[QueuedJob]:
        """The queue as it was a round ago at the most; of those who ask, one calls squeue.

        Args:
            since: Of `time.time`: what was seen before does not count.

        Raises:
            SlurmUnavailableError: The controller does not answer.
        """
        with self._asking:
            age = time.monotonic() - self._seen_at
            if age > min(self._poll_seconds, time.time() - since):
                self._ask()
            with self._changed:
                return list(self._jobs.values())

    def hurry(self) -> None:
        """Makes the next round come at once."""
        self._hurry.set()

    def _poll(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_watchers > 0)
            self._hurry.clear()
            try:
                with self._asking:
                    self._ask()
            except SlurmUnavailableError as error:
                # Jobs go on without their controller; their own files tell how they end.
                _LOGGER.debug("%s", error)
            self._hurry.wait(self._poll_seconds)

    def _ask(self) -> None:
        began = time.monotonic()
        jobs = {each.id: each for each in client.own_jobs()}
        with self._changed:
            self._jobs, self._seen_at = jobs, began
