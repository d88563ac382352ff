"""Probes in containers: the images, built once, and what a test wants to know of the engine."""

import contextlib
import io
import os
import subprocess
import sys
import tarfile

from docker.errors import ImageNotFound

from flows.runners.docker.container import connect
from flows.runners.docker.options import KEY_LABEL, STORE_LABEL
from flows.runners.images import image_tags
from flows.runners.place import PlaceAwayError
from stages.contract.errors import StageFailedError
from stages.store.base import Store
from stages.store.locks import exclusive_lock
from tests.flows.loop import ROOT
from tests.launchers.launcher import Launcher, Mistake
from tests.probe_stage import MAIN
from tests.programs import lacking, run_program

PROBE_IMAGE = "geb-probe:test"
LOCAL_BASE = "geb-base:bookworm"


class Docker(Launcher):
    """Containers of this machine's engine, of the core image with the probe among its stages."""

    name = "docker"
    loss = StageFailedError, "SIGKILL"
    mistake = Mistake({"images": {"probe": "no:1"}}, "no image no:1", "docker/build.sh")

    def __init__(self, engine):
        self.engine = engine

    def settings(self, request=None, **changes):
        return {"docker": {"images": {"probe": PROBE_IMAGE}} | changes}

    def variables(self, values):
        """Settings with these environment variables for a probe."""
        return {"environment": {"probe": values}}

    def take_machine(self, work):
        [container] = self.containers(f"{KEY_LABEL}={work.request.key}")
        container.kill()

    def await_end(self, request, pids):
        for container in self.containers(
            f"{STORE_LABEL}={Store.in_folder(request.store).identity}"
        ):
            container.wait()

    def left(self, store):
        containers = self.containers(f"{STORE_LABEL}={store.identity}")
        return [container.name for container in containers]

    def containers(self, label):
        """Containers with a label, running or not."""
        return list(self.engine.containers.list(all=True, filters={"label": label}))

    def container_of(self, request):
        """Record of the one container that computes a request, from the engine."""
        [container] = self.containers(f"{KEY_LABEL}={request.key}")
        return dict(container.attrs)


@contextlib.contextmanager
def docker_launcher():
    """Containers of the engine that answers here."""
    try:
        engine = connect()
    except PlaceAwayError as error:
        lacking(str(error))
    with contextlib.closing(engine):
        _build_probe_image(engine)
        yield Docker(engine)


def build(*names):
    """Builds images as a person does; test processes take turns."""
    with exclusive_lock(ROOT / ".cache" / "test-images.lock"):
        command = (ROOT / "docker/build.sh", *names, "--build-arg", f"BASE={_base()}")
        done = run_program(*command, env=os.environ | {"PYTHON": sys.executable})
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def _base():
    """A base image that is here, or one that is made here: no registry has to be reachable."""
    if named := os.environ.get("GEB_BASE_IMAGE"):
        return named
    with contextlib.closing(connect()) as client:
        try:
            client.images.get(LOCAL_BASE)
        except ImageNotFound:
            subprocess.run([ROOT / "docker/make-base.sh", LOCAL_BASE], check=True)
    return LOCAL_BASE


def _build_probe_image(engine):
    """Builds the core image with the probe among its stages."""
    build("core")
    files = {
        "stages/probe/__init__.py": "",
        "stages/probe/__main__.py": MAIN,
        "tests/probe_stage.py": (ROOT / "tests/probe_stage.py").read_text(),
        "Dockerfile": f"FROM {image_tags('core', gpus=0)[0]}\nCOPY . /opt/code/\n",
    }
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    engine.images.build(fileobj=context, custom_context=True, tag=PROBE_IMAGE, rm=True)
