"""The engine, and the images, built once."""

from collections.abc import Iterator

import docker
import pytest

from tests.docker.containers import Docker, build, docker_launcher
from tests.launchers.launcher import store as store


@pytest.fixture(scope="session")
def launcher() -> Iterator[Docker]:
    """Starts probes in containers."""
    with docker_launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def engine(launcher) -> docker.DockerClient:
    return launcher.engine


@pytest.fixture(scope="session")
def images(engine) -> None:
    """All images of the CPU, of the code that is here."""
    build("core", "torch", "vllm")
