"""The images, built once, and an image with the probe stage on top of one of them."""

import contextlib
import fcntl
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator

import docker
import pytest
from docker.errors import ImageNotFound

from flows.runners.docker.container import connect
from flows.runners.images import image_tags
from stages.contract.errors import UserError
from stages.store.base import Store
from tests.docker.containers import PROBE_IMAGE, left_of
from tests.flows.loop import ROOT
from tests.lacking import lacking
from tests.probe_stage import MAIN
from tests.programs import run_program

LOCAL_BASE = "geb-base:bookworm"


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    try:
        client = connect()
    except UserError as error:
        lacking(str(error))
    with contextlib.closing(client):
        yield client


@pytest.fixture(scope="session")
def images(engine: docker.DockerClient) -> None:
    """All images of the CPU, of the code that is here."""
    build("core", "torch", "vllm")


def build(*names: str) -> None:
    """Builds images as a person does; test processes take turns."""
    lock = ROOT / ".cache" / "test-images.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        command = (ROOT / "docker/build.sh", *names, "--build-arg", f"BASE={_base()}")
        done = run_program(*command, env=os.environ | {"PYTHON": sys.executable})
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def _base() -> str:
    """A base image that is here, or one that is made here: no registry has to be reachable."""
    if named := os.environ.get("GEB_BASE_IMAGE"):
        return named
    with contextlib.closing(connect()) as client:
        try:
            client.images.get(LOCAL_BASE)
        except ImageNotFound:
            subprocess.run([ROOT / "docker/make-base.sh", LOCAL_BASE], check=True)
    return LOCAL_BASE


@pytest.fixture(scope="session")
def probe_image(engine: docker.DockerClient) -> str:
    """The core image with the probe among its stages."""
    files = {"stages/probe/__init__.py": "", "stages/probe/__main__.py": MAIN}
    return build_upon(engine, "core", PROBE_IMAGE, files, "probe_stage")


def build_upon(
    engine: docker.DockerClient, base: str, tag: str, files: dict[str, str], *modules: str
) -> str:
    """Builds one of the images with more code, modules of the tests among it."""

    build(base)
    copied = {f"tests/{name}.py": (ROOT / f"tests/{name}.py").read_text() for name in modules}
    dockerfile = f"FROM {image_tags(base, gpus=0)[0]}\nCOPY . /opt/code/\n"
    files = {**files, **copied, "Dockerfile": dockerfile}
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    engine.images.build(fileobj=context, custom_context=True, tag=tag, rm=True)
    return tag


@pytest.fixture
def store(
    store: Store, probe_stage: None, engine: docker.DockerClient, probe_image: str
) -> Iterator[Store]:
    """A store, for probes in containers; none of its containers may be left after the test."""
    yield store
    assert left_of(engine, store) == []
