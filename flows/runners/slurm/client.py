"""Slurm's commands: sbatch, squeue, sinfo, scontrol, scancel; their output, parsed.

Text formats in place of ``--json``, whose shape changes with each release.
"""

import subprocess
from collections.abc import Sequence

from flows.runners.command_lines import stage_environment
from flows.runners.place import PlaceAwayError
from stages.contract.errors import UserError

# A controller that is busy or starts anew is waited for by the commands themselves.
_SECONDS = 120.0
# A job is asked for again anyhow, and whoever asks hears nothing else meanwhile.
_DETAILS_SECONDS = 20.0
_FORGOTTEN = "Invalid job id"
# A new job must not inherit variables of the job that the orchestrator may be itself. A person's
# defaults for squeue would hide jobs.
_LEFT_OUT = ("SLURM_", "SQUEUE_")
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


def submit(options: Sequence[str], script: str) -> subprocess.CompletedProcess[str]:
    """Runs sbatch with a batch script on its stdin; the caller reads the refusal."""
    return _call(["sbatch", *options], text=script)


def nodes_away(partition: str | None) -> str:
    """Nodes of a partition, or of all, that are down, drained or do not answer; empty for none."""
    chosen = [f"--partition={partition}"] if partition else []
    states = "--states=down,drain,fail,maint,no_respond,reboot,unknown"
    return _call(["sinfo", "--noheader", states, "--format=%N", *chosen]).stdout.strip()


def own_jobs() -> dict[str, str]:
    """Numbers of this user's jobs that have not ended, by their names.

    Raises:
        PlaceAwayError: The controller does not answer.
    """
    done = _call(["squeue", "--noheader", "--me", "--format=%i|%j"])
    if done.returncode:
        raise PlaceAwayError(f"squeue: {done.stderr.strip()}")
    jobs = {}
    for line in done.stdout.splitlines():
        number, _, name = line.strip().partition("|")
        jobs[name] = number
    return jobs


def details(job: str) -> dict[str, str]:
    """Fields of one job (JobState, PreemptTime, RunTime, …); none when Slurm has forgotten it."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    done = _call(command, seconds=_DETAILS_SECONDS)
    if done.returncode and _FORGOTTEN not in done.stderr:
        raise PlaceAwayError(f"scontrol: {done.stderr.strip()}")
    # Only the first word of a value with spaces.
    words = [word.partition("=") for word in done.stdout.split()]
    return {name: value for name, sign, value in words if sign}


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
        raise PlaceAwayError(f"{command[0]}: {error}") from None


def clean_environment() -> dict[str, str]:
    """This process's variables without secrets and without variables of an enclosing job."""
    return {
        name: value
        for name, value in stage_environment(in_bucket=False).items()
        if name in _KEPT or not name.startswith(_LEFT_OUT)
    }
