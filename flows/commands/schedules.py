"""Commands ``geb schedule`` and ``geb schedules``: runs that start by the clock."""

import dataclasses
from typing import Annotated

import typer
from rich.table import Table

from flows.commands.common import (
    AsJson,
    ConfigPath,
    ConfigStore,
    Overrides,
    RunnerName,
    answer,
    configured,
    console,
    quiet_prefect,
)

ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a schedule.")]
schedules = typer.Typer(help="Schedules on the Prefect server in use, or of `geb up`.")


def schedule(
    config: ConfigPath,
    cron: Annotated[
        str,
        typer.Option(
            metavar="LINE", help='Minute, hour, day, month, weekday: "0 3 * * 1", Mondays at 3.'
        ),
    ],
    timezone: Annotated[str, typer.Option(metavar="ZONE", help="Time zone of --cron.")] = "UTC",
    name: Annotated[
        str | None, typer.Option(help="Name of the schedule; the configuration's if unset.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh/--same",
            help="Each run a new one with a seed of its own, or the same run, whose steps are in "
            "the store after the first time unless an input has changed.",
        ),
    ] = True,
    overrides: Overrides = None,
    runner: RunnerName = None,
    store: ConfigStore = None,
) -> None:
    """Run a configuration by the clock, on the Prefect server in use, or on the one of `geb up`."""
    asked = configured(config, overrides, runner, store)
    quiet_prefect()
    from flows.standing.schedules import add, use_standing_server

    use_standing_server()
    add(asked, name or asked.name, cron, timezone, fresh=fresh)
    console.print(f"schedule {name or asked.name}: {cron} ({timezone})", markup=False)


@schedules.callback(invoke_without_command=True)
def list_schedules(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the schedules on the Prefect server in use, or of `geb up`; pause or remove them."""
    quiet_prefect()
    from flows.standing.schedules import schedules as found_schedules
    from flows.standing.schedules import use_standing_server

    use_standing_server()
    if context.invoked_subcommand is not None:
        return
    found = found_schedules()
    table = Table("name", "when", "zone", "state", "run", "runner", box=None, pad_edge=False)
    for each in found:
        state = "active" if each.active else "paused"
        run = f"{each.run}{', fresh' if each.fresh else ''}"
        table.add_row(each.name, each.when, each.timezone, state, run, each.runner)
    answer(as_json, [dataclasses.asdict(each) for each in found], table)


@schedules.command("pause")
def pause(name: ScheduleName) -> None:
    """Let a schedule start no run until it is resumed."""
    _set_active(name, active=False)


@schedules.command("resume")
def resume(name: ScheduleName) -> None:
    """Let a paused schedule start runs again."""
    _set_active(name, active=True)


@schedules.command("remove")
def remove(name: ScheduleName) -> None:
    """Remove a schedule; its runs stay."""
    from flows.standing.schedules import remove as remove_schedule

    remove_schedule(name)
    console.print(f"schedule {name}: removed", markup=False)


def _set_active(name: str, *, active: bool) -> None:
    from flows.standing.schedules import set_active

    set_active(name, active)
    console.print(f"schedule {name}: {'active' if active else 'paused'}", markup=False)
