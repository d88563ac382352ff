"""A stage request as a Slurm job: options of sbatch and the text of the batch program. Pure."""

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import stages.contract
from flows.pipeline.placement import Execution, SlurmJobSettings, SlurmSettings, interpreter_of
from flows.runners.base import module_command, thread_variables
from flows.runners.place import KEY_CHARACTERS, fetching_variables, node_commands
from flows.runners.slurm.folder import JobFolder
from stages.contract.request import FileInput, Request
from stages.store.opening import CACHE_VARIABLE

_ROOT = Path(stages.contract.__file__).parents[2]
# Code that is installed has its packages beside it, which are no matter for an image.
_CODE = _ROOT if (_ROOT / "pyproject.toml").exists() else None
# Variables with folders of models and data sets, which outlast a job.
_CACHES = ("HF_HOME", "HF_HUB_CACHE", "TRANSFORMERS_CACHE", CACHE_VARIABLE)
# Slurm may send the signal of --signal so much earlier than asked for.
_SIGNAL_EARLY_SECONDS = 60


def computes(name: str, request: Request) -> bool:
    """True if a job of that name computes the request, in this store or another."""
    return re.search(rf"-{request.key[:KEY_CHARACTERS]}-[0-9a-f]{{6}}$", name) is not None


def submit_options(request: Request, settings: SlurmSettings, grace_seconds: float) -> list[str]:
    """Options of sbatch that say what the job may use; name, folder and output are not among them.

    ``grace_seconds`` and half a minute before its time limit the stage is told to end.
    """
    job = settings.job(request.stage)
    resources = request.resources
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


def folder_on_node(folder: JobFolder, job: SlurmJobSettings) -> Path:
    """Place of a job's folder on its nodes: the same, unless they do not see that."""
    if not folder.address:
        return folder.path
    return Path(job.environment.get("TMPDIR", "/tmp")) / folder.name


def job_values(
    request: Request, execution: Execution, address: str, folder: JobFolder, interpreter: str
) -> str:
    """Values of one job in its batch program; ``address`` is where its nodes find the request."""
    job = execution.slurm.job(request.stage)
    place = folder_on_node(folder, job)
    cache = job.environment.get(CACHE_VARIABLE, str(place / "cache"))
    root = str(place) if folder.address else request.store
    container, srun_options = _container(request, execution, root)
    # Where Slurm does not confine jobs to their devices, a stage without a GPU would see those of
    # others; srun takes the variable away from steps without GPUs.
    blind = [] if request.resources.gpus else ["env", "CUDA_VISIBLE_DEVICES="]
    commands = node_commands(interpreter, request, execution, address, cache)
    first, other, *_ = [[*blind, *container, *each] for each in commands] + [[]]
    sender = list[str]()
    variables = thread_variables(request.resources)
    if folder.address:
        variables |= fetching_variables(execution, cache)
        sender = [*container, *module_command(interpreter, "stages.harness.job_files")]
        sender += [folder.address, str(place)]
        if srun_options:
            # A step alone gets into a container of srun's.
            step = ["srun", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1"]
            sender = [*step, *srun_options, *sender]
    variables |= job.environment
    return "\n".join(
        [
            f"folder={shlex.quote(str(place))}",
            f"grace={math.ceil(execution.grace_seconds)}",
            _array("first", first),
            _array("other", other),
            _array("sender", sender),
            _array("srun_options", [*srun_options, *job.srun_options]),
            "set_up() {",
            *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()),
            *(job.set_up or [":"]),
            "}",
        ]
    )


def batch_program(jobs: Sequence[str]) -> str:
    """Text of the batch program of one job, or of an array of several, by their values."""
    values = [*jobs]
    if len(jobs) > 1:
        tasks = [f"{number})\n{each}\n;;" for number, each in enumerate(jobs)]
        values = ["case $SLURM_ARRAY_TASK_ID in", *tasks, "esac"]
    return "\n".join(["#!/bin/bash", *values, files(__package__).joinpath("job.sh").read_text()])


def _container(request: Request, execution: Execution, root: str) -> tuple[list[str], list[str]]:
    """Command before the stage's, and options of srun, that start it in the job's image.

    It writes into the folder ``root``.
    """
    job = execution.slurm.job(request.stage)
    command = shlex.split(job.container or "")
    if job.image is None:
        return command, []
    sources = [_CODE] if _CODE is not None and execution.sees(_CODE) else []
    mounts = ",".join(_mounts(request, job, sources, root))
    # An image of this project has code of its own, which may be older.
    code = ["env", f"PYTHONPATH={job.environment.get('PYTHONPATH', _CODE)}"] if sources else []
    if job.image_by == "pyxis":
        options = [f"--container-image={job.image}", f"--container-mounts={mounts}"]
        return [*command, *code], options
    gpus = ["--nv"] if request.resources.gpus else []
    return [*command, "apptainer", "exec", *gpus, "--bind", mounts, job.image, *code], []


def _mounts(
    request: Request, job: SlurmJobSettings, code: Sequence[Path], root: str
) -> Iterator[str]:
    """Folders of the node that a stage in an image sees, each at its own path."""
    inputs = [each.location for each in request.sources() if isinstance(each, FileInput)]
    caches = [job.environment[name] for name in _CACHES if name in job.environment]
    for path in dict.fromkeys((*map(str, code), *inputs)):
        # What is in a bucket is fetched.
        if "://" not in path:
            yield f"{path}:{path}:ro"
    for path in dict.fromkeys((root, *caches)):
        yield f"{path}:{path}"


def default_interpreter(
    interpreters: Mapping[str, str], request: Request, *, in_image: bool = False
) -> str:
    """Python of a step unless one is named: the image's, or the orchestrator's."""
    if in_image and not interpreters.keys() & {request.stage, request.image}:
        return "python"
    named = interpreter_of(interpreters, request.stage, request.image)
    # A relative path is meant from here, not from where a container starts.
    return str(Path(named).absolute()) if "/" in named else named


def _array(name: str, words: Sequence[str]) -> str:
    return f"{name}=({shlex.join(words)})"
