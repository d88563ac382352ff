"""Command ``geb schedule``: runs that start by the clock."""

from http import HTTPStatus
from typing import Annotated

import typer
from pydantic import ValidationError

from flows.commands.common import (
    ConfigPath,
    ConfigStore,
    Overrides,
    RunnerName,
    config_of_command,
    console,
    quiet_prefect,
)
from flows.pipeline.presets import NO_PRESET
from stages.contract.errors import UserError

Cron = Annotated[str, typer.Option(metavar="LINE", help='"0 3 * * 1" is each Monday at 3.')]
Zone = Annotated[str, typer.Option(metavar="ZONE", help="Time zone of --cron.")]
Fresh = Annotated[
    bool, typer.Option("--fresh/--same", help="Each time a new run and seed, or the same run.")
]


def schedule(
    config: ConfigPath,
    cron: Cron,
    timezone: Zone = "UTC",
    fresh: Fresh = True,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
) -> None:
    """Run a configuration by the clock, on the Prefect server in use, or on the one of `geb up`.

    A schedule has the name of its runs: --set name=NAME makes a second one of a configuration.
    """
    run = config_of_command(config, overrides, runner, store)
    quiet_prefect()
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

    from flows.standing.server import use_standing_server

    use_standing_server()
    try:
        when = CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        raise UserError(
            f"--cron {cron!r}, --timezone {timezone!r}: {error.errors()[0]['msg']}",
            'write minute, hour, day, month, weekday ("0 3 * * 1"), and a zone such as UTC',
        ) from error
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name("iterate/iterate")
        except ObjectNotFound as error:
            raise UserError(
                "the Prefect server has no deployment iterate/iterate",
                "`geb up` makes it; on another server: `prefect deploy --all --prefect-file "
                "flows/standing/prefect.yaml`",
            ) from error
        entry = DeploymentScheduleCreate(
            schedule=when,
            parameters={"preset": NO_PRESET, "config": run.given_values(), "fresh": fresh},
            slug=run.name,
        )
        try:
            [created] = client.create_deployment_schedules(deployment.id, [entry])
        except PrefectHTTPStatusError as error:
            if error.response.status_code != HTTPStatus.CONFLICT:
                raise
            raise UserError(
                f"there is a schedule {run.name!r} already",
                "give this one another: --set name=NAME",
            ) from error
    console.print(
        f"schedule {run.name}: {cron} ({timezone})\n"
        "list   prefect deployment schedule ls iterate/iterate\n"
        f"pause  prefect deployment schedule pause iterate/iterate {created.id}",
        markup=False,
    )
