"""Pods that share no volume with their orchestrator: a store in a bucket that both reach."""

import os
import shutil
import uuid
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import PreemptedError
from stages.contract.request import Resources
from stages.store.opening import open_store
from tests.at_work import at_work
from tests.flows.loop import ROOT, geb_ok, plan, result_digests, write_config
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, THIS_MACHINE, kubectl
from tests.launchers.launcher import RESOURCES
from tests.object_storage import BUCKET, aws_environment, make_bucket, objects, s3_server
from tests.orchestrators import orchestrator
from tests.probe_stage import probe_request
from tests.programs import lacking

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def url(cluster, tmp_path, monkeypatch):
    """A store's place in a bucket that this machine and the pods reach.

    It takes no manifest while the file ``refusing`` of the test's folder exists.
    """
    if "K8S_TOP" not in os.environ:
        lacking("an address of this machine for pods: the cluster is not the tests' own")
    with s3_server(THIS_MACHINE, REFUSING=str(tmp_path / "refusing")) as port:
        for name, value in aws_environment(port, THIS_MACHINE).items():
            monkeypatch.setenv(name, value)
        # Not at a path that nodes see.
        monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))
        make_bucket()
        values = {name: os.environ[name] for name in CREDENTIALS}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "bucket"}}
        cluster.apply(secret | {"stringData": values})
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
        assert cluster.pods() == []


@pytest.fixture
def probes(cluster, url, tmp_path, probe_stage):
    """Execution in pods that see of this machine its programs and the probe, and an empty store."""
    open_store(url, create=True)
    environment = cluster.settings().environment | {"GEB_STORE_PATIENCE_SECONDS": "60"}
    for name, value in os.environ.items():
        if name.startswith("AWS_") and name not in CREDENTIALS:
            environment[name] = value
    settings = cluster.settings(
        tmp_path / "code",
        # The clients of object storage want certificates, which the tests' image has none of.
        Path("/etc/ssl"),
        environment=environment,
        # By reference, as from a cloud's secret.
        secrets={name: f"bucket/{name}" for name in CREDENTIALS},
    )
    return Execution(runner="kubernetes", kubernetes=settings, grace_seconds=5, sync_seconds=0.5)


def request_for(url, **params):
    """A probe of the store in the bucket."""
    request = probe_request(open_store(url), Resources(cpus=CPUS), **params)
    return request.model_copy(update={"store": url})


def test_the_loop_runs_without_a_shared_volume(probes, finished, tmp_path, url):
    # Prompts that no node sees, either.
    shutil.copytree(ROOT / "data/quickstart", tmp_path / "data", dirs_exist_ok=True)
    config = write_config(
        tmp_path,
        store=url,
        execution=probes.model_dump(mode="json", exclude_defaults=True),
        inputs={"prompts": str(tmp_path / "data/prompts.jsonl")},
        resources=RESOURCES,
    )
    geb_ok("run", config)
    assert result_digests(url) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {step["action"] for step in planned.values()} == {"reuse"}, "processes find it all"


def test_a_pod_that_is_killed_in_its_upload_leaves_no_half_artifact(cluster, url, probes, tmp_path):
    request = request_for(url, message="once")
    refusing = tmp_path / "refusing"
    refusing.touch()
    with at_work(request, make_runner(probes), lambda event: True) as work:
        wait_until(lambda: work.error or any(key.endswith("/result.txt") for key in objects(url)))
        assert work.error is None
        [pod] = cluster.pods()
        name = pod["metadata"]["name"]
        kubectl("-n", cluster.name, "delete", "pod", name, "--grace-period=0", "--force")
        error = work.join()
    assert isinstance(error, PreemptedError), error
    store = open_store(url)
    assert store.load("probe", request.key) is None
    refusing.unlink()
    make_runner(probes).run(request, lambda event: None)
    artifact = store.load("probe", request.key)
    store.verify(artifact)
    assert artifact.file("result.txt").read_text() == "seed 0 once"
    assert any(name.startswith("logs/probe/") for name in objects(url))


def test_state_goes_through_the_bucket_to_the_next_pod(cluster, url, probes):
    request = request_for(url, behaviour="hang_once")
    with at_work(request, runner := make_runner(probes)) as work:
        wait_until(
            lambda: work.error or any(name.endswith("snapshot.json") for name in objects(url))
        )
        runner.stop_all()
    make_runner(probes).run(request, lambda event: None)
    assert open_store(url).load("probe", request.key) is not None
    assert not any(name.startswith("work/") for name in objects(url))


def uids(pods):
    """Identities of pods, which their names alone are not."""
    return {pod["metadata"]["uid"] for pod in pods}


def test_a_pod_ends_without_signs_of_its_orchestrator(cluster, url, probes, tmp_path):
    request = request_for(url, behaviour="hang")
    with orchestrator(request, probes, folder=tmp_path):
        assert any(name.startswith("orchestrators/probe/") for name in objects(url))
    [pod] = cluster.pods()
    phase = ["get", "pod", pod["metadata"]["name"], "-o", "jsonpath={.status.phase}"]
    wait_until(lambda: kubectl("-n", cluster.name, *phase) == "Failed")
    with at_work(request, runner := make_runner(probes)):
        # The next attempt removes it.
        wait_until(lambda: pod["metadata"]["uid"] not in uids(cluster.pods()))
        runner.stop_all()
