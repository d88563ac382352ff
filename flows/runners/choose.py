"""The table of runners, and what the command ``geb doctor`` asks of the places behind them."""

from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import ON_THIS_MACHINE, RUNNER_GROUP, Execution, runner_names
from flows.runners.base import Runner
from flows.runners.health import Finding, one_line, stage_findings
from flows.runners.local.bucket_sync import BucketSyncRunner
from flows.runners.local.gpus import gpus_of_this_host
from flows.runners.local.process import ProcessRunner
from flows.runners.place import Place, PlaceRunner
from flows.runners.slurm.runner import SlurmPlace
from flows.runners.slurm.submission import check_jobs
from stages.contract.errors import GebError, NoStoreError, UserError
from stages.contract.params import Settings
from stages.store.opening import open_store


def _docker(execution: Execution) -> Place[Any]:
    # Here, so that a run without containers does not load the engine's client.
    from flows.runners.docker.runner import DockerPlace

    return DockerPlace(execution, limited=True)


def _kubernetes(execution: Execution) -> Place[Any]:
    # Here: only these runs need the cluster's client.
    from flows.runners.kubernetes.runner import KubernetesPlace

    return KubernetesPlace(execution)


RUNNERS: Mapping[str, Callable[[Execution], Runner | Place[Any]]] = {
    "process": lambda execution: ProcessRunner(execution, limited=True),
    "docker": _docker,
    "kubernetes": _kubernetes,
    "slurm": SlurmPlace,
}


def check_place(execution: Execution, resources: Settings, store: str) -> None:
    """Checks, as far as that is known before a run, whether its stages can be started.

    Raises:
        UserError: A setting is one that the place will never serve.
        StageFailedError: The place does not answer.
    """
    if execution.runner in ON_THIS_MACHINE:
        _require_gpus_beside_servers(resources)
    if execution.runner == "slurm":
        check_jobs(execution, resources)
    if execution.runner == "kubernetes":
        from flows.runners.kubernetes.runner import check_pods

        check_pods(execution, resources, store)


def _require_gpus_beside_servers(resources: Settings) -> None:
    """Refuses a server beside which a stage would wait for its GPUs as long as the run lasts."""
    asked = {name: getattr(resources, name).gpus for name in type(resources).model_fields}
    server, most = asked.pop("serve", 0), max(asked.values())
    # Without any this is not where the run will be; there the runner refuses.
    if server and 0 < (has := len(gpus_of_this_host())) < server + most:
        raise UserError(
            f"resources.serve.gpus takes {server} GPUs while the run lasts, and another stage "
            f"takes {most} beside them; this host has {has}",
            "lower one of them, or serve the model elsewhere and set score.judge.url",
        )


def make_runner(execution: Execution) -> Runner:
    """The runner that a configuration asks for.

    A runner of another package is an entry point of the group ``geb.runners``: it takes the
    settings of execution and returns a :class:`~flows.runners.place.Place`, or a whole runner.
    """
    if (make := RUNNERS.get(execution.runner)) is None:
        [found] = entry_points(group=RUNNER_GROUP, name=execution.runner)
        make = found.load()
    place: Any = make(execution)
    runner = PlaceRunner(place) if hasattr(place, "find") else place
    # A place of another package says by itself what its stages see of this host.
    return BucketSyncRunner(runner, execution.sync_seconds, getattr(place, "sees", execution.sees))


def runner_findings(runner: str, config: RunConfig) -> Iterator[Finding]:
    """Looks at the place of a runner, as configured; UserError if that is this machine alone."""
    execution = config.execution.model_copy(update={"runner": runner})
    places: dict[str, Callable[[str], Settings]] = {
        "kubernetes": execution.kubernetes.pod_of,
        "slurm": execution.slurm.job,
    }
    elsewhere = [each for each in runner_names() if each not in ON_THIS_MACHINE]
    if runner not in elsewhere:
        raise UserError(
            f"--runner {runner}: no such place beyond this machine",
            f"one of: {', '.join(elsewhere)}",
        )
    try:
        check_place(execution, config.resources, config.store)
        make_runner(execution)
    except GebError as error:
        yield Finding(runner, False, one_line(error))
        return
    yield Finding(runner, True, "answers, and takes what is configured")
    # A runner of another package has no settings of single stages that this one knows.
    settings_of = places.get(runner, lambda stage: Settings())
    config = config.model_copy(update={"execution": execution})
    yield from stage_findings(lambda: make_runner(execution), config, settings_of)


def reap_for(runner: str | None, config: RunConfig) -> list[str]:
    """Removes what dead orchestrators left with a runner, also what was to outlive them.

    Without a name: containers of this machine, if it has a Docker engine. Returns a line for each.

    Raises:
        UserError: This runner leaves nothing, or the place that is named does not answer.
    """
    if runner == "kubernetes":
        from flows.runners.kubernetes.client import Cluster
        from flows.runners.kubernetes.runner import reap

        return reap(Cluster(config.execution.kubernetes), keep_running=False)
    if runner == "slurm":
        from flows.runners.slurm.folder import sweep

        try:
            return sweep(open_store(config.store), cancel=True)
        except NoStoreError as error:
            return [f"jobs were not looked for: {error}"]
    if runner in (None, "docker"):
        from flows.runners.docker.container import reap as reap_containers

        try:
            return reap_containers()
        except UserError as error:
            if runner is None:
                return [f"containers were not looked for: {error}"]
            raise
    raise UserError(f"--reap --runner {runner}: stages of this runner leave nothing")
