"""Pods that share no volume with their orchestrator: a store in a bucket that both reach."""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution, KubernetesSettings
from flows.runners.choose import make_runner
from stages.contract.errors import PreemptedError
from stages.contract.request import Request, Resources
from stages.store.opening import open_store
from tests.at_work import at_work
from tests.flows.loop import ROOT, geb, geb_ok, plan, result_digests, write_config
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, THIS_MACHINE, Namespace, kubectl
from tests.kubernetes.pods import execution
from tests.kubernetes.test_kubernetes_loop import RESOURCES, section
from tests.lacking import lacking
from tests.object_storage import BUCKET, aws_environment, make_bucket, objects, s3_server
from tests.orchestrators import orchestrator
from tests.probe_requests import probe_request

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

# Pods have them by reference, as from a cloud's secret.
SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def refusing(tmp_path: Path) -> Path:
    """While this file exists, the bucket takes no manifest."""
    return tmp_path / "refusing"


@pytest.fixture
def url(
    cluster: Namespace, tmp_path: Path, refusing: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A store's place in a bucket that this machine and the pods reach."""
    if "K8S_TOP" not in os.environ:
        lacking("an address of this machine for pods: the cluster is not the tests' own")
    with s3_server(THIS_MACHINE, REFUSING=str(refusing)) as port:
        for name, value in aws_environment(port, THIS_MACHINE).items():
            monkeypatch.setenv(name, value)
        # Not at a path that pods see.
        monkeypatch.setenv("GEB_CACHE", str(tmp_path / "cache"))
        make_bucket()
        values = {name: os.environ[name] for name in SECRETS}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "bucket"},
                "stringData": values,
            }
        )
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}"
        assert cluster.pods() == []


def settings(cluster: Namespace, *folders: Path) -> KubernetesSettings:
    """Settings of pods that see of this machine its programs, and these folders of code."""
    reach = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    reach = {name: value for name, value in reach.items() if name not in SECRETS}
    reach |= {"GEB_STORE_PATIENCE_SECONDS": "60"}
    return cluster.settings(
        *folders,
        # The clients of object storage want certificates, which the tests' image has none of.
        Path("/etc/ssl"),
        environment=cluster.settings().environment | reach,
        secrets={name: {"name": "bucket", "key": name} for name in SECRETS},
    )


@pytest.fixture
def probes(cluster: Namespace, url: str, tmp_path: Path, probe_stage: None) -> Execution:
    """Execution of probes in pods, and an empty store."""
    open_store(url, create=True)
    return execution(settings(cluster, tmp_path / "code"), 5, sync_seconds=0.5)


def request_for(url: str, **params: str) -> Request:
    store = open_store(url)
    request = probe_request(store, Resources(cpus=CPUS), **params)
    return request.model_copy(update={"store": url})


def test_the_loop_runs_without_a_shared_volume(
    cluster: Namespace, finished: Path, tmp_path: Path, url: str
) -> None:
    # Prompts that no pod sees, either.
    shutil.copytree(ROOT / "data/quickstart", tmp_path / "data")
    chosen = section(settings(cluster))
    config = write_config(
        tmp_path,
        store=url,
        execution=chosen,
        resources=RESOURCES,
        inputs={"prompts": str(tmp_path / "data/prompts.jsonl")},
    )
    geb_ok("run", config)
    assert result_digests(url) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"
    done = geb("doctor", "--runner", "kubernetes", "--config", config)
    assert "sees the store as user 1000" in done.stdout, done.stdout


def test_a_pod_that_is_killed_after_its_upload_began_leaves_no_half_artifact(
    cluster: Namespace, url: str, probes: Execution, refusing: Path
) -> None:
    request, runner = request_for(url, message="once"), make_runner(probes)
    refusing.touch()
    with at_work(request, runner, lambda event: True) as work:
        wait_until(lambda: work.error or any(each.endswith("/result.txt") for each in objects(url)))
        assert work.error is None
        [pod] = cluster.pods()
        name = pod["metadata"]["name"]
        kubectl("-n", cluster.name, "delete", "pod", name, "--grace-period=0", "--force")
        error = work.join()
    assert isinstance(error, PreemptedError), error
    store = open_store(url)
    assert store.load("probe", request.key) is None
    refusing.unlink()
    heard: list[object] = []
    make_runner(probes).run(request, heard.append)
    found = store.load("probe", request.key)
    assert found is not None
    store.verify(found)
    assert found.file("result.txt").read_text() == "seed 0 once"
    assert any(name.startswith("logs/probe/") for name in objects(url))


def test_state_goes_through_the_bucket_to_the_next_pod(
    cluster: Namespace, url: str, probes: Execution
) -> None:
    request = request_for(url, behaviour="hang_once")
    with at_work(request, runner := make_runner(probes)) as work:
        wait_until(
            lambda: work.error or any(name.endswith("snapshot.json") for name in objects(url))
        )
        runner.stop_all()
    make_runner(probes).run(request, lambda event: None)
    assert open_store(url).load("probe", request.key) is not None
    assert not any(name.startswith("work/") for name in objects(url))


def test_a_pod_ends_without_signs_of_its_orchestrator(
    cluster: Namespace, url: str, probes: Execution, tmp_path: Path
) -> None:
    request = request_for(url, behaviour="hang")
    with orchestrator(request, probes, folder=tmp_path):
        assert any(name.startswith("orchestrators/probe/") for name in objects(url))
    [pod] = cluster.pods()
    phase = ["get", "pod", pod["metadata"]["name"], "-o", "jsonpath={.status.phase}"]
    wait_until(lambda: kubectl("-n", cluster.name, *phase) == "Failed")
    make_runner(probes)
    assert cluster.pods() == [], "the next orchestrator of this host removes it"
