"""Health of a Slurm cluster: its commands, and for each kind of job one that tells what it sees."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from flows.pipeline.config import RunConfig
from flows.runners.health import Finding, faults_of, one_line, trial_request
from flows.runners.slurm import client
from flows.runners.slurm.job import default_interpreter, health_program, submit_options
from flows.runners.slurm.submission import check_job, mistake, stage_resources
from stages.contract.errors import GebError
from stages.contract.health import Health
from stages.contract.request import Request, Resources
from stages.contract.stores import location_of

_WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.5


def findings(config: RunConfig) -> Iterator[Finding]:
    """Looks at the cluster of a configuration; starts a job for each kind of stage."""
    try:
        version = client.version()
        jobs = client.own_jobs()
    except GebError as error:
        yield Finding("Slurm", False, one_line(error))
        return
    yield Finding(
        "Slurm", True, f"{version}; {sum(not each.is_over for each in jobs)} jobs of yours"
    )
    for stages, request in _kinds(config):
        yield _try_job(config, stages, request)


def _kinds(config: RunConfig) -> Iterator[tuple[list[str], Request]]:
    """Stages whose jobs differ in size alone, with a request for the smallest job of the kind."""
    kinds: dict[str, list[str]] = {}
    for stage, needs in stage_resources(config.resources):
        job = config.execution.slurm.job(stage)
        interpreter = default_interpreter(config.execution.interpreters, stage)
        kind = f"{job.model_dump_json()} {interpreter} {needs.gpus > 0}"
        kinds.setdefault(kind, []).append(stage)
    for stages in kinds.values():
        gpus = getattr(config.resources, stages[0]).gpus
        yield stages, trial_request(stages[0], Resources(gpus=min(1, gpus)))


def _try_job(config: RunConfig, stages: list[str], request: Request) -> Finding:
    name, execution = f"job of {', '.join(stages)}", config.execution
    store = Path(location_of(config.store))
    place = next(each for each in (store, *store.parents) if each.is_dir())
    try:
        for stage in stages:
            asked = trial_request(stage, getattr(config.resources, stage))
            check_job(asked, execution.slurm, execution.grace_seconds)
        with tempfile.TemporaryDirectory(prefix=".geb-doctor-", dir=place) as folder:
            job = _submit(config, request, Path(folder), store)
            return Finding(name, *_wait(job, request, Path(folder)))
    except (GebError, OSError) as error:
        return Finding(name, False, one_line(error))


def _submit(config: RunConfig, request: Request, folder: Path, store: Path) -> str:
    execution = config.execution
    options = submit_options(request, execution.slurm, execution.grace_seconds)
    interpreter = default_interpreter(execution.interpreters, request.stage)
    program = health_program(request, execution.slurm, interpreter, str(store), folder)
    done = client.submit(["--parsable", f"--output={folder / 'slurm.out'}", *options], program)
    if done.returncode:
        raise mistake(done.stderr, request, execution.slurm.job(request.stage))
    return done.stdout.strip().split(";")[0]


def _wait(job: str, request: Request, folder: Path) -> tuple[bool, str]:
    """Verdict on the place of a job, and the findings in words."""
    deadline, state = time.monotonic() + _WAIT_SECONDS, "PENDING"
    try:
        while time.monotonic() < deadline:
            if (folder / "done").exists():
                return _judge((folder / "health").read_text(), request, folder)
            jobs = {each.id: each for each in client.own_jobs()}
            found = jobs.get(job)
            state = f"{found.state} ({found.reason})" if found else "gone"
            if found is None or found.is_over:
                said = _last_line(folder / "slurm.out")
                return (
                    False,
                    f"job {job} is over ({state}) and left nothing in {folder.parent}: {said}",
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        client.cancel([job])
    return False, f"job {job} is {state} after {_WAIT_SECONDS:g} s; it was cancelled"


def _judge(text: str, request: Request, folder: Path) -> tuple[bool, str]:
    try:
        health = Health.model_validate_json(text)
    except ValidationError:
        return False, _last_line(folder / "slurm.out")
    faults = faults_of(
        health,
        ahead_seconds=health.time - time.time(),
        gpus=request.resources.gpus,
        other_code="correct execution.interpreters, or install this version for its Python",
    )
    wrong = "; ".join(faults)
    return not wrong, wrong or f"ran, sees the store and {health.gpus} GPUs"


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return lines[-1] if lines else "it said nothing"
