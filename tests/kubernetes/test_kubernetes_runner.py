"""Stages in pods of a real cluster."""

from typing import Any

import pytest

from stages.contract.errors import PreemptedError, StageFailedError, StoppedError, UserError
from stages.contract.events import Log, Progress
from stages.contract.request import Resources
from stages.store.base import Store
from tests.at_work import at_work
from tests.kubernetes.cluster import Namespace, kubectl
from tests.kubernetes.pods import probe_settings, request_for, run, runner

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]


def test_a_stage_in_a_pod_reports_and_leaves_its_artifact(store: Store, cluster: Namespace) -> None:
    request = request_for(store, message="hello", prints="to the log")
    heard = run(cluster, request)
    assert Log(message="hello") in heard
    assert Progress(done=0, total=1, unit="things") in heard
    artifact = store.load("probe", request.key)
    assert artifact is not None
    assert (artifact.path / "result.txt").read_text() == "seed 0 hello"
    assert artifact.manifest.software["image"]
    [log] = store.log_path("probe", request.key).glob("*.log")
    assert "to the log" in log.read_text()


def test_a_refusal_is_a_mistake_and_a_crash_is_a_failure(store: Store, cluster: Namespace) -> None:
    with pytest.raises(UserError, match="bad value 7") as caught:
        run(cluster, request_for(store, behaviour="refuse"))
    assert caught.value.remedy == "use 8"
    with pytest.raises(StageFailedError, match="RuntimeError: boom"):
        run(cluster, request_for(store, behaviour="crash"))


def test_memory_beyond_the_limit_is_named(store: Store, cluster: Namespace) -> None:
    request = request_for(store, Resources(memory_gib=0.25), behaviour="eat_memory")
    with pytest.raises(StageFailedError, match=r"used up its memory limit of 0\.25 GiB"):
        run(cluster, request)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec": {"nodeSelector": {"pool": "none"}}}, "nodes are available"),
        ({"image": "localhost/nothing:1"}, "localhost/nothing:1"),
        ({"secrets": {"TOKEN": "nothing/token"}}, 'secret "nothing" not found'),
    ],
    ids=["unschedulable", "missing image", "missing secret"],
)
def test_a_pod_that_cannot_start_is_a_mistake_with_its_remedy(
    store: Store, cluster: Namespace, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(cluster, request_for(store), pending_seconds=15, **changes)
    assert "execution.kubernetes" in caught.value.remedy


def test_a_quota_is_waited_for(store: Store, cluster: Namespace) -> None:
    hard = {"limits.memory": "1Gi"}
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "team"},
        "spec": {"hard": hard},
    }
    cluster.apply(quota)
    try:
        with pytest.raises(UserError, match=r"must specify limits\.memory"):
            run(cluster, request_for(store))
        big = request_for(store, Resources(memory_gib=0.75), behaviour="hang")
        with at_work(big, runner(probe_settings(cluster, big))):
            small = request_for(store, Resources(memory_gib=0.5))
            with pytest.raises(UserError, match="exceeded quota: team") as caught:
                run(cluster, small, pending_seconds=1)
            assert "have the quota raised" in caught.value.remedy
    finally:
        kubectl("-n", cluster.name, "delete", "resourcequota", "team")


def test_cancelling_ends_the_pod_within_its_grace_period(store: Store, cluster: Namespace) -> None:
    request = request_for(store, behaviour="leave_child")
    chosen = runner(probe_settings(cluster, request), grace_seconds=2)
    with at_work(request, chosen) as work:
        chosen.stop_all()
        assert isinstance(work.join(), StoppedError)


def test_a_pod_that_is_deleted_is_preempted_and_not_failed(
    store: Store, cluster: Namespace
) -> None:
    request = request_for(store, behaviour="hang")
    with at_work(request, runner(probe_settings(cluster, request))) as work:
        [pod] = cluster.pods()
        kubectl("-n", cluster.name, "delete", "pod", pod["metadata"]["name"])
        error = work.join()
    assert isinstance(error, PreemptedError), error
    assert "its pod was deleted" in str(error)
