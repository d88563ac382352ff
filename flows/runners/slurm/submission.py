"""Submission of jobs: checked before a run, and tried again while Slurm takes none."""

import contextlib
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.base import OnEvent, log_once, preflight_request
from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.job import submit_options
from stages.contract.errors import StoppedError, UserError
from stages.contract.params import Settings
from stages.contract.request import Request

POLL_SECONDS = 10.0
"""Time between two calls of squeue, one for all jobs, and between two tries to submit a job."""
# Slurm is full or busy: it may take the same job later.
_PASSES = re.compile(
    r"MaxSubmit|job submit limit|temporarily unable to accept|MaxJobCount"
    r"|Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)"
    r"|Zero Bytes|standby mode|Resource temporarily unavailable|Transport endpoint"
    r"|not available now|Unexpected message received|in the process of being"
    r"|Communication connection failure",
    re.I,
)
# Reasons for which a job is pending and that no other job's end removes.
_HOPELESS = re.compile(
    r"PartitionNodeLimit|PartitionTimeLimit|BadConstraints|InvalidAccount|InvalidQOS|PerJob"
    r"|MaxWallDuration|AccountNotAllowed|QOSNotAllowed|JobHoldMaxRequeue|launch failed"
    r"|JobHeldAdmin|AssocGrp\w*(Minutes|RunMinutes)Limit|QOSUsageThreshold|QOSMin\w+|DependencyNever"
)


def may_pass(stderr: str) -> bool:
    """True if sbatch refused a job that it may take later."""
    return _PASSES.search(stderr) is not None


def mistake(complaint: str, request: Request, options: Sequence[str]) -> UserError:
    """The error for a job that Slurm does not take, in Slurm's words."""
    return UserError(
        f"{request.place}: Slurm refuses the job: {complaint.strip()} (sbatch {' '.join(options)})",
        f"correct execution.slurm or resources.{request.stage}; `sinfo -o '%P %l %D %c %m %G'` "
        "lists the partitions: time limit, nodes, CPUs, MiB, GPUs",
    )


def check_pending(reason: str, request: Request, execution: Execution) -> None:
    """Refuses a job that Slurm took and will never start: its reason does not go away."""
    if _HOPELESS.search(reason):
        options = submit_options(request, execution.slurm, execution.grace_seconds)
        raise mistake(f"it would be pending for ever, reason {reason}", request, options)


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
        complaint = client.check(options)
        if not complaint or may_pass(complaint):
            return
        # The job waits for a node that died.
        concerns_nodes = re.search(r"node configuration|node count", complaint, re.I)
        partition = execution.slurm.job(request.stage).partition
        if not (concerns_nodes and client.nodes_away(partition)):
            raise mistake(complaint, request, options)


def submit(
    request: Request,
    execution: Execution,
    name: str,
    program: str,
    on_event: OnEvent,
    stopping: threading.Event,
) -> str:
    """Submits a job, as soon as Slurm takes it, and returns its number.

    Raises:
        UserError: Slurm will never take it.
        StoppedError: ``stopping`` was set before.
    """
    say = log_once(on_event)
    asked = submit_options(request, execution.slurm, execution.grace_seconds)
    # The program itself writes into the job's folder.
    place = ["--output=/dev/null", f"--chdir={Path.cwd()}"]
    is_lost = False
    while not stopping.is_set():
        try:
            # An answer that was lost may have been the number of a job that was taken.
            queued = [job.id for job in client.own_jobs() if job.name == name] if is_lost else []
            if queued:
                return queued[0]
            is_lost = False
            done = client.submit(["--parsable", f"--job-name={name}", *place, *asked], program)
            if done.returncode == 0:
                return done.stdout.strip().split(";")[0]
            complaint = done.stderr
            if not may_pass(complaint):
                raise mistake(complaint, request, asked)
            is_lost = True
        except SlurmUnavailableError as error:
            complaint = str(error)
            is_lost = True
        say(f"Slurm takes no job now, trying again: {complaint.strip()}")
        stopping.wait(POLL_SECONDS)
    raise StoppedError(f"{request.place}: stopped while waiting for Slurm")
