"""A stage request as a Slurm job: options of sbatch and the text of the batch program. Pure."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from flows.pipeline.placement import Execution, SlurmJobSettings, SlurmSettings, interpreter_of
from flows.runners.base import program_of, supervised, thread_variables
from flows.runners.place import KEY_CHARACTERS, orphan_seconds, sign_of
from stages.contract.request import Request
from stages.store.base import Store

# Slurm may send the signal of --signal so much earlier than asked for.
_SIGNAL_EARLY_SECONDS = 60


def computes(name: str, request: Request) -> bool:
    """True if a job of that name computes the request, in this store or another."""
    return re.search(rf"-{request.key[:KEY_CHARACTERS]}-[0-9a-f]{{6}}$", name) is not None


def submit_options(request: Request, settings: SlurmSettings, grace_seconds: float) -> list[str]:
    """Options of sbatch that say what the job may use; name, folder and output are not among them.

    ``grace_seconds`` and half a minute before its time limit the stage is told to end.
    """
    job, resources = settings.job(request.stage), request.resources
    gpu = "gpu" if job.gpu_type is None else f"gpu:{job.gpu_type}"
    memory = None if resources.memory_gib is None else f"{math.ceil(resources.memory_gib * 1024)}M"
    wanted = {
        "partition": job.partition,
        "account": job.account,
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
    execution: Execution,
    *,
    request_file: str,
    folder: Path,
    interpreter: str,
) -> str:
    """Text of the batch program.

    Args:
        request: What the job computes.
        execution: Holds the slurm runner's settings.
        request_file: The request, where the nodes see it.
        folder: The job's folder, where the nodes see it.
        interpreter: Python of the stage on the nodes.
    """
    job, grace_seconds = execution.slurm.job(request.stage), execution.grace_seconds
    container = shlex.split(job.container or "")
    # Where Slurm does not confine jobs to their devices, a stage without a GPU would see those of
    # others; srun takes the variable away from steps without GPUs.
    blind = [] if request.resources.gpus else ["env", "CUDA_VISIBLE_DEVICES="]

    def step(*program: str) -> list[str]:
        return [*blind, *container, *supervised(interpreter, grace_seconds, program=[*program])]

    work = Store.open(request.store).work_path(request.stage, request.key)
    orphan = orphan_seconds(execution.on_orchestrator_death)
    return "\n".join(
        [
            "#!/bin/bash",
            f"folder={shlex.quote(str(folder))}",
            f"grace={math.ceil(grace_seconds)}",
            f"orphan_seconds={math.ceil(orphan)}",
            f"sign_file={shlex.quote(str(sign_of(request.store, request.stage, request.key)))}",
            _array("first", step(*program_of(request, request_file))),
            _array("other", step("stages.training.node", str(work))),
            _array("srun_options", job.srun_options),
            *_set_up(request, job),
            files(__package__).joinpath("job.sh").read_text(),
        ]
    )


def default_interpreter(interpreters: Mapping[str, str], request: Request) -> str:
    """Python of a step: the orchestrator's unless one is named."""
    named = interpreter_of(interpreters, request.stage, request.image)
    # A relative path is meant from here, not from where a container starts.
    return str(Path(named).absolute()) if "/" in named else named


def _set_up(request: Request, job: SlurmJobSettings) -> list[str]:
    """Lines of a shell function that makes a job's environment."""
    environment = thread_variables(request.resources) | job.environment
    return [
        "set_up() {",
        *(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
        *(job.set_up or [":"]),
        "}",
    ]


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({shlex.join(words)})"
