"""Work pool, deployments and automation that `geb up` puts on a Prefect server."""

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.events import AutomationCore
from prefect.exceptions import ObjectAlreadyExists

from flows.pipeline.presets import STORE_VARIABLE
from flows.runners.command_lines import module_command
from stages.contract.errors import GebError

POOL = "geb"
DEPLOYMENTS = Path(__file__).with_name("prefect.yaml")
ZOMBIES = Path(__file__).with_name("zombies.yaml")


def register(store: str | None, folder: Path, limit: int) -> None:
    """Creates or updates the work pool, the deployments of ``prefect.yaml`` and the automation.

    Forms start with the store, if there is one, and relative paths in them in the folder. At most
    ``limit`` runs are at work at once. A deployment keeps its limit of concurrent runs.
    """
    automation = AutomationCore.model_validate(yaml.safe_load(ZOMBIES.read_text()))
    with get_client(sync_client=True) as client:
        with suppress(ObjectAlreadyExists):
            client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
        deployed = client.read_deployments()
        _deploy(store, folder)
        for before in deployed:
            # `prefect deploy` has removed it.
            if before.work_pool_name == POOL and (kept := before.global_concurrency_limit):
                options = before.concurrency_options
                update = DeploymentUpdate(concurrency_limit=kept.limit, concurrency_options=options)
                client.update_deployment(before.id, update)
        runs = client.read_work_queue_by_name("runs", work_pool_name=POOL)
        client.update_work_queue(runs.id, concurrency_limit=limit)
        installed = client.read_automations_by_name(automation.name)
        if installed:
            client.update_automation(installed[0].id, automation)
        else:
            client.create_automation(automation)


def _deploy(store: str | None, folder: Path) -> None:
    command = module_command(sys.executable, "prefect", "--no-prompt", "deploy", "--all")
    # Without a command Prefect puts the folder into the PYTHONPATH of flow runs and stages.
    engine = shlex.join(module_command(sys.executable, "flows.standing.engine"))
    variables = {"PWD": str(folder), "GEB_ENGINE": engine}
    if store:
        variables[STORE_VARIABLE] = store
    done = subprocess.run(
        [*command, "--prefect-file", str(DEPLOYMENTS)],
        # It imports from the present folder.
        cwd="/",
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise GebError(f"`prefect deploy` failed: {(done.stderr or done.stdout).strip()}")
