"""`prefect deploy --all` with the shipped file, as people and `geb up` call it."""

import asyncio
import contextlib
import json
import os
import sys
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.deployments.runner import EntrypointType
from prefect.events import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.base import BaseJobConfiguration

from flows import HEARTBEAT_VARIABLE, PREFECT_HEARTBEAT_SECONDS
from flows.evaluate import evaluate
from flows.iterate import iterate
from flows.pipeline.presets import configured
from flows.standing.deployments import DEPLOYMENTS, ZOMBIES, register
from flows.sweep import sweep
from tests.flows.loop import ROOT
from tests.programs import run_program

pytestmark = pytest.mark.slow

DEPLOYED = {f"{flow}/{flow}" for flow in ("iterate", "evaluate", "sweep", "compare")}
SET_FOLDER = "prefect.deployments.steps.set_working_directory"
JOB_TEMPLATE = json.loads((ROOT / "configs/cluster/kubernetes-job.json").read_text())


class KubernetesJob(BaseJobConfiguration):
    """Part of a Kubernetes worker's configuration that the job template fills."""

    job_manifest: dict[str, Any]


def deploy(server, kind, folder):
    """Makes the pool and the deployments of a kind as the documentation says."""
    template = JOB_TEMPLATE if kind == "kubernetes" else {}
    with SyncPrefectClient(server) as client:
        with contextlib.suppress(ObjectNotFound):
            client.delete_work_pool("geb")
        client.create_work_pool(WorkPoolCreate(name="geb", type=kind, base_job_template=template))
    command = (sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    variables = {"GEB_STORE": "/srv/geb/store", "GEB_RUNNER": kind, "PWD": str(folder)}
    variables |= {"GEB_CONFIGS": str(ROOT / "configs")}
    variables |= {"GEB_ENGINE": f"{sys.executable} -P -m flows.standing.engine"}
    done = run_program(
        *command, "--prefect-file", DEPLOYMENTS, cwd=folder, env=os.environ | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with SyncPrefectClient(server) as client:
        return {name: client.read_deployment_by_name(name) for name in sorted(DEPLOYED)}


@pytest.mark.parametrize("kind", ["process", "kubernetes"])
def test_every_deployment_is_made_and_is_what_it_says(prefect_server, kind, tmp_path):
    deployments = deploy(prefect_server, kind, tmp_path)
    for deployment in deployments.values():
        assert (deployment.work_pool_name, deployment.work_queue_name) == ("geb", "runs")
        environment = deployment.job_variables["env"]
        # A run that sends none is treated as dead.
        assert environment[HEARTBEAT_VARIABLE] == str(PREFECT_HEARTBEAT_SECONDS)
        assert environment["GEB_STORE"] == "/srv/geb/store"
        assert environment["GEB_CONFIGS"] == str(ROOT / "configs")
        assert deployment.job_variables["working_dir"] == str(tmp_path)
        assert "-P" in deployment.job_variables["command"]
        assert deployment.pull_steps == [{SET_FOLDER: {"directory": str(tmp_path)}}]
    for flow in (iterate, evaluate, sweep):
        parameters = deployments[f"{flow.name}/{flow.name}"].parameters
        volumes = "execution.kubernetes.volumes={/srv/geb: {claim: geb}}"
        config = configured("quickstart", parameters["config"] | {"settings": [volumes]})
        assert (config.store, config.execution.runner) == ("/srv/geb/store", kind)


def test_geb_up_deploys_the_same_file(prefect_server, tmp_path, monkeypatch):
    by_hand = deploy(prefect_server, "process", tmp_path)
    monkeypatch.setenv("GEB_RUNNER", "process")
    monkeypatch.setenv("GEB_CONFIGS", str(ROOT / "configs"))
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        register("/srv/geb/store", tmp_path, 2)
        register("/srv/geb/store", tmp_path, 1)
    with SyncPrefectClient(prefect_server) as client:
        for name, deployment in by_hand.items():
            again = client.read_deployment_by_name(name)
            for field in ("parameters", "job_variables", "pull_steps"):
                assert getattr(again, field) == getattr(deployment, field)
        assert client.read_work_queue_by_name("runs", work_pool_name="geb").concurrency_limit == 1
        name = yaml.safe_load(ZOMBIES.read_text())["name"]
        assert len(client.read_automations_by_name(name)) == 1


def test_a_preset_keeps_its_runner_and_its_store(prefect_server, tmp_path, monkeypatch):
    text = "store: /preset\nexecution: {runner: docker}\n"
    (tmp_path / "mine.yaml").write_text(text)
    monkeypatch.setenv("GEB_CONFIGS", str(tmp_path))
    for name in ("GEB_STORE", "GEB_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        register(None, tmp_path, 1)
    with SyncPrefectClient(prefect_server) as client:
        deployment = client.read_deployment_by_name("iterate/iterate")
    assert "" not in leaves(deployment.job_variables)
    config = configured("mine", deployment.parameters["config"])
    assert (config.store, config.execution.runner) == ("/preset", "docker")


def test_a_limit_of_a_deployment_outlives_geb_up(prefect_server, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        register(None, tmp_path, 1)
        with SyncPrefectClient(prefect_server) as client:
            path = f"/deployments/{client.read_deployment_by_name('iterate/iterate').id}"
            # As docs/operations.md has it.
            data = {
                "concurrency_limit": 1,
                "concurrency_options": {"collision_strategy": "ENQUEUE"},
            }
            command = (sys.executable, "-m", "prefect", "api", "PATCH", path)
            done = run_program(*command, "--data", json.dumps(data))
            assert done.returncode == 0, done.stdout + done.stderr
        register(None, tmp_path, 1)
    with SyncPrefectClient(prefect_server) as client:
        deployment = client.read_deployment_by_name("iterate/iterate")
        assert deployment.global_concurrency_limit.limit == 1
        assert deployment.concurrency_options.collision_strategy == "ENQUEUE"
        client.update_deployment(deployment.id, DeploymentUpdate(concurrency_limit=None))


def test_the_job_of_a_run_on_kubernetes(prefect_server, tmp_path):
    deployments = deploy(prefect_server, "kubernetes", tmp_path)
    variables = deployments["iterate/iterate"].job_variables
    # Prefect has read its settings when it was imported, before there was a server.
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        configuration = asyncio.run(KubernetesJob.from_template_and_values(JOB_TEMPLATE, variables))
    job = configuration.job_manifest["spec"]["template"]["spec"]
    [container] = job["containers"]
    assert container["image"] == "ghcr.io/me/geb-flows:0.1.0"
    assert job["serviceAccountName"] == "geb"
    assert {volume["name"] for volume in job["volumes"]} == {"store"}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/srv/geb"}
    assert job["securityContext"]["runAsNonRoot"] is True
    # Prefect's Kubernetes worker looks for them here, and refuses a template without them.
    assert (job["parallelism"], job["completions"]) == (1, 1)


def test_the_automation_is_prefect_s_and_as_patient_as_runs_need():
    loaded = yaml.safe_load(ZOMBIES.read_text())
    assert loaded["trigger"]["within"] >= 3 * PREFECT_HEARTBEAT_SECONDS
    assert AutomationCore.model_validate(loaded).name.startswith("geb: ")


def leaves(value):
    """Every value that is neither a mapping nor a list."""
    if isinstance(value, dict):
        return [leaf for member in value.values() for leaf in leaves(member)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def test_a_typo_in_the_parameters_is_explained_without_a_traceback(prefect_server, tmp_path):
    deployed = iterate.to_deployment("typo", entrypoint_type=EntrypointType.MODULE_PATH)
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        deployment = deployed.apply()
    with SyncPrefectClient(prefect_server) as client:
        run = client.create_flow_run_from_deployment(
            deployment, parameters={"config": {"iterationz": 3}}
        )
    done = run_program(sys.executable, "-m", "prefect.engine", run.id, cwd=tmp_path)
    assert "did you mean 'iterations'?" in done.stderr
    # The last line of a traceback. Prefect's own threads may print others on a busy machine.
    assert "errors.UserError" not in done.stderr
