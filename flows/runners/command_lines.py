"""Command lines of stages, their environment variables, and their time limit."""

from __future__ import annotations

import os

from stages.contract.request import Request, Resources

SUPERVISOR_SECONDS = 10
"""A stage is killed after its grace period; the supervisor needs a moment to see that through."""
# By default GNU OpenMP, which PyTorch has on CPUs, spins for milliseconds. When other
# programs were busy, a training took twice the CPU time, waiting for threads that did not run.
_SPIN_ROUNDS = "1000"
_SPIN_VARIABLE = "GOMP_SPINCOUNT"
# A variable with this prefix configures Prefect, and no stage talks to Prefect.
_OF_PREFECT = "PREFECT_"
# Where the store is in a bucket, the orchestrator alone talks to it.
_BUCKET = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_CLIENT_SECRET",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "GOOGLE_BEARER_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
)


def stage_environment(*, in_bucket: bool) -> dict[str, str]:
    """This process's variables without secrets; ``in_bucket`` also removes secrets of buckets."""
    # VIRTUAL_ENV: the stage's own Python must not resolve packages of the orchestrator's.
    left_out = {"VIRTUAL_ENV", *(_BUCKET if in_bucket else ())}
    return {
        name: value
        for name, value in os.environ.items()
        if name not in left_out and not name.startswith(_OF_PREFECT)
    }


def thread_variables(resources: Resources) -> dict[str, str]:
    """Environment variables for the threads of a stage's libraries.

    A limit of CPUs limits the libraries too. Threads that wait for each other spin for some
    microseconds only, unless the orchestrator's own environment says otherwise.
    """
    variables = {_SPIN_VARIABLE: os.environ.get(_SPIN_VARIABLE, _SPIN_ROUNDS)}
    if resources.cpus is not None:
        threads = str(max(1, int(resources.cpus)))
        variables |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    return variables


def preflight_request(stage: str, resources: Resources, store: str = "") -> Request:
    """A request for a stage's resources and nothing else, to ask whether a cluster takes it."""
    return Request(
        stage=stage,
        version="",
        params={},
        seed=0,
        inputs={},
        key="0" * 64,
        store=store,
        image="core",
        writes_registry=False,
        resources=resources,
    )


def module_command(python: str, *program: str) -> list[str]:
    """Command line of a module and its arguments.

    -P: Python must not import a folder `stages` of the user's current folder.
    """
    return [python, "-P", "-m", *program]


def supervised(python: str, grace_seconds: float, *options: str, program: list[str]) -> list[str]:
    """Command line of a program, module and arguments, under its supervisor.

    Both run in ``python``, by its path or name at their place. ``options`` are the supervisor's.
    """
    grace = ["--grace", str(grace_seconds)]
    supervisor = module_command(python, "stages.harness.supervisor", *grace, *options)
    return [*supervisor, "--", *module_command(python, *program)]


def stage_command(
    request: Request, path: str, python: str, grace_seconds: float, *options: str
) -> list[str]:
    """Command line of a stage, which sees its request at ``path``, under its supervisor."""
    seconds = request.resources.timeout_seconds
    limit = [] if seconds is None else ["--limit", str(seconds)]
    program = [f"stages.{request.stage}", path]
    return supervised(python, grace_seconds, *limit, *options, program=program)
