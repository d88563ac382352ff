"""The docker runner with a real engine: exit codes, events, limits, stopping, what is left."""

from pathlib import Path

import docker
import pytest

from flows.pipeline.placement import Execution
from flows.runners.docker.runner import DockerPlace
from stages.contract.errors import StageFailedError, StoppedError, UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import at_work
from tests.docker.containers import PROBE_IMAGE, container_of, logs_of, run, runner
from tests.probe_requests import probe_request
from tests.stage_calls import request_of

pytestmark = [pytest.mark.docker, pytest.mark.slow]


def test_a_stage_that_ends_well_leaves_its_artifact_and_its_events(store: Store) -> None:
    request = probe_request(store, message="hello", prints="noise from a library")
    heard = run(request)
    artifact = store.load("probe", request.key)
    assert artifact is not None
    assert (artifact.path / "result.txt").read_text() == "seed 0 hello"
    assert any(isinstance(each, Log) and each.message == "hello" for each in heard)
    assert any(isinstance(each, Progress) for each in heard)
    assert not any("noise" in each.model_dump_json() for each in heard)
    assert "noise from a library" in logs_of(store, request)
    assert not store.work_path("probe", request.key).exists()


def test_artifacts_belong_to_the_user_of_the_settings(store: Store) -> None:
    request = probe_request(store)
    run(request, user="12345:12346")
    artifact = store.load("probe", request.key)
    assert artifact is not None
    status = (artifact.path / "result.txt").stat()
    assert (status.st_uid, status.st_gid) == (12345, 12346)


def test_a_mistake_a_crash_and_a_kill_are_told_apart(store: Store) -> None:
    with pytest.raises(UserError, match="bad value 7"):
        run(probe_request(store, behaviour="refuse"))
    with pytest.raises(StageFailedError, match="RuntimeError: boom") as caught:
        run(probe_request(store, behaviour="crash"))
    assert any("Traceback" in line for line in caught.value.last_lines)
    with pytest.raises(StageFailedError, match="SIGKILL") as caught:
        run(probe_request(store, behaviour="kill_self"))
    assert "memory limit" not in str(caught.value)


def test_a_stage_out_of_memory_names_the_limit_and_the_setting(store: Store) -> None:
    request = probe_request(store, Resources(memory_gib=0.25), behaviour="eat_memory")
    with pytest.raises(StageFailedError, match=r"memory limit of 0\.25 GiB") as caught:
        run(request)
    assert "raise resources.probe.memory_gib" in str(caught.value)


def test_a_stage_that_takes_too_long_is_ended(store: Store) -> None:
    request = probe_request(store, Resources(timeout_seconds=2.0), behaviour="hang")
    with pytest.raises(StageFailedError, match="timeout_seconds=2"):
        run(request)
    assert store.lease("probe", request.key).holder() is None


@pytest.mark.parametrize("behaviour", ["hang", "ignore_sigterm", "leave_child"])
def test_stop_all_ends_the_container(store: Store, behaviour: str) -> None:
    request = probe_request(store, behaviour=behaviour)
    chosen = runner(grace_seconds=1.0)
    with at_work(request, chosen) as work:
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)
    assert list(store.artifacts()) == []
    assert store.lease("probe", request.key).holder() is None


def test_a_holder_in_a_container_counts_here_while_it_lives(
    store: Store, engine: docker.DockerClient
) -> None:
    """Its pid means nothing here; killed without a word, it frees its lease all the same."""
    request = probe_request(store, behaviour="hang")
    with at_work(request, runner()) as work:
        holder = store.lease("probe", request.key).holder()
        assert holder is not None
        assert holder["host"] == container_of(engine, request)["Config"]["Hostname"]
        engine.api.kill(container_of(engine, request)["Id"], "SIGKILL")
        assert isinstance(work.join(), StageFailedError)
        assert store.lease("probe", request.key).holder() is None


def test_gpus_are_asked_for_and_their_absence_is_named(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    with pytest.raises(UserError, match="could not select device driver") as caught:
        run(probe_request(store, Resources(gpus=1)))
    assert "resources.probe.gpus" in caught.value.remedy


def test_a_missing_image_is_named_with_the_command_that_builds_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.runners.images.geb_version", lambda: "0.0.7")
    with pytest.raises(UserError, match=r"no image geb-core:0\.0\.7") as caught:
        run(request_of(store), images={})
    assert "docker/build.sh core" in caught.value.remedy


def test_a_manifest_has_the_digest_of_its_image(store: Store, engine: docker.DockerClient) -> None:
    image_id = engine.images.get(PROBE_IMAGE).id
    for number, name in enumerate((PROBE_IMAGE, image_id)):
        request = probe_request(store, message=str(number))
        run(request, images={"probe": name})
        manifest = store.manifest("probe", request.key)
        assert manifest is not None
        assert manifest.software["image"] == f"{name}@{image_id}"


def test_without_an_engine_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(UserError, match="no Docker engine answers") as caught:
        DockerPlace(Execution())
    assert "DOCKER_HOST" in caught.value.remedy
