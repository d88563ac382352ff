"""Schedules of a configuration on a Prefect server: each a schedule of the deployment of `iterate`.

A schedule has parameters of its own, the whole configuration among them, and its name is its slug.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import ValidationError

from flows.pipeline.config import RunConfig
from flows.pipeline.presets import NO_PRESET
from flows.standing.home import Home
from flows.standing.server import require_access, use_server
from stages.contract.errors import UserError

_DEPLOYMENT = "iterate/iterate"


@dataclass(frozen=True)
class Scheduled:
    """A schedule, as a person sees it; in place of a cron line it may have an interval."""

    name: str
    when: str
    timezone: str
    active: bool
    run: str
    runner: str
    fresh: bool


def use_standing_server() -> None:
    """Makes the server of PREFECT_API_URL, or the one of `geb up`, this process's.

    Raises:
        UserError: There is none, or it asks for another password.
    """
    if not get_current_settings().api.url:
        if (standing := Home().standing()) is None:
            raise UserError(
                "schedules live on a Prefect server, and none is named",
                "start `geb up`, or set PREFECT_API_URL to the server's",
            )
        if standing.password_file is not None:
            password = Path(standing.password_file).read_text().strip()
            os.environ["PREFECT_API_AUTH_STRING"] = password
        use_server(standing.api)
    require_access()


def add(config: RunConfig, name: str, cron: str, timezone: str, *, fresh: bool) -> None:
    """Makes a schedule; UserError if its cron line or time zone is none, or its name is taken."""
    try:
        when = CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        said = "; ".join(each["msg"] for each in error.errors())
        raise UserError(
            f"--cron {cron!r}, --timezone {timezone!r}: {said}",
            'minute, hour, day, month, weekday ("0 3 * * 1"), and a zone such as Europe/Berlin',
        ) from error
    parameters = {"preset": NO_PRESET, "config": config.to_values(), "fresh": fresh}
    with _deployment() as (client, deployment):
        if any(each.slug == name for each in deployment.schedules):
            raise UserError(
                f"there is a schedule {name!r} already",
                f"`geb schedules remove {name}`, or give this one another --name",
            )
        made = DeploymentScheduleCreate(schedule=when, parameters=parameters, slug=name)
        client.create_deployment_schedules(deployment.id, [made])


def schedules() -> list[Scheduled]:
    """All schedules of the deployment."""
    with _deployment() as (_, deployment):
        return [_shown(each, deployment) for each in deployment.schedules]


def set_active(name: str, active: bool) -> None:
    """Pauses a schedule, or lets it fire again; UserError if there is none of that name."""
    with _deployment() as (client, deployment):
        found = _named(name, deployment)
        client.update_deployment_schedule(deployment.id, found.id, active=active)


def remove(name: str) -> None:
    """Removes a schedule, UserError if there is none; its runs, and one at work, stay."""
    with _deployment() as (client, deployment):
        client.delete_deployment_schedule(deployment.id, _named(name, deployment).id)


@contextmanager
def _deployment() -> Iterator[tuple[SyncPrefectClient, DeploymentResponse]]:
    with get_client(sync_client=True) as client:
        try:
            found = client.read_deployment_by_name(_DEPLOYMENT)
        except ObjectNotFound as error:
            raise UserError(
                f"the Prefect server has no deployment {_DEPLOYMENT}",
                "`geb up` makes it; on another server: `prefect deploy --all --prefect-file "
                "flows/standing/prefect.yaml`",
            ) from error
        yield client, found


def _name(schedule: DeploymentSchedule) -> str:
    return schedule.slug or str(schedule.id)


def _named(name: str, deployment: DeploymentResponse) -> DeploymentSchedule:
    found = {_name(each): each for each in deployment.schedules}
    if name not in found:
        known = ", ".join(found) or "none"
        raise UserError(f"there is no schedule {name!r}", f"schedules: {known}")
    return found[name]


def _shown(schedule: DeploymentSchedule, deployment: DeploymentResponse) -> Scheduled:
    given = deployment.parameters | schedule.parameters
    config = given.get("config") or {}
    when = schedule.schedule
    return Scheduled(
        name=_name(schedule),
        when=when.cron if isinstance(when, CronSchedule) else str(getattr(when, "interval", when)),
        timezone=str(getattr(when, "timezone", None) or "UTC"),
        active=schedule.active,
        run=str(config.get("name") or given.get("preset") or ""),
        runner=str((config.get("execution") or {}).get("runner", "process")),
        fresh=bool(given.get("fresh")),
    )
