"""Work pool, deployments and automations that `geb up` puts on a Prefect server."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, WorkPoolCreate
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.events import AutomationCore
from prefect.exceptions import ObjectAlreadyExists
from prefect.flows import load_flow_from_entrypoint

from flows.pipeline.presets import STORE_VARIABLE
from flows.runners.local.gpus import GPU_LIMIT, gpus_of_this_host

POOL = "geb"
# Names an address that takes JSON by POST: a secret, so it is no option of a command.
NOTIFY_VARIABLE = "GEB_NOTIFY_URL"
_NOTIFY_BLOCK = "geb-notify"
AUTOMATIONS = Path(__file__).with_name("automations.yaml")
_DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")


def register(store: str, folder: Path, limit: int) -> list[str]:
    """Creates or updates work pool, deployments and automations; returns the deployments' names.

    The deployments are those of ``prefect.yaml``, for this machine. Forms start with the store, and
    relative paths in them in the folder. At most ``limit`` runs are at work at the same time.
    """
    names = []
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        for each in yaml.safe_load(_DEPLOYMENTS.read_text())["deployments"]:
            names.append(_deploy(each, store, folder))
        runs = client.read_work_queue_by_name("runs", work_pool_name=POOL)
        client.update_work_queue(runs.id, concurrency_limit=limit)
        # A person may have set it, and a limit of none would let no stage start.
        if gpus := len(gpus_of_this_host()):
            with suppress(ObjectAlreadyExists):
                client.create_global_concurrency_limit(
                    GlobalConcurrencyLimitCreate(name=GPU_LIMIT, limit=gpus)
                )
    install_automations()
    return names


def _deploy(wanted: dict[str, Any], store: str, folder: Path) -> str:
    flow: Flow[..., Any] = load_flow_from_entrypoint(wanted["entrypoint"])
    queue = wanted["work_pool"]
    environment = {**queue["job_variables"]["env"], STORE_VARIABLE: store}
    deployment = flow.to_deployment(
        name=wanted["name"],
        tags=wanted["tags"],
        # What else the file fills in is for a cluster.
        parameters={"config": {"store": store}} if "config" in wanted.get("parameters", ()) else {},
        work_pool_name=POOL,
        work_queue_name=queue["work_queue_name"],
        job_variables={"working_dir": str(folder), "env": environment},
        # The package is installed where the worker runs: there is no source to pull.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    assert isinstance(deployment, RunnerDeployment)
    deployment.apply()
    return f"{flow.name}/{deployment.name}"


def install_automations() -> list[str]:
    """Creates the automations on the server in use, or updates them; returns their names.

    Notifications are sent to the address in ``GEB_NOTIFY_URL``; without it none are set up.
    """
    wanted = yaml.safe_load(AUTOMATIONS.read_text())
    if address := os.environ.get(NOTIFY_VARIABLE):
        block = CustomWebhookNotificationBlock(
            name=_NOTIFY_BLOCK, url=address, json_data={"text": "{{subject}}\n{{body}}"}
        )
        [action] = wanted["notification"]["actions"]
        action["block_document_id"] = block.save(_NOTIFY_BLOCK, overwrite=True)
    else:
        del wanted["notification"]
    with get_client(sync_client=True) as client:
        for each in map(AutomationCore.model_validate, wanted.values()):
            if found := client.read_automations_by_name(each.name):
                client.update_automation(found[0].id, each)
            else:
                client.create_automation(each)
    return [each["name"] for each in wanted.values()]
