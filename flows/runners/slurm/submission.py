"""Submission of jobs: checked before a run, one call at a time for a partition, refusals explained.

Jobs that ask for the same and come together are one array. A full partition is asked for room once
in a poll, and holds up no jobs for others.
"""

import contextlib
import re
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flows.pipeline.placement import Execution, SlurmJobSettings, SlurmSettings
from flows.runners.base import OnEvent, log_once, preflight_request
from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.folder import JobFolder
from flows.runners.slurm.job import batch_program, submit_options
from stages.contract.errors import StoppedError, UserError
from stages.contract.params import Settings
from stages.contract.request import Request

Meaning = Literal["mistake", "full", "busy"]

# Slurm's limits on jobs that are submitted, not on what one asks for: there is room later.
_FULL = re.compile(r"MaxSubmit|job submit limit|temporarily unable to accept|MaxJobCount", re.I)
_BUSY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection (refused|timed out)|Zero Bytes"
    r"|standby mode|Resource temporarily unavailable|Transport endpoint|not available now"
    r"|Unexpected message received|in the process of being|Communication connection failure",
    re.I,
)
# What sbatch says about a request, and the setting that it means.
_SETTINGS: Mapping[str, tuple[str, str]] = {
    r"invalid partition|partition name": (
        "execution.slurm.partition is {job.partition!r}",
        "`sinfo -s` lists the partitions",
    ),
    r"account": (
        "execution.slurm.account is {job.account!r}",
        "`sacctmgr show associations user=$USER` lists your accounts and their partitions",
    ),
    r"qos|feature": (
        "execution.slurm.sbatch_options is {job.sbatch_options!r} (--qos, --constraint)",
        "`sacctmgr show qos` lists them, `sinfo -o '%N %f'` the nodes' features",
    ),
    r"gres": (
        "resources.{stage}.gpus is {resources.gpus} and execution.slurm.gpu_type {job.gpu_type!r}",
        "`sinfo -o '%P %N %G'` lists the nodes' GPUs",
    ),
    r"time limit": (
        "execution.slurm.time_limit is {job.time_limit!r}",
        "`sinfo -o '%P %l'` lists the partitions' limits",
    ),
    r"node configuration|node count|memory|processors|cpu": (
        "resources.{stage} asks for {resources.nodes} nodes with {resources.gpus} GPUs, {cpus} CPUs"
        " and {memory} each",
        "`sinfo -o '%P %D %c %m %G'` lists nodes, CPUs, MiB and GPUs of the partitions; ask for "
        "less, or name another partition in execution.slurm",
    ),
}
# Reasons for which a job is pending and that no other job's end removes.
_HOPELESS = re.compile(
    r"PartitionNodeLimit|PartitionTimeLimit|BadConstraints|InvalidAccount|InvalidQOS|PerJob"
    r"|MaxWallDuration|AccountNotAllowed|QOSNotAllowed|JobHoldMaxRequeue|launch failed"
    r"|JobHeldAdmin|AssocGrp\w*(Minutes|RunMinutes)Limit|QOSUsageThreshold|QOSMin\w+|DependencyNever"
)


def meaning_of(said: str) -> Meaning:
    """Meaning of a refusal of sbatch, by what it wrote to stderr."""
    if _BUSY.search(said):
        return "busy"
    return "full" if _FULL.search(said) else "mistake"


def mistake(said: str, request: Request, job: SlurmJobSettings) -> UserError:
    """The error for a request that Slurm does not take.

    Slurm said it on sbatch's stderr, or as the reason why a job stays pending.
    """
    resources = request.resources
    values = {
        "job": job,
        "stage": request.stage,
        "resources": resources,
        "cpus": resources.cpus or resources.processes,
        "memory": f"{resources.memory_gib:g} GiB" if resources.memory_gib else "any memory",
    }
    where, remedy = next(
        (known for pattern, known in _SETTINGS.items() if re.search(pattern, said, re.I)),
        (f"settings in execution.slurm and resources.{request.stage}", "correct them"),
    )
    # The complaint comes first; "Batch job submission failed" or advice may follow it.
    complaints = re.findall(r"error: *(.+)", said) or said.strip().splitlines()[:1]
    words = "; ".join(re.sub(r"^(sbatch|allocation failure): *", "", each) for each in complaints)
    return UserError(
        f"{request.place}: Slurm refuses the job: {words or 'no reason given'} "
        f"({where.format_map(values)})",
        remedy,
    )


def check_pending(reason: str, request: Request, job: SlurmJobSettings) -> None:
    """Refuses a job that Slurm took and will never start: its reason does not go away."""
    if not _HOPELESS.search(reason):
        return
    hint = {"PartitionTimeLimit": "time limit", "PartitionNodeLimit": "node count"}.get(reason, "")
    raise mistake(f"{hint}\nit would be pending for ever, reason {reason}", request, job)


def check_jobs(execution: Execution, resources: Settings) -> None:
    """Checks settings and resources of all stages.

    Raises:
        UserError: Slurm would never run the job of a stage, or its commands are not here.
    """
    asked = set()
    for stage in type(resources).model_fields:
        request = preflight_request(stage, getattr(resources, stage))
        options = tuple(submit_options(request, execution.slurm, execution.grace_seconds))
        if options not in asked:
            asked.add(options)
            check_job(request, execution.slurm, execution.grace_seconds)


def check_job(request: Request, settings: SlurmSettings, grace_seconds: float) -> None:
    """Refuses one job that Slurm would never run."""
    # A controller that is away for now does not make a setting wrong.
    with contextlib.suppress(SlurmUnavailableError):
        job = settings.job(request.stage)
        said = client.check(submit_options(request, settings, grace_seconds))
        # Slurm takes a job whose limit is too long, and never starts it. A QOS may allow more.
        by_qos = any("qos" in each for each in job.sbatch_options)
        if not said and job.time_limit is not None and not by_qos:
            longest = client.longest_minutes(job.partition)
            if client.minutes_of(job.time_limit) > longest:
                said = f"the partition's time limit is {longest:g} minutes"
        if not said or meaning_of(said) != "mistake":
            return
        # A node that died may be the one that is wanted: the job waits for it.
        concerns_nodes = re.search(r"node configuration|node count", said, re.I)
        if not (concerns_nodes and client.nodes_away(job.partition)):
            raise mistake(said, request, job)


_LOOK_SECONDS = 0.5
# Stages that one task of the flow makes ready come within so much of each other.
_GATHER_SECONDS = 0.2


@dataclass
class _Wanted:
    """A job that a thread wants submitted; `job` is its number once Slurm has taken it."""

    folder: JobFolder
    values: str
    job: str | None = None


class Submitter:
    """Submits jobs of an orchestrator; those that ask for the same go together, as one array."""

    def __init__(self, settings: SlurmSettings, grace_seconds: float) -> None:
        self._settings = settings
        self._grace_seconds = grace_seconds
        self._turns: dict[str | None, threading.Lock] = {}
        self._checked: set[tuple[str, ...]] = set()
        self._wanted: dict[tuple[str, ...], list[_Wanted]] = {}
        self._changing = threading.Lock()

    def submit(
        self,
        request: Request,
        folder: JobFolder,
        values: str,
        on_event: OnEvent,
        stopping: threading.Event,
    ) -> str:
        """Submits a job with these values, when Slurm takes it, and returns its number.

        Raises:
            UserError: Slurm would never run it.
            StoppedError: The run stops while Slurm takes no job.
        """
        asked = tuple(submit_options(request, self._settings, self._grace_seconds))
        own = _Wanted(folder, values)
        with self._changing:
            same = self._wanted.setdefault(asked, [])
            same.append(own)
        try:
            with self._turn(request, stopping):
                if own.job is None:
                    # Slurm takes some jobs that will never start.
                    if asked not in self._checked:
                        check_job(request, self._settings, self._grace_seconds)
                        self._checked.add(asked)
                    stopping.wait(_GATHER_SECONDS)
                    self._submit(request, own, same, asked, on_event, stopping)
        except StoppedError:
            # The caller ends a job that another thread has submitted by now.
            if own.job is None:
                raise
        finally:
            with self._changing:
                same.remove(own)
        assert own.job is not None
        return own.job

    def _submit(
        self,
        request: Request,
        own: _Wanted,
        same: list[_Wanted],
        asked: Sequence[str],
        on_event: OnEvent,
        stopping: threading.Event,
    ) -> None:
        """Submits a job, and with it as many of those that ask for the same as Slurm takes."""
        say = log_once(on_event)
        with self._changing:
            together = [own, *(each for each in same if each.job is None and each is not own)]
        is_lost = False
        while True:
            try:
                # An answer that was lost may be that of jobs that were taken.
                if is_lost and _are_queued(together):
                    return
                is_lost = False
                name, options, program = _batch(request, together)
                command = ["--parsable", f"--job-name={name}", *options, *asked]
                done = client.submit(command, program)
                if done.returncode == 0:
                    number = done.stdout.strip().split(";")[0]
                    for task, each in enumerate(together):
                        each.job = number if len(together) == 1 else f"{number}_{task}"
                    return
                said = done.stderr
                meaning = meaning_of(done.stderr)
            except SlurmUnavailableError as error:
                said = str(error)
                meaning = "busy"
            if meaning != "busy" and len(together) > 1:
                # There may be room for less, or the cluster takes no array of this size.
                together = together[: len(together) // 2]
                continue
            if meaning == "mistake":
                raise mistake(said, request, self._settings.job(request.stage))
            is_lost = is_lost or meaning == "busy"
            say(f"Slurm takes no job now, trying again: {said.strip()}")
            if stopping.wait(self._settings.poll_seconds):
                raise _stopped(request)

    @contextlib.contextmanager
    def _turn(self, request: Request, stopping: threading.Event) -> Iterator[None]:
        """The turn of one of the jobs to which the same limits of Slurm apply."""
        partition = self._settings.job(request.stage).partition
        turn = self._turns.setdefault(partition, threading.Lock())
        while not turn.acquire(timeout=_LOOK_SECONDS):
            if stopping.is_set():
                raise _stopped(request)
        try:
            # Jobs that are cancelled as the run stops make room, which is not for further ones.
            if stopping.is_set():
                raise _stopped(request)
            yield
        finally:
            turn.release()


def _stopped(request: Request) -> StoppedError:
    return StoppedError(f"{request.place}: stopped while waiting for Slurm")


def _batch(request: Request, together: Sequence[_Wanted]) -> tuple[str, list[str], str]:
    """Name, options and program of one job, or of an array of several."""
    program = batch_program([each.values for each in together])
    # The program itself writes into the job's folder.
    options = ["--output=/dev/null", f"--chdir={Path.cwd()}"]
    if len(together) == 1:
        folder = together[0].folder
        folder.set_work(folder.name)
        return folder.name, options, program
    name = f"geb-{request.run}-{request.stage}-{len(together)}-{uuid.uuid4().hex[:6]}"
    for task, each in enumerate(together):
        each.folder.set_work(f"{name}_{task}")
    return name, [f"--array=0-{len(together) - 1}", *options], program


def _are_queued(together: Sequence[_Wanted]) -> bool:
    """True if Slurm has these jobs, whose numbers they get."""
    jobs = {each.work: each.id for each in client.own_jobs()}
    for each in together:
        each.job = jobs.get(each.folder.work())
    return all(each.job is not None for each in together)
