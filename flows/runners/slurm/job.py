"""A stage request as a Slurm job: options of sbatch and the text of the batch program. Pure."""

import math
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from flows.pipeline.placement import Execution
from flows.runners.command_lines import thread_variables
from flows.runners.place import node_commands
from stages.contract.request import Request

# Slurm may send the signal of --signal so much earlier than asked for.
_SIGNAL_EARLY_SECONDS = 60


def submit_options(request: Request, execution: Execution) -> list[str]:
    """Options of sbatch that say what the job may use; name, folder and output are not among them.

    Slurm sends the stage SIGTERM its grace period and half a minute before the time limit.
    """
    job = execution.slurm.job(request.stage)
    resources = request.resources
    memory = None if resources.memory_gib is None else f"{math.ceil(resources.memory_gib * 1024)}M"
    limits = {
        "partition": job.partition,
        "time": job.time_limit,
        "mem": memory,
        "gres": f"gpu:{resources.gpus}" if resources.gpus else None,
    }
    return [
        # None of the orchestrator's environment: its secrets would be in Slurm's spool.
        "--export=NONE",
        # A job is one attempt: the next one is a new job, at once and wherever there is room.
        "--no-requeue",
        f"--nodes={resources.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={math.ceil(resources.cpus or resources.devices)}",
        f"--signal=TERM@{math.ceil(execution.grace_seconds) + _SIGNAL_EARLY_SECONDS // 2}",
        *(f"--{name}={value}" for name, value in limits.items() if value is not None),
        *job.sbatch_options,
    ]


def batch_program(
    request: Request, execution: Execution, request_path: str, folder: Path, interpreter: str
) -> str:
    """Text of the batch program of a job, whose nodes find the request at ``request_path``."""
    job = execution.slurm.job(request.stage)
    # Where Slurm does not confine jobs to their devices, a stage without a GPU would see other
    # jobs' GPUs; srun takes the variable away from steps without GPUs.
    blind = [] if request.resources.gpus else ["/usr/bin/env", "CUDA_VISIBLE_DEVICES="]
    container = shlex.split(job.container or "")
    commands = node_commands(interpreter, request, execution, request_path)
    first, *others = [[*blind, *container, *command] for command in commands]
    other = others[0] if others else []
    variables = thread_variables(request.resources) | job.environment
    return "\n".join(
        [
            "#!/bin/bash",
            f"folder={shlex.quote(str(folder))}",
            f"grace={math.ceil(execution.grace_seconds)}",
            _array("first", first),
            _array("other", other),
            _array("srun_options", job.srun_options),
            "set_up() {",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            *(job.set_up or [":"]),
            "}",
            files(__package__).joinpath("job.sh").read_text(),
        ]
    )


def default_interpreter(execution: Execution, request: Request) -> str:
    """Python of a stage: the one that is named for it, a container's, or the orchestrator's."""
    in_container = execution.slurm.job(request.stage).container is not None
    default = "python" if in_container else sys.executable
    return execution.interpreters.get(request.stage, default)


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({shlex.join(words)})"
