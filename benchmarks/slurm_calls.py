"""Calls that a Slurm controller gets, counted by itself (`sdiag`)."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# squeue asks by the first of these, or by the second where it is told to leave out other users.
_STATUS = ("REQUEST_JOB_INFO", "REQUEST_JOB_USER_INFO")
_SINGLE = "REQUEST_JOB_INFO_SINGLE"
_SUBMIT = "REQUEST_SUBMIT_BATCH_JOB"
_TEST = "REQUEST_JOB_WILL_RUN"
_JOBS = re.compile(r"^Jobs submitted:\s+(\d+)", re.M)
_CALL = re.compile(r"^\s+([A-Z_]+)\s+\(\s*\d+\)\s+count:(\d+)", re.M)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Counts of a block's calls, there when it has ended.

    All callers count: nobody else may use the cluster meanwhile. Statistics begin anew at midnight
    UTC.
    """
    counts: dict[str, int] = {}
    before = _calls()
    yield counts
    calls = _calls()
    calls.subtract(before)
    counts |= {
        "squeue": sum(calls[name] for name in _STATUS),
        "scontrol show job": calls[_SINGLE],
        "sbatch --test-only": calls[_TEST],
        "sbatch": calls[_SUBMIT],
        "refused": calls[_SUBMIT] - calls["jobs"],
    }


def _calls() -> Counter[str]:
    """Calls of each kind since the controller's statistics began; ``jobs``: submitted ones."""
    said = subprocess.run(["sdiag"], capture_output=True, text=True, check=True).stdout
    found = Counter({name: int(count) for name, count in _CALL.findall(said)})
    [jobs] = _JOBS.findall(said)
    found["jobs"] = int(jobs)
    return found
