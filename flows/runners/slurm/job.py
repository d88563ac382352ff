"""A stage request as a Slurm job: options of sbatch and the text of the batch program. Pure."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import stages.contract
from flows.pipeline.placement import Execution, SlurmJobSettings, SlurmSettings, interpreter_of
from flows.runners.base import program_of, supervised, thread_variables
from flows.runners.place import KEY_CHARACTERS, orphan_seconds, sign_of
from flows.runners.slurm.folder import PROGRAM_FILE
from stages.contract.request import FileInput, Request
from stages.store.base import Store

_ROOT = Path(stages.contract.__file__).parents[2]
# Code that is installed has its packages beside it, which are no matter for an image.
_CODE = _ROOT if (_ROOT / "pyproject.toml").exists() else None
# Variables with folders of models and data sets, which outlast a job.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "TRANSFORMERS_CACHE")
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
    request: Request, execution: Execution, *, request_file: str, folder: Path, interpreter: str
) -> str:
    """Text of the batch program; files and interpreter are where the nodes see them."""
    job, grace_seconds = execution.slurm.job(request.stage), execution.grace_seconds
    container, srun_options = _container(request, job)
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
            _array("srun_options", [*srun_options, *job.srun_options]),
            *_set_up(request, job),
            files(__package__).joinpath("job.sh").read_text(),
        ]
    )


def _container(request: Request, job: SlurmJobSettings) -> tuple[list[str], list[str]]:
    """Command before the stage's, and options of srun, that start it in the job's image."""
    command = shlex.split(job.container or "")
    if job.image is None:
        return command, []
    mounts = ",".join(_mounts(request, job))
    # An image of this project has code of its own, which may be older.
    code = ["env", f"PYTHONPATH={job.environment.get('PYTHONPATH', _CODE)}"] if _CODE else []
    if job.image_by == "pyxis":
        options = [f"--container-image={job.image}", f"--container-mounts={mounts}"]
        return [*command, *code], options
    gpus = ["--nv"] if request.resources.gpus else []
    return [*command, "apptainer", "exec", *gpus, "--bind", mounts, job.image, *code], []


def _mounts(request: Request, job: SlurmJobSettings) -> Iterator[str]:
    """Folders of the node that a stage in an image sees, each at its own path."""
    inputs = [each.location for each in request.sources() if isinstance(each, FileInput)]
    caches = [job.environment[name] for name in _CACHES if name in job.environment]
    for path in dict.fromkeys((*([str(_CODE)] if _CODE else []), *inputs)):
        yield f"{path}:{path}:ro"
    for path in dict.fromkeys((request.store, *caches)):
        yield f"{path}:{path}"


def array_program(folders: Sequence[Path]) -> str:
    """Text of the batch program of an array, each of whose tasks runs the program of its folder."""
    return "\n".join(
        [
            "#!/bin/bash",
            _array("folders", [str(each) for each in folders]),
            "folder=${folders[$SLURM_ARRAY_TASK_ID]}",
            f'exec bash "$folder/{PROGRAM_FILE}" >"$folder/slurm.out" 2>&1',
            "",
        ]
    )


def default_interpreter(
    interpreters: Mapping[str, str], request: Request, *, in_image: bool = False
) -> str:
    """Python of a step unless one is named: the image's, or the orchestrator's."""
    if in_image and not interpreters.keys() & {request.stage, request.image}:
        return "python"
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
