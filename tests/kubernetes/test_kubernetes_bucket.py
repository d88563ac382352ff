"""Pods that share no volume with their orchestrator: a store in a bucket that both reach."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.pipeline.placement import Execution
from flows.runners.choose import make_runner
from stages.contract.errors import PreemptedError
from stages.contract.request import Request, Resources
from stages.store.opening import open_store
from tests.at_work import at_work
from tests.flows.probes import wait_until
from tests.kubernetes.cluster import CPUS, THIS_MACHINE, kubectl
from tests.kubernetes.pods import RESOURCES
from tests.lacking import lacking
from tests.no_shared_folder import (
    CREDENTIALS,
    bucket_at,
    check_killed_upload,
    check_loop,
    probe_of,
    reach,
)
from tests.object_storage import objects
from tests.orchestrators import orchestrator

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]


@pytest.fixture
def url(cluster, tmp_path) -> Iterator[str]:
    """A store's place in a bucket that this machine and the pods reach."""
    if "K8S_TOP" not in os.environ:
        lacking("an address of this machine for pods: the cluster is not the tests' own")
    with bucket_at(THIS_MACHINE, tmp_path) as location:
        values = {name: os.environ[name] for name in CREDENTIALS}
        cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "bucket"},
                "stringData": values,
            }
        )
        yield location
        assert cluster.pods() == []


@pytest.fixture
def probes(cluster, url, tmp_path, probe_stage) -> Execution:
    """Execution in pods that see of this machine its programs and the probe, and an empty store."""
    open_store(url, create=True)
    settings = cluster.settings(
        tmp_path / "code",
        # The clients of object storage want certificates, which the tests' image has none of.
        Path("/etc/ssl"),
        environment=cluster.settings().environment | reach(),
        # By reference, as from a cloud's secret.
        secrets={name: f"bucket/{name}" for name in CREDENTIALS},
    )
    return Execution(runner="kubernetes", kubernetes=settings, grace_seconds=5, sync_seconds=0.5)


def request_for(url: str, **params: str) -> Request:
    return probe_of(url, Resources(cpus=CPUS), **params)


def test_the_loop_runs_without_a_shared_volume(probes, finished, tmp_path, url):
    section = probes.model_dump(mode="json", exclude_defaults=True)
    check_loop(finished, tmp_path, url, section, resources=RESOURCES)


def test_a_pod_that_is_killed_in_its_upload_leaves_no_half_artifact(cluster, url, probes, tmp_path):
    def kill(_):
        [pod] = cluster.pods()
        name = pod["metadata"]["name"]
        kubectl("-n", cluster.name, "delete", "pod", name, "--grace-period=0", "--force")

    error = check_killed_upload(request_for(url, message="once"), probes, tmp_path, kill)
    assert isinstance(error, PreemptedError), error


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


def test_a_pod_ends_without_signs_of_its_orchestrator(cluster, url, probes, tmp_path):
    request = request_for(url, behaviour="hang")
    with orchestrator(request, probes, folder=tmp_path):
        assert any(name.startswith("orchestrators/probe/") for name in objects(url))
    [pod] = cluster.pods()
    phase = ["get", "pod", pod["metadata"]["name"], "-o", "jsonpath={.status.phase}"]
    wait_until(lambda: kubectl("-n", cluster.name, *phase) == "Failed")
    make_runner(probes)
    assert cluster.pods() == [], "the next orchestrator of this host removes it"
