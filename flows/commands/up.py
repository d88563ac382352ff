"""Commands ``geb up``, ``down``, ``worker``: what serves the Prefect UI on this machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.commands.common import StorePath, console
from flows.commands.run import interrupt, quiet_prefect
from flows.standing.home import DEFAULT_HOME, HOME_VARIABLE, Home, Standing
from stages.contract.errors import UserError
from stages.contract.stores import open_store

if TYPE_CHECKING:
    from sqlalchemy.engine import URL


from stages.contract.errors import GebError

# A stage's grace period, the worker's and the server's.
_END_SECONDS = 180.0

HomePath = Annotated[
    Path,
    typer.Option("--home", envvar=HOME_VARIABLE, help="Folder of the server's database and logs."),
]


def register(app: typer.Typer) -> None:
    """Adds these commands."""
    app.command()(up)
    app.command()(down)
    app.command()(automations)
    app.command()(worker)


def up(
    store: StorePath = "store",
    port: Annotated[int, typer.Option(help="Port of a Prefect server started here.")] = 4200,
    limit: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    home: HomePath = DEFAULT_HOME,
    database: Annotated[
        str | None,
        typer.Option(
            envvar="GEB_DATABASE",
            show_envvar=True,
            help="PostgreSQL of a Prefect server started here, "
            "postgresql://USER:PASSWORD@HOST/DATABASE; a file in --home if unset.",
        ),
    ] = None,
) -> None:
    """Start a Prefect server, a worker and the deployments, to use from the UI; Ctrl-C ends them.

    With PREFECT_API_URL set, or a Prefect server at the port already, that server is used.
    """
    place = Home(home)
    root = open_store(store, create=True).location
    # Imported here: it takes half a second, and the other commands do without it.
    from flows.standing.database import check_database, parse_database, shown

    url = None if database is None else parse_database(database)
    with place.claimed() as free:
        if not free:
            _show_running(place, root, None if url is None else shown(url))
            return
        if url is not None:
            check_database(url)
        # A predecessor that was killed may still be ending.
        place.end_leftovers(_END_SECONDS)
        _run(place, root, port, limit, url)


def down(home: HomePath = DEFAULT_HOME) -> None:
    """End what `geb up` started, from another terminal."""
    ended = Home(home).end(_END_SECONDS)
    console.print("ended" if ended else f"nothing of {home} is running", markup=False)


def automations() -> None:
    """Install the automations on the Prefect server in use; `geb up` does it by itself.

    With GEB_NOTIFY_URL set, a message goes to that webhook when a run has ended.
    """
    quiet_prefect()
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from prefect.settings import get_current_settings

    from flows.standing.automations import install_automations

    if get_current_settings().api.url is None:
        raise UserError("no Prefect server is named", "set PREFECT_API_URL")
    for name in install_automations():
        console.print(name)


def _run(home: Home, store: str, port: int, limit: int, database: URL | None) -> None:
    quiet_prefect()
    signal.signal(signal.SIGTERM, interrupt)
    console.print("starting; the first start takes half a minute")
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from prefect.settings import get_current_settings

    from flows.standing.database import shown
    from flows.standing.deployments import register as register_deployments
    from flows.standing.machine import Machine

    machine: Machine | None = None
    try:
        machine = Machine.with_server(home, port, database)
        deployments = register_deployments(store, Path.cwd(), limit)
        machine.start_worker()
        api = get_current_settings().api.url
        assert api is not None
        standing = Standing(
            pid=os.getpid(),
            ui=machine.ui,
            api=api,
            store=store,
            database=None if database is None else shown(database),
            supervisors=machine.supervisors,
        )
        home.announce(standing)
        console.print(f"deployments    {', '.join(deployments)}")
        _show(standing)
        console.print("Ctrl-C, or `geb down` in another terminal, ends it")
        machine.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if machine is not None:
            machine.stop(console.print)
        home.retract()


def _show_running(home: Home, store: str, database: str | None) -> None:
    standing = home.standing()
    if standing is None:
        raise UserError(
            f"another `geb up` of {home.path} is starting or ending", "try again in a moment"
        )
    if standing.store != store:
        raise UserError(
            f"`geb up` is running already, with the store {standing.store} and not {store}",
            "`geb down` first, or use another --home and --port beside it",
        )
    if database is not None and standing.database != database:
        raise UserError(
            f"`geb up` is running already, with {standing.database or 'a file'} as its database",
            "`geb down` first, or use another --home and --port beside it",
        )
    console.print(f"running already, pid {standing.pid}")
    _show(standing)


def _show(standing: Standing) -> None:
    console.print(f"Prefect UI     [bold]{standing.ui}[/]")
    console.print(f"store          {standing.store}", markup=False)
    if standing.database is not None:
        console.print(f"database       {standing.database}", markup=False)
    console.print(f"to have `geb run` report there: export PREFECT_API_URL={standing.api}")


def worker(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="Prefect work pool to serve.")],
    queue: Annotated[
        list[str] | None, typer.Option("--queue", help="Queue of the pool; all without.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Flow runs at the same time; no limit without.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of this worker alone: what one of its name left is found."),
    ] = None,
) -> None:
    """Serve a Prefect work pool until Ctrl-C or SIGTERM; PREFECT_API_URL names the server.

    Flow runs at work then stop their stages and end as Crashed: Retry goes on with them, and so
    does the run that waits for them, on another worker.
    """
    signal.signal(signal.SIGTERM, interrupt)
    # Imported here: Prefect takes seconds to load, and the other commands do without it.
    from prefect.settings import get_current_settings

    from flows.standing.worker import Worker, report_left_runs

    if not get_current_settings().api.url:
        raise UserError(
            "no Prefect server is configured",
            "set PREFECT_API_URL to the cluster's, http://HOST:4200/api",
        )
    if name is not None:
        for left in report_left_runs(pool, name):
            said = f"flow run {left!r}, which the worker before this one left, has crashed"
            console.print(said, markup=False)
    options = [f"--work-queue={each}" for each in queue or ()]
    options += [f"--limit={limit}"] if limit is not None else []
    options += [f"--name={name}"] if name is not None else []
    started = Worker(["--pool", pool, *options])
    try:
        code = started.wait()
    except KeyboardInterrupt:
        # Once only: a second signal must not interrupt the flow runs' end.
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_IGN)
        started.end()
        return
    raise GebError(f"the worker has ended by itself, with exit code {code}; see above")
