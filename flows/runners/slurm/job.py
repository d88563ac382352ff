"""A stage request as a Slurm job: options of sbatch and the text of the batch program. Pure."""

from __future__ import annotations

import math
import re
import shlex
import uuid
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from flows.pipeline.placement import interpreter_of
from flows.pipeline.slurm import SlurmSettings
from flows.runners.base import supervised, thread_variables
from stages.contract.local_store import LocalStore
from stages.contract.request import Request

# Slurm may send the signal of --signal so much earlier than asked for.
_SIGNAL_EARLY_SECONDS = 60
_KEY_CHARACTERS = 12


def new_name(request: Request) -> str:
    """Name of a new job, by which :func:`computes` finds it in the queue."""
    place = re.sub(r"[^a-zA-Z0-9.-]+", "-", request.place)
    key = request.key[:_KEY_CHARACTERS]
    return f"geb-{request.run}-{place}-{key}-{uuid.uuid4().hex[:6]}"


def computes(name: str, request: Request) -> bool:
    """True where a job of that name computes the request, in this store or another."""
    return re.search(rf"-{request.key[:_KEY_CHARACTERS]}-[0-9a-f]{{6}}$", name) is not None


def submit_options(request: Request, settings: SlurmSettings, grace_seconds: float) -> list[str]:
    """Options of sbatch that say what the job may use; name, folder and output are not among them.

    Args:
        request: Its resources are asked for.
        settings: The slurm runner's settings.
        grace_seconds: Time that a stage has to end: it is told so long before its time limit.
    """
    job, resources = settings.job(request.stage), request.resources
    gpu = "gpu" if job.gpu_type is None else f"gpu:{job.gpu_type}"
    memory = None if resources.memory_gib is None else f"{math.ceil(resources.memory_gib * 1024)}M"
    wanted = {
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "time": job.time_limit,
        "mem": memory,
        "gres": f"{gpu}:{resources.gpus}" if resources.gpus else None,
    }
    return [
        # None of the orchestrator's environment: its secrets would be in Slurm's spool.
        "--export=NONE",
        # A job is one attempt: the next one is a new job, at once and wherever there is room.
        "--no-requeue",
        f"--nodes={resources.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={math.ceil(resources.cpus or resources.processes)}",
        f"--signal=TERM@{math.ceil(grace_seconds) + _SIGNAL_EARLY_SECONDS // 2}",
        *(f"--{name}={value}" for name, value in wanted.items() if value is not None),
        *job.sbatch_options,
    ]


def batch_program(
    request: Request,
    settings: SlurmSettings,
    *,
    request_file: str,
    folder: Path,
    interpreter: str,
    grace_seconds: float,
) -> str:
    """Text of the batch program.

    Args:
        request: What the job computes.
        settings: The slurm runner's settings.
        request_file: The request, where the nodes see it.
        folder: The job's folder, where the nodes see it.
        interpreter: Python of the stage on the nodes.
        grace_seconds: Time between SIGTERM and SIGKILL when a stage is stopped.
    """
    job = settings.job(request.stage)
    container = shlex.split(job.container or "")
    # Where Slurm does not confine jobs to their devices, a stage without a GPU would see those of
    # others; srun takes the variable away from steps without GPUs.
    blind = [] if request.resources.gpus else ["env", "CUDA_VISIBLE_DEVICES="]

    def step(*program: str) -> list[str]:
        return [*blind, *container, *supervised(interpreter, grace_seconds, program=[*program])]

    work = LocalStore.open(request.store).work_path(request.stage, request.key)
    orphan = settings.orchestrator_seconds if settings.on_orchestrator_death == "stop" else 0
    return "\n".join(
        [
            "#!/bin/bash",
            f"folder={shlex.quote(str(folder))}",
            f"grace={math.ceil(grace_seconds)}",
            f"orphan_seconds={math.ceil(orphan)}",
            _array("first", step(f"stages.{request.stage}", request_file)),
            _array("other", step("stages.training.node", str(work))),
            _array("srun_options", job.srun_options),
            *_set_up(request, settings),
            files(__package__).joinpath("job.sh").read_text(),
        ]
    )


def health_program(
    request: Request, settings: SlurmSettings, interpreter: str, store: str, folder: Path
) -> str:
    """Text of a batch program that leaves in ``folder`` what a step finds where it runs.

    Args:
        request: Names the stage whose settings are tried.
        settings: The slurm runner's settings.
        interpreter: Python of the stage on the nodes.
        store: Root of the store.
        folder: For the files ``health`` and, written last, ``done``.
    """
    job = settings.job(request.stage)
    options = ["--export=ALL", *job.srun_options]
    container = shlex.split(job.container or "")
    program = [*container, interpreter, "-m", "stages.contract.health", store]
    return "\n".join(
        [
            "#!/bin/bash",
            f"folder={shlex.quote(str(folder))}",
            *_set_up(request, settings),
            "set_up",
            f'srun {shlex.join([*options, *program])} > "$folder/health"',
            'touch "$folder/done"',
            "",
        ]
    )


def default_interpreter(interpreters: Mapping[str, str], stage: str, image: str = "") -> str:
    """Python of a step of a stage that needs an image: the orchestrator's unless one is named."""
    named = interpreter_of(interpreters, stage, image)
    # A relative path is meant from here, not from where a container starts.
    return str(Path(named).absolute()) if "/" in named else named


def _set_up(request: Request, settings: SlurmSettings) -> list[str]:
    """Lines of a shell function that makes a job's environment."""
    job = settings.job(request.stage)
    environment = thread_variables(request.resources) | job.environment
    return [
        "set_up() {",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *(job.set_up or [":"]),
        "}",
    ]


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({shlex.join(words)})"
