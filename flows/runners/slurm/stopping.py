"""End of jobs: steps first, so that stages can save, then what is left of them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping

from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.folder import JobFolder

# A batch program kills its steps so long after the grace period.
_PROGRAM_SECONDS = 15.0
# After a plain scancel Slurm kills what is left (KillWait, 30 seconds where nobody set another).
_KILL_SECONDS = 90.0
_LOOK_SECONDS = 1.0
_LOGGER = logging.getLogger(__name__)


def end_jobs(jobs: Mapping[str, JobFolder], grace_seconds: float) -> None:
    """Ends jobs and returns when they are gone: first their steps, so that stages can save.

    Args:
        jobs: Their folders by their numbers.
        grace_seconds: Time between SIGTERM and SIGKILL.
    """
    for folder in jobs.values():
        folder.ask_to_stop()
    # Where the controller does not answer, batch programs still see that they are asked.
    with contextlib.suppress(SlurmUnavailableError):
        client.cancel_pending(jobs)
        client.signal_steps(jobs)
    left = _wait_until_gone(set(jobs), grace_seconds + _PROGRAM_SECONDS)
    with contextlib.suppress(SlurmUnavailableError):
        client.cancel(left)
    left = _wait_until_gone(left, _KILL_SECONDS)
    if left:
        _LOGGER.error("Slurm has not ended by now: jobs %s", ", ".join(sorted(left)))


def _wait_until_gone(jobs: set[str], seconds: float) -> set[str]:
    """Waits for jobs to leave the queue; returns those that have not."""
    deadline = time.monotonic() + seconds
    while jobs and time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnavailableError):
            jobs = {each.id for each in client.own_jobs() if not each.is_over} & jobs
        if jobs:
            time.sleep(_LOOK_SECONDS)
    return jobs
