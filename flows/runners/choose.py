"""The runner of a run, and the check whether its place would take the run's stages."""

import subprocess
import sys
from collections.abc import Collection
from importlib.metadata import entry_points
from pkgutil import resolve_name

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import RUNNER_GROUP, RUNNERS, Execution
from flows.pipeline.preflight import check_servers
from flows.runners.local.gpus import gpus_of_this_host, require_gpus
from flows.runners.place import PlaceAwayError
from flows.runners.runner import Runner
from flows.runners.slurm.submission import check_jobs
from stages.contract.errors import UserError


def check_place(config: RunConfig, stages: Collection[str]) -> None:
    """Checks, as far as that is known before a run, whether its ``stages`` can be started.

    Raises:
        UserError: A setting is one that the place will never serve.
        StageFailedError: The place does not answer.
    """
    resources = {name: limits for name, limits in config.resources if name in stages}
    if config.execution.runner == "docker" and "score" in stages:
        docker = config.execution.docker
        variables = {*docker.secrets.get("score", ()), *docker.environment.get("score", {})}
        check_servers(config, variables, has_network="score" in docker.network)
    if config.execution.runner == "slurm":
        check_jobs(config.execution, resources)
    if config.execution.runner == "kubernetes":
        from flows.runners.kubernetes.place import check_pods

        check_pods(config.execution, resources, config.store)


def check_host(config: RunConfig, stages: Collection[str]) -> None:
    """Refuses a run whose ``stages`` this host cannot take.

    Raises:
        UserError: Stages ask for more GPUs than it has, or for vLLM where it is not installed; its
            Docker engine does not answer, or its environment lacks a secret of a container.
    """
    runner = config.execution.runner
    if runner == "docker":
        from flows.runners.docker.container import connect
        from flows.runners.docker.place import secrets_for

        for stage in stages:
            secrets_for(config.execution.docker, stage)
        try:
            connect().close()
        except PlaceAwayError as error:
            remedy = "start it, allow this user to use its socket, or set DOCKER_HOST"
            raise UserError(str(error), remedy) from error
    if runner == "process" and "generate" in stages and config.generate.backend == "vllm":
        _require_vllm(config.execution.interpreters.get("generate", sys.executable))
    most = max((limits.gpus for name, limits in config.resources if name in stages), default=0)
    if most and runner == "process":
        require_gpus(most, gpus_of_this_host())


def _require_vllm(interpreter: str) -> None:
    program = "from importlib.util import find_spec; raise SystemExit(find_spec('vllm') is None)"
    if subprocess.run([interpreter, "-P", "-c", program], check=False).returncode != 0:
        raise UserError(
            f"generate.backend 'vllm' needs vLLM, which {interpreter} does not have",
            "run `make setup-vllm`, and set execution.interpreters.generate to "
            ".venv-vllm/bin/python",
        )


def make_runner(execution: Execution) -> Runner:
    """The runner that a configuration asks for.

    A place of another package is an entry point of the group ``geb.runners``: it takes the settings
    of execution and returns a :class:`~flows.runners.place.Place`.
    """
    if name := RUNNERS.get(execution.runner):
        make = resolve_name(name)
    else:
        [entry_point] = entry_points(group=RUNNER_GROUP, name=execution.runner)
        make = entry_point.load()
    return Runner(make(execution), execution)
