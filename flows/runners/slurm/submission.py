"""Submission of jobs, one at a time for each of Slurm's queues.

A queue that is full is asked for room once in a poll, and holds up no jobs for others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from flows.pipeline.slurm import SlurmSettings
from flows.runners.base import OnEvent, log_once
from flows.runners.slurm import client
from flows.runners.slurm.client import SlurmUnavailableError
from flows.runners.slurm.job import submit_options
from flows.runners.slurm.preflight import check_job
from flows.runners.slurm.refusals import meaning_of, mistake
from stages.contract.errors import StoppedError
from stages.contract.request import Request

_LOOK_SECONDS = 0.5
# A moment's wait for the others is not worth a line in the log.
_PATIENT_LOOKS = 10


class Submitter:
    """Submits jobs of an orchestrator.

    Args:
        settings: Partitions, accounts and limits of jobs.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
        stopping: Set when no further job shall be submitted.
        has_live: Whether jobs of the orchestrator are known to be in the queue.
    """

    def __init__(
        self,
        settings: SlurmSettings,
        grace_seconds: float,
        stopping: threading.Event,
        has_live: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._grace_seconds = grace_seconds
        self._stopping = stopping
        self._has_live = has_live
        self._turns: dict[tuple[object, ...], threading.Lock] = {}
        self._checked: set[tuple[str, ...]] = set()
        self._lost: set[str] = set()

    def submit(
        self, request: Request, name: str, options: Sequence[str], program: str, on_event: OnEvent
    ) -> str:
        """Submits a job, when Slurm takes it, and returns its number.

        Args:
            request: The stage that the job computes.
            name: Name of the job, which no other one has.
            options: Options of sbatch beside those that settings and resources ask for.
            program: Text of the batch program.
            on_event: Gets the reason for a wait.

        Raises:
            UserError: Slurm would never run it.
            StoppedError: The run stops while Slurm takes no job.
        """
        asked = submit_options(request, self._settings, self._grace_seconds)
        command = ["--parsable", f"--job-name={name}", *options, *asked]
        say = log_once(on_event)
        turn = self._turn_of(request)
        self._await(turn, request, say)
        try:
            # Jobs that are cancelled as the run stops make room, which is not for further ones.
            if self._stopping.is_set():
                raise self._stopped(request)
            self._check(request, tuple(asked))
            while (job := self._try(request, name, command, program, say)) is None:
                if self._stopping.wait(self._settings.poll_seconds):
                    raise self._stopped(request)
            return job
        finally:
            turn.release()

    def _turn_of(self, request: Request) -> threading.Lock:
        """The turn of all jobs to which the same limits of Slurm apply."""
        job = self._settings.job(request.stage)
        queue = (job.partition, job.account, job.qos, *job.sbatch_options)
        return self._turns.setdefault(queue, threading.Lock())

    def _await(self, turn: threading.Lock, request: Request, say: Callable[[str], None]) -> None:
        looks = 0
        while not turn.acquire(timeout=_LOOK_SECONDS):
            looks += 1
            if self._stopping.is_set():
                raise self._stopped(request)
            if looks > _PATIENT_LOOKS:
                say("waiting for its turn: other jobs of this run are submitted first")

    def _check(self, request: Request, asked: tuple[str, ...]) -> None:
        """Checks what jobs ask for, once for all that ask for the same."""
        if asked not in self._checked:
            check_job(request, self._settings, self._grace_seconds)
            self._checked.add(asked)

    def _try(
        self,
        request: Request,
        name: str,
        command: Sequence[str],
        program: str,
        say: Callable[[str], None],
    ) -> str | None:
        """Number of the new job; None where Slurm takes none now."""
        try:
            # An answer that was lost may be that of a job that was taken.
            if name in self._lost and (job := _number_of(name)) is not None:
                return job
            self._lost.discard(name)
            done = client.submit(command, program)
            if done.returncode == 0:
                return done.stdout.strip().split(";")[0]
            said = done.stderr
            meaning = meaning_of(said)
            # Without a job in the queue, whose end would make room, there never will be any.
            if meaning == "mistake" or (meaning == "full" and not self._has_jobs()):
                raise mistake(said, request, self._settings.job(request.stage))
        except SlurmUnavailableError as error:
            said, meaning = str(error), "busy"
        say(f"Slurm takes no job now, trying again: {said.strip()}")
        if meaning == "busy":
            self._lost.add(name)
        return None

    def _has_jobs(self) -> bool:
        return self._has_live() or any(not each.is_over for each in client.own_jobs())

    def _stopped(self, request: Request) -> StoppedError:
        return StoppedError(f"{request.place}: stopped while waiting for Slurm")


def _number_of(name: str) -> str | None:
    """Number of the job of a name, which may be over by now."""
    return next((each.id for each in client.own_jobs() if each.name == name), None)
