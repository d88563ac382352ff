"""The launchers, each once for a module."""

import pytest

from tests.launchers.launcher import Process
from tests.launchers.launcher import store as store


@pytest.fixture(scope="module")
def launcher(request, tmp_path_factory):
    """A launcher, whose cluster or engine is started if none is there."""
    # Clients of clusters load when they are used.
    match request.param:
        case "docker":
            from tests.docker.containers import docker_launcher

            with docker_launcher() as docker:
                yield docker
        case "slurm":
            from tests.slurm.jobs import slurm_launcher

            with slurm_launcher() as slurm:
                yield slurm
        case "kubernetes":
            from tests.kubernetes.pods import kubernetes_launcher, nodes_in_use

            with (
                nodes_in_use(tmp_path_factory),
                kubernetes_launcher(tmp_path_factory) as kubernetes,
            ):
                yield kubernetes
        case "process" | "fork server" as name:
            yield Process(fork_server=name == "fork server")
        case name:
            pytest.fail(f"no launcher is made for {name!r}")
