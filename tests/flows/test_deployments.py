"""`prefect deploy --all` with each shipped file, against a real server."""

import asyncio
import contextlib
import json
import sys
from typing import Any
from uuid import uuid4

import pytest
import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.base import BaseJobConfiguration

from flows import HEARTBEAT_SECONDS, HEARTBEAT_VARIABLE
from flows.evaluate import evaluate
from flows.iterate import iterate
from flows.pipeline.presets import configured
from flows.standing.deployments import AUTOMATIONS
from flows.sweep import sweep
from tests.flows.loop import ROOT
from tests.programs import run_program

pytestmark = pytest.mark.slow

CLUSTER = ROOT / "configs/cluster"
FILES = {
    "process": ROOT / "flows/standing/prefect.yaml",
    "kubernetes": CLUSTER / "kubernetes.yaml",
}
DEPLOYED = {
    f"{each}/{each}" for each in ("iterate", "evaluate", "sweep", "paper", "compare", "bandit")
}


class KubernetesJob(BaseJobConfiguration):
    """Part of a Kubernetes worker's configuration that the job template fills."""

    job_manifest: dict[str, Any]


def template(kind: str) -> dict[str, Any]:
    """The base job template that the pool of a kind is made with."""
    path = CLUSTER / f"{kind}-job.json"
    loaded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return loaded


def deploy(server: str, kind: str) -> dict[str, DeploymentResponse]:
    """Makes the pool and the deployments of a kind as the documentation says."""
    with SyncPrefectClient(server) as client:
        with contextlib.suppress(ObjectNotFound):
            client.delete_work_pool("geb")
        client.create_work_pool(
            WorkPoolCreate(name="geb", type=kind, base_job_template=template(kind))
        )
    command = (sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all")
    done = run_program(*command, "--prefect-file", FILES[kind], cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    with SyncPrefectClient(server) as client:
        return {name: client.read_deployment_by_name(name) for name in sorted(DEPLOYED)}


@pytest.mark.parametrize("kind", FILES)
def test_every_deployment_is_made_and_is_what_it_says(prefect_server: str, kind: str) -> None:
    found = deploy(prefect_server, kind)
    for each in found.values():
        assert (each.work_pool_name, each.work_queue_name) == ("geb", "runs")
        assert not any(schedule.active for schedule in each.schedules), "paused until wanted"
        # A run that sends none is treated as dead.
        assert each.job_variables["env"][HEARTBEAT_VARIABLE] == str(HEARTBEAT_SECONDS)
        # A variable that was not set would have become nothing.
        assert "" not in leaves(each.job_variables)
    assert {name for name, each in found.items() if each.schedules} == {
        *("iterate/iterate", "evaluate/evaluate", "sweep/sweep")
    }


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("flow", [iterate, evaluate, sweep], ids=lambda flow: flow.name)
def test_its_parameters_are_a_configuration(kind: str, flow: Any) -> None:
    deployments = {
        each["name"]: each for each in yaml.safe_load(FILES[kind].read_text())["deployments"]
    }
    parameters = deployments[flow.name]["parameters"]
    config = configured(parameters.get("preset", "quickstart"), parameters["config"])
    assert config.execution.runner == kind
    flow.validate_parameters(parameters)
    for execution in (
        {"runner": "slurm", "slurm": {"partition": "gpu", "account": "low"}},
        {"runner": "kubernetes", "kubernetes": {"volumes": {"/srv/geb": {"claim": "geb"}}}},
    ):
        changed = parameters["config"] | {"execution": execution}
        flow.validate_parameters(parameters | {"config": changed})


def test_the_job_of_a_run_on_kubernetes(prefect_server: str) -> None:
    definitions = yaml.safe_load(FILES["kubernetes"].read_text())["definitions"]
    variables = definitions["runs"]["job_variables"]
    # Prefect has read its settings when it was imported, before there was a server.
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        made = asyncio.run(
            KubernetesJob.from_template_and_values(template("kubernetes"), variables)
        )
    job = made.job_manifest["spec"]["template"]["spec"]
    [container] = job["containers"]
    assert container["image"] == variables["image"]
    assert job["serviceAccountName"] == "geb"
    assert {each["name"] for each in job["volumes"]} == {"store"}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounted.values()) == set(definitions["config"]["execution"]["kubernetes"]["volumes"])
    assert job["securityContext"]["runAsNonRoot"] is True
    # Prefect's Kubernetes worker looks for them here, and refuses a template without them.
    assert (job["parallelism"], job["completions"]) == (1, 1)


def test_the_automations_are_prefect_s_and_as_patient_as_runs_need() -> None:
    loaded = yaml.safe_load(AUTOMATIONS.read_text())
    assert loaded["zombies"]["trigger"]["within"] >= 3 * HEARTBEAT_SECONDS
    loaded["notification"]["actions"][0]["block_document_id"] = str(uuid4())
    for each in loaded.values():
        assert AutomationCore.model_validate(each).name.startswith("geb: ")


def leaves(value: Any) -> list[Any]:
    """Every value that is no mapping and no list."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]
