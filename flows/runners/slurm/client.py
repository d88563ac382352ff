"""Slurm's commands: sbatch, squeue, sinfo, scontrol, scancel; their output, parsed.

Text formats in place of ``--json``, whose shape changes with each release.
"""

import contextlib
import math
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.runners.command_lines import stage_environment
from flows.runners.place import PlaceAwayError
from stages.contract.errors import UserError

# A controller that is busy or starts anew is waited for by the commands themselves.
_SECONDS = 120.0
# The queue is asked for again anyhow, and whoever asks hears nothing else meanwhile.
_QUEUE_SECONDS = 20.0
_FORGOTTEN = "Invalid job id"
_FORMAT = "%i|%T|%r|%N|%j"
# A new job must not inherit variables of the job that the orchestrator may be itself. A person's
# defaults for squeue would hide jobs.
_LEFT_OUT = ("SLURM_", "SQUEUE_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


class SlurmUnavailableError(PlaceAwayError):
    """The controller cannot be reached just now."""


@dataclass(frozen=True)
class QueuedJob:
    """A line of squeue.

    Attributes:
        id: Number of the job.
        reason: Why it is pending.
    """

    id: str
    state: str
    reason: str
    nodes: str
    name: str


def submit(options: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    """Runs sbatch with a batch script on its stdin; the caller reads the refusal."""
    return _call(["sbatch", *options], text=script)


def nodes_away(partition: str | None) -> str:
    """Nodes of a partition, or of all, that are down, drained or do not answer; empty for none."""
    chosen = [f"--partition={partition}"] if partition else []
    states = "--states=down,drain,fail,maint,no_respond,reboot,unknown"
    return _call(["sinfo", "--noheader", states, "--format=%N", *chosen]).stdout.strip()


def own_jobs() -> list[QueuedJob]:
    """All jobs of this user that have not ended.

    Raises:
        SlurmUnavailableError: The controller does not answer.
    """
    command = ["squeue", "--noheader", "--me", f"--format={_FORMAT}"]
    done = _call(command, seconds=_QUEUE_SECONDS)
    if done.returncode:
        raise SlurmUnavailableError(f"squeue: {done.stderr.strip()}")
    # A job's name may hold the separator.
    lines = [line.strip().split("|", 4) for line in done.stdout.splitlines()]
    return [QueuedJob(*fields) for fields in lines if len(fields) == 5]


class Queue:
    """This user's jobs by name, asked for once for all that wait for some of them."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._tried_at = -math.inf
        self._view: tuple[float, Mapping[str, QueuedJob]] = (-math.inf, {})

    def look(self, seconds: float) -> tuple[float, Mapping[str, QueuedJob]]:
        """The last view of all jobs, and the time (of `time.monotonic`) at which it was asked for.

        The first caller after ``seconds`` asks anew, and the others wait for the answer.
        """
        with self._asking:
            now = time.monotonic()
            if now - self._tried_at > seconds:
                self._tried_at = now
                with contextlib.suppress(SlurmUnavailableError):
                    self._view = now, {job.name: job for job in own_jobs()}
            return self._view


def details(job: str) -> dict[str, str]:
    """Fields of one job (JobState, PreemptTime, RunTime, …); none when Slurm has forgotten it."""
    done = _call(["scontrol", "--oneliner", "show", "job", job])
    if done.returncode and _FORGOTTEN not in done.stderr:
        raise SlurmUnavailableError(f"scontrol: {done.stderr.strip()}")
    # Only the first word of a value with spaces.
    fields = {}
    for word in done.stdout.split():
        name, sign, value = word.partition("=")
        if sign:
            fields[name] = value
    return fields


def cancel(job: str, option: str = "--quiet") -> None:
    """Cancels a job, begun or not: Slurm kills what does not end by itself."""
    # scancel's complaint about a job that has ended is not a failure.
    _call(["scancel", option, job])


def _call(
    command: Sequence[str], text: str = "", seconds: float = _SECONDS
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            # `sbatch_options` may make sbatch pass the environment on.
            env=clean_environment(),
            timeout=seconds,
            check=False,
        )
    except (FileNotFoundError, PermissionError):
        raise UserError(
            f"no program {command[0]} on this machine, and execution.runner is 'slurm'",
            "start the run where Slurm's commands are (a login node), or choose another runner",
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmUnavailableError(f"{command[0]}: {error}") from None


def clean_environment() -> dict[str, str]:
    """This process's variables without secrets and without variables of an enclosing job."""
    return {
        name: value
        for name, value in stage_environment(in_bucket=False).items()
        if name in _KEPT or not name.startswith(_LEFT_OUT)
    }
