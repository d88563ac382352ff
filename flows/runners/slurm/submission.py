"""Submission of jobs: checked before a run, and tried again while Slurm takes none."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.command_lines import preflight_request
from flows.runners.place import StageJob
from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.job import submit_options
from stages.contract.errors import StoppedError, UserError
from stages.contract.params import Settings
from stages.contract.request import Request

POLL_SECONDS = 10.0
"""Time between two calls of squeue, one for all jobs, and between two tries to submit a job."""
# Words of a Slurm that is full or busy: it may take the same job later.
_PASSES = (
    "MaxSubmit",
    "job submit limit",
    "temporarily unable",
    "Unable to contact slurm controller",
    "timed out",
    "Connection refused",
    "Communication connection failure",
    "Resource temporarily unavailable",
    "Transport endpoint",
    "Unexpected message received",
    "Zero Bytes",
    "in the process of being",
    "not available now",
    "standby mode",
)

# Words of reasons for which a job is pending for ever.
_HOPELESS = (
    "PartitionTimeLimit",
    "BadConstraints",
    "InvalidAccount",
    "InvalidQOS",
    "JobHeldAdmin",
    "AccountNotAllowed",
    "DependencyNever",
    "JobHoldMaxRequeue",
    "MaxWallDuration",
    "PerJob",
    "QOSMin",
    "QOSNotAllowed",
    "QOSUsageThreshold",
    "launch failed",
)


def may_pass(complaint: str) -> bool:
    """True if sbatch refused a job that it may take later."""
    return any(words in complaint for words in _PASSES) and not is_hopeless(complaint)


def is_hopeless(reason: str) -> bool:
    """True if Slurm will never start the job, in its words."""
    return any(words in reason for words in _HOPELESS)


def mistake(complaint: str, request: Request, options: Sequence[str]) -> UserError:
    """The error for a job that Slurm does not take, in Slurm's words."""
    return UserError(
        f"{request.title}: Slurm refuses the job: {complaint.strip()} (sbatch {' '.join(options)})",
        f"correct execution.slurm or resources.{request.stage}; `sinfo -o '%P %l %D %c %m %G'` "
        "lists the partitions: time limit, nodes, CPUs, MiB, GPUs",
    )


def check_jobs(execution: Execution, resources: Settings) -> None:
    """Checks settings and resources of all stages.

    Raises:
        UserError: Slurm would never run the job of a stage, or its commands are not here.
    """
    checked = set()
    for stage in type(resources).model_fields:
        request = preflight_request(stage, getattr(resources, stage))
        options = tuple(submit_options(request, execution.slurm, execution.grace_seconds))
        if options not in checked:
            checked.add(options)
            check_job(request, execution, options)


def check_job(request: Request, execution: Execution, options: Sequence[str]) -> None:
    """Refuses one job that Slurm would never run."""
    # A controller that is away for now does not make a setting wrong.
    with contextlib.suppress(SlurmUnavailableError):
        done = client.submit(["--test-only", *options], "#!/bin/bash\n")
        if done.returncode == 0 or may_pass(done.stderr):
            return
        partition = execution.slurm.job(request.stage).partition
        waits_for_nodes = "ode configuration" in done.stderr or "ode count" in done.stderr
        # The job waits for a node that died.
        if not (waits_for_nodes and client.nodes_away(partition)):
            raise mistake(done.stderr, request, options)


def submit_job(job: StageJob, execution: Execution, name: str, program: str) -> str:
    """Submits a job, as soon as Slurm takes it, and returns its number.

    Raises:
        UserError: Slurm will never take it.
        StoppedError: The run stopped before.
    """
    request = job.request
    limits = submit_options(request, execution.slurm, execution.grace_seconds)
    # The program itself writes into the job's folder.
    place = ["--output=/dev/null", f"--chdir={Path.cwd()}"]
    is_lost = False
    while not job.stopping.is_set():
        try:
            # An answer that was lost may have been the number of a job that was taken.
            queued = client.own_jobs(ended=True) if is_lost else []
            for other in queued:
                if other.name == name:
                    return other.id
            done = client.submit(["--parsable", f"--job-name={name}", *place, *limits], program)
            if done.returncode == 0:
                return done.stdout.strip().split(";")[0]
            complaint = done.stderr
            if not may_pass(complaint):
                raise mistake(complaint, request, limits)
        except SlurmUnavailableError as error:
            complaint = str(error)
        is_lost = True
        job.waits(f"Slurm takes no job now, trying again: {complaint.strip()}")
        job.stopping.wait(POLL_SECONDS)
    raise StoppedError(f"{request.title}: stopped while waiting for Slurm")
