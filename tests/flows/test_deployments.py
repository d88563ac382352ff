"""`prefect deploy --all` with each shipped file, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from typing import Any

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
from flows.standing.automations import zombie_automation
from flows.sweep import sweep
from tests.flows.loop import ROOT

pytestmark = pytest.mark.slow

CLUSTER = ROOT / "configs/cluster"
FILES = {
    "process": ROOT / "prefect.yaml",
    "docker": CLUSTER / "docker.yaml",
    "kubernetes": CLUSTER / "kubernetes.yaml",
}
DEPLOYED = {
    f"{each}/{each}" for each in ("iterate", "evaluate", "sweep", "paper", "compare", "bandit")
}
STAGES = {"stage/cpu", "stage/gpu"}


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
    done = subprocess.run(
        [
            *(sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"),
            *("--prefect-file", str(FILES[kind])),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with SyncPrefectClient(server) as client:
        return {
            name: client.read_deployment_by_name(name)
            for name in (*sorted(DEPLOYED), *sorted(STAGES))
        }


@pytest.mark.parametrize("kind", FILES)
def test_every_deployment_is_made_and_is_what_it_says(prefect_server: str, kind: str) -> None:
    found = deploy(prefect_server, kind)
    for name, each in found.items():
        assert each.work_pool_name == "geb"
        expected = name.rpartition("/")[2] if name in STAGES else each.work_queue_name
        assert each.work_queue_name == expected
        assert not any(schedule.active for schedule in each.schedules), "paused until wanted"
        # Who sends none is taken for dead.
        assert each.job_variables["env"][HEARTBEAT_VARIABLE] == str(HEARTBEAT_SECONDS)
        # A variable that was not set would have become nothing.
        assert "" not in leaves(each.job_variables)
    kinds = {
        name.partition("/")[0]: [type(schedule.schedule).__name__ for schedule in each.schedules]
        for name, each in found.items()
        if each.schedules
    }
    assert kinds == {
        "iterate": ["CronSchedule"],
        "evaluate": ["IntervalSchedule"],
        "sweep": ["CronSchedule"],
    }


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("flow", [iterate, evaluate, sweep], ids=lambda flow: flow.name)
def test_its_parameters_are_a_configuration(kind: str, flow: Any) -> None:
    deployments = {
        each["name"]: each for each in yaml.safe_load(FILES[kind].read_text())["deployments"]
    }
    parameters = deployments[flow.name]["parameters"]
    config = configured(parameters.get("preset", "quickstart"), parameters["config"])
    assert config.execution.runner == "work_pool"
    flow.validate_parameters(parameters)


@pytest.mark.parametrize("overlap", ["go_on", "wait", "skip", "cancel_earlier"])
@pytest.mark.parametrize("flow", [iterate, sweep], ids=lambda flow: flow.name)
@pytest.mark.parametrize(
    "execution",
    [
        {"runner": "slurm", "slurm": {"partition": "gpu", "qos": "low"}},
        {"runner": "kubernetes", "kubernetes": {"volumes": {"/srv/geb": {"claim": "geb"}}}},
    ],
    ids=lambda execution: execution["runner"],
)
def test_a_deployment_of_a_run_on_a_cluster_is_taken(
    execution: dict[str, Any], flow: Any, overlap: str
) -> None:
    """Parameters of a schedule, from the file or the form, whose stages are jobs or pods."""
    parameters = {
        "preset": "quickstart",
        "overlap": overlap,
        "config": {"store": "/srv/geb/store", "execution": execution},
    }
    flow.validate_parameters(parameters)
    config = configured("quickstart", parameters["config"])
    assert config.execution.runner == execution["runner"]


def test_no_file_reads_environment_variables() -> None:
    for path in FILES.values():
        assert "{{" not in path.read_text()


def test_a_gpu_stage_s_job_on_kubernetes(prefect_server: str) -> None:
    definitions = yaml.safe_load(FILES["kubernetes"].read_text())["definitions"]
    variables = definitions["gpu"]["job_variables"]
    # Prefect has read its settings when it was imported, before there was a server.
    with temporary_settings({PREFECT_API_URL: prefect_server}):
        made = asyncio.run(
            KubernetesJob.from_template_and_values(template("kubernetes"), variables)
        )
    job = made.job_manifest["spec"]["template"]["spec"]
    [container] = job["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["image"] == variables["image"]
    assert job["nodeSelector"] == variables["node_selector"]
    assert job["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert {each["name"] for each in job["volumes"]} == {"shm", "store"}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == {"shm": "/dev/shm", "store": "/store"}
    assert job["securityContext"]["runAsNonRoot"] is True
    # Prefect's Kubernetes worker looks for them here, and refuses a template without them.
    assert (job["parallelism"], job["completions"]) == (1, 1)


def test_the_automation_of_the_deployment_files_is_that_of_geb_up() -> None:
    path = CLUSTER / "automations.yaml"
    [loaded] = yaml.safe_load(path.read_text())
    shipped = AutomationCore.model_validate(loaded)
    assert shipped == zombie_automation()
    assert loaded["trigger"]["within"] >= 3 * HEARTBEAT_SECONDS


def leaves(value: Any) -> list[Any]:
    """Every value that is no mapping and no list."""
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in leaves(each)]
    return [value]
