"""The whole loop in pods: the artifacts of the process runner; orchestrators that are killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.schemas.objects import FlowRun
from prefect.states import Crashed

from flows.execution.hooks import remove_containers
from flows.pipeline.config import StageResources
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.reaper import reap
from flows.runners.kubernetes.runner import KubernetesRunner
from stages.contract.events import Log
from stages.contract.local_store import LocalStore
from tests.at_work import at_work
from tests.flows.loop import geb, hosts, plan, result_digests, steps, write_config
from tests.flows.probe_flow import probes
from tests.flows.probes import wait_until
from tests.flows.scheduled import CHANGED, run_by_schedule, scheduled
from tests.kubernetes.cluster import CPUS, USER, Namespace, kubectl
from tests.kubernetes.pods import ORCHESTRATOR, probe_settings, request_for

pytestmark = [pytest.mark.kubernetes, pytest.mark.slow]

RESOURCES = {stage: {"cpus": CPUS} for stage in StageResources.model_fields}


def execution(cluster: Namespace, store: Path) -> dict[str, Any]:
    """A run's section `execution`, whose stages are pods."""
    settings = cluster.settings(store).model_dump(mode="json", exclude_defaults=True)
    return {"runner": "kubernetes", "kubernetes": settings}


def test_the_loop_gives_the_artifacts_of_the_process_runner(
    cluster: Namespace, finished: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    config = write_config(tmp_path, execution=execution(cluster, store), resources=RESOURCES)
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_digests(store) == result_digests(finished.parent / "store")
    planned = plan(config, "--runner", "process")
    assert {each["action"] for each in planned.values()} == {"reuse"}, "processes find it all"
    assert cluster.pods() == []


def test_pods_that_a_schedule_starts_go_on_from_what_processes_made(
    cluster: Namespace, prefect_server: str, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished.parent / "store", store := tmp_path / "store")
    # The user of the pods is another one than that of the processes.
    for path in store.rglob("*"):
        os.chown(path, USER, USER)
    places = execution(cluster, store)
    config = write_config(tmp_path, execution=places, resources=RESOURCES)
    done = geb("run", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["state"] for each in steps(store).values()} == {"reused"}

    changes = scheduled(store, places, resources=RESOURCES)
    run = run_by_schedule(prefect_server, tmp_path, changes)
    assert run.state_name == "Completed", run.state
    made = hosts(store, "scheduled").items()
    assert {step for step, host in made if host.startswith("geb-scheduled-")} == CHANGED
    assert cluster.pods() == []


@contextlib.contextmanager
def killed_orchestrator(
    cluster: Namespace, store: LocalStore, death: str, **params: Any
) -> Iterator[Any]:
    """Settings and request of an orchestrator that is killed while its probe hangs."""
    request = request_for(store, **params)
    settings = probe_settings(
        cluster, request, on_orchestrator_death=death, orchestrator_seconds=20
    )
    path = store.root.parent / "request.json"
    request.write(path)
    command = [sys.executable, "-c", ORCHESTRATOR, str(path), settings.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any("pids " in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    try:
        yield request, settings
    finally:
        reap(Cluster(settings), keep_running=False)


def test_the_next_orchestrator_takes_a_kept_pod_over(store: LocalStore, cluster: Namespace) -> None:
    with killed_orchestrator(cluster, store, "keep", behaviour="hang") as (request, settings):
        [pod] = cluster.pods()
        runner = KubernetesRunner(settings, grace_seconds=1)
        assert runner.has_running(request)
        with at_work(request, runner) as work:
            [taken] = cluster.pods()
            assert taken["metadata"]["uid"] == pod["metadata"]["uid"]
            assert any("taking over" in str(each) for each in work.heard)
            # Its log is read from the beginning.
            assert any(isinstance(each, Log) and "pids " in each.message for each in work.heard)
            again = KubernetesRunner(settings, grace_seconds=1)
            assert not again.has_running(request), "it has an orchestrator again"


def test_under_stop_a_pod_ends_without_its_orchestrator_and_is_removed(
    store: LocalStore, cluster: Namespace
) -> None:
    with killed_orchestrator(cluster, store, "stop", behaviour="leave_child") as (
        request,
        settings,
    ):
        [pod] = cluster.pods()
        phase = ["get", "pod", pod["metadata"]["name"], "-o", "jsonpath={.status.phase}"]
        wait_until(lambda: kubectl("-n", cluster.name, *phase) == "Failed")
        KubernetesRunner(settings)
        assert cluster.pods() == []
    logs = store.log_path(request.stage, request.key).glob("left-*.log")
    assert "no sign of the orchestrator" in "".join(each.read_text() for each in logs)


def test_a_pod_that_is_kept_is_removed_on_request_alone(
    store: LocalStore, cluster: Namespace
) -> None:
    with killed_orchestrator(cluster, store, "keep", behaviour="hang") as (_, settings):
        KubernetesRunner(settings)
        assert len(cluster.pods()) == 1
        chosen = f"execution.kubernetes.namespace={cluster.name}"
        done = geb("doctor", "--reap", "--runner", "kubernetes", "--set", chosen)
        assert "removed pod" in done.stdout, done.stdout + done.stderr
        assert cluster.pods() == []


def test_the_hook_of_a_flow_run_that_was_killed_removes_its_pods(
    store: LocalStore, cluster: Namespace
) -> None:
    with killed_orchestrator(cluster, store, "stop", behaviour="hang") as (_, settings):
        assert len(cluster.pods()) == 1
        execution = {"runner": "kubernetes", "kubernetes": settings.model_dump(mode="json")}
        run = FlowRun(flow_id=uuid4(), parameters={"config": {"execution": execution}})
        remove_containers(probes, run, Crashed())
        assert cluster.pods() == []


def test_doctor_tells_what_pods_see_from_their_nodes(
    store: LocalStore, cluster: Namespace, tmp_path: Path
) -> None:
    # The tests' image is a stand-in for all of this project's: one pod tells enough.
    settings = cluster.settings(store.root).model_dump(mode="json", exclude_defaults=True)
    values = {"store": str(store.root), "execution": {"kubernetes": settings}}
    config = tmp_path / "doctor.yaml"
    config.write_text(yaml.safe_dump(values))
    done = geb("doctor", "--runner", "kubernetes", "--config", config)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rights: all" in done.stdout
    assert "sees the store as user 1000, holds this code" in done.stdout
    gone = ["--set", "execution.kubernetes.node_selector={pool: none}"]
    gone += ["--set", "execution.kubernetes.pending_seconds=2"]
    done = geb("doctor", "--runner", "kubernetes", "--config", config, *gone)
    assert done.returncode == 1
    assert "no node takes the pod" in done.stdout
