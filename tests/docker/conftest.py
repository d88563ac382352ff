"""The engine, and the images, built once."""

import pytest

from tests.docker.containers import build, docker_launcher
from tests.launchers.launcher import store as store


@pytest.fixture(scope="session")
def launcher():
    """Starts probes in containers."""
    with docker_launcher() as launcher:
        yield launcher


@pytest.fixture(scope="session")
def engine(launcher):
    return launcher.engine


@pytest.fixture(scope="session")
def images(engine):
    """All images of the CPU, of the code that is here."""
    build("core", "torch", "vllm")
