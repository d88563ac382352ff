"""The docker runner with a real engine: users, leases, GPUs, images."""

import gc
from pathlib import Path

import psutil
import pytest

from flows.pipeline.config import RunConfig
from flows.pipeline.placement import Execution
from flows.runners.choose import check_host
from stages.contract.errors import UserError
from stages.contract.request import Resources
from tests.docker.containers import PROBE_IMAGE

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_artifacts_belong_to_the_user_of_the_settings(launcher, store):
    request = launcher.request(store)
    launcher.run(request, user="12345:12346")
    artifact = store.load("probe", request.key)
    status = (artifact.path / "result.txt").stat()
    assert (status.st_uid, status.st_gid) == (12345, 12346)


def test_no_connection_to_the_engine_waits_for_the_garbage_collector(launcher, store):
    process = psutil.Process()
    before = len(process.net_connections(kind="unix"))
    gc.disable()
    try:
        launcher.run(launcher.request(store))
        assert len(process.net_connections(kind="unix")) == before
    finally:
        gc.enable()


def test_gpus_are_asked_for_and_their_absence_is_named(launcher, store, tmp_path, monkeypatch):
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    with pytest.raises(UserError, match="could not select device driver") as caught:
        launcher.run(launcher.request(store, Resources(gpus=1)))
    assert "resources.probe.gpus" in caught.value.remedy


def test_a_manifest_has_the_digest_of_its_image(launcher, store, engine):
    image_id = engine.images.get(PROBE_IMAGE).id
    for number, name in enumerate((PROBE_IMAGE, image_id)):
        request = launcher.request(store, message=str(number))
        launcher.run(request, images={"probe": name})
        manifest = store.manifest("probe", request.key)
        assert manifest.software["image"] == f"{name}@{image_id}"


def test_without_an_engine_it_says_so(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(UserError, match="no Docker engine answers") as caught:
        check_host(RunConfig(execution=Execution(runner="docker")), {"train"})
    assert "DOCKER_HOST" in caught.value.remedy
