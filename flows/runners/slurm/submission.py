"""Submission of jobs, checked before a run."""

import contextlib
from collections.abc import Mapping
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.pipeline.preflight import require_interpreter
from flows.runners.command_lines import preflight_request
from flows.runners.place import NoRoomError, PlaceAwayError
from flows.runners.slurm import client
from flows.runners.slurm.job import default_interpreter, submit_options
from stages.contract.errors import UserError
from stages.contract.request import Request, Resources

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
    "launch_failed",
    "launch failed",
)


def may_pass(complaint: str) -> bool:
    """True if sbatch refused a job that it may take later."""
    return any(words in complaint for words in _PASSES) and not is_hopeless(complaint)


def is_hopeless(reason: str) -> bool:
    """True if Slurm will never start the job, in its words."""
    return any(words in reason for words in _HOPELESS)


def mistake(complaint: str, request: Request, execution: Execution) -> UserError:
    """The error for a job that Slurm does not take, in Slurm's words."""
    options = submit_options(request, execution)
    return UserError(
        f"{request.title}: Slurm refuses the job: {complaint.strip()} (sbatch {' '.join(options)})",
        f"correct execution.slurm or resources.{request.stage}; `sinfo -o '%P %l %D %c %m %G'` "
        "lists the partitions: time limit, nodes, CPUs, MiB, GPUs",
    )


def check_jobs(execution: Execution, resources: Mapping[str, Resources]) -> None:
    """Checks settings and ``resources`` of stages by their names.

    Raises:
        UserError: Slurm would never run the job of a stage, or its commands or a stage's Python are
            not here.
    """
    for stage, limits in resources.items():
        request = preflight_request(stage, limits)
        checked_interpreter(request, execution)
        check_job(request, execution)


def checked_interpreter(request: Request, execution: Execution) -> str:
    """Python of a stage; UserError if this host lacks it: nodes start it by the same path."""
    interpreter = default_interpreter(execution, request)
    if execution.slurm.job(request.stage).container is None:
        require_interpreter(request.stage, interpreter)
    return interpreter


def check_job(request: Request, execution: Execution) -> None:
    """Refuses one job that Slurm would never run."""
    # A controller that is away for now does not make a setting wrong.
    with contextlib.suppress(PlaceAwayError):
        options = submit_options(request, execution)
        done = client.submit(["--test-only", *options], "#!/bin/bash\n")
        if done.returncode == 0 or may_pass(done.stderr):
            return
        partition = execution.slurm.job(request.stage).partition
        waits_for_nodes = "ode configuration" in done.stderr or "ode count" in done.stderr
        # The job waits for a node that died.
        if not (waits_for_nodes and client.nodes_away(partition)):
            raise mistake(done.stderr, request, execution)


def submit_job(request: Request, execution: Execution, name: str, program: str) -> str:
    """Submits a job and returns its number.

    Raises:
        UserError: Slurm will never take it.
        NoRoomError: It takes none now.
    """
    limits = submit_options(request, execution)
    # The program itself writes into the job's folder.
    place = ["--output=/dev/null", f"--chdir={Path.cwd()}"]
    try:
        done = client.submit(["--parsable", f"--job-name={name}", *place, *limits], program)
    except PlaceAwayError as error:
        raise NoRoomError(str(error)) from error
    if done.returncode == 0:
        return done.stdout.strip().split(";")[0]
    if may_pass(done.stderr):
        raise NoRoomError(f"Slurm takes no job now: {done.stderr.strip()}")
    raise mistake(done.stderr, request, execution)
