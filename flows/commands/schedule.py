"""Command ``geb schedule``: runs that start by the clock."""

from http import HTTPStatus
from typing import Annotated

import typer

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
Name = Annotated[str | None, typer.Option(help="The configuration's if unset.")]
Fresh = Annotated[
    bool, typer.Option("--fresh/--same", help="Each time a new run and seed, or the same run.")
]


def schedule(
    config: ConfigPath,
    cron: Cron,
    timezone: Zone = "UTC",
    name: Name = None,
    fresh: Fresh = True,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
) -> None:
    """Run a configuration by the clock, on the Prefect server in use, or on the one of `geb up`."""
    run = config_of_command(config, overrides, runner, store)
    quiet_prefect()
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.standing.server import read_deployment, use_standing_server

    slug = name or run.name
    use_standing_server()
    try:
        when = CronSchedule(cron=cron, timezone=timezone)
    except ValueError as error:
        remedy = 'write minute, hour, day, month, weekday ("0 3 * * 1"), and a zone such as UTC'
        raise UserError(f"--cron {cron!r}, --timezone {timezone!r}: {error}", remedy) from error
    parameters = {"preset": NO_PRESET, "config": run.given_values(), "fresh": fresh}
    with get_client(sync_client=True) as client:
        deployment = read_deployment(client, "iterate/iterate")
        entry = DeploymentScheduleCreate(schedule=when, parameters=parameters, slug=slug)
        try:
            client.create_deployment_schedules(deployment.id, [entry])
        except PrefectHTTPStatusError as error:
            if error.response.status_code != HTTPStatus.CONFLICT:
                raise
            fault = f"there is a schedule {slug!r} already"
            remedy = "give this one another --name, and its runs another name, --set name=NAME"
            raise UserError(fault, remedy) from error
    console.print(f"schedule {slug}: {cron} ({timezone})", markup=False)
