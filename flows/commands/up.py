"""Command ``geb up``: what serves the Prefect UI on this machine."""

import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.common import ParallelRuns, console, quiet_prefect
from flows.pipeline.presets import DEFAULT_STORE, STORE_VARIABLE
from flows.standing.home import DEFAULT_HOME, HOME_VARIABLE, Home, Standing
from stages.contract.errors import UserError
from stages.store.base import Store
from stages.store.opening import open_store

# A stage's grace period, the worker's and the server's.
_END_SECONDS = 180.0

HomePath = Annotated[
    Path,
    typer.Option("--home", envvar=HOME_VARIABLE, help="Folder of the server's database and logs."),
]


def up(
    store: Annotated[
        str | None,
        typer.Option(
            "--store", envvar=STORE_VARIABLE, help="The store of all runs, in place of a preset's."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of a Prefect server started here.")
    ] = 4200,
    limit: ParallelRuns = 2,
    home: HomePath = DEFAULT_HOME,
    password: Annotated[
        bool, typer.Option(help="Let a Prefect server started here ask for a password.")
    ] = True,
    stop: Annotated[
        bool, typer.Option("--stop", help="End what `geb up` started in another terminal.")
    ] = False,
) -> None:
    """Start a Prefect server, a worker and the deployments, to use from the UI; Ctrl-C ends them.

    With PREFECT_API_URL set that server is used, and none is started.
    """
    place = Home(home)
    if stop:
        ended = place.end(_END_SECONDS)
        console.print("ended" if ended else f"nothing of {home} is running", markup=False)
        return
    opened = open_store(store or DEFAULT_STORE, create=True)
    if place.claim():
        _serve(place, opened, bool(store), port, limit, password)
    else:
        _show_running(place, opened.location)


def _serve(
    home: Home, store: Store, is_of_all: bool, port: int, limit: int, password: bool
) -> None:
    quiet_prefect()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background job. Its worker, which ends by SIGINT, must not inherit that.
        signal.signal(signal.SIGINT, lambda *_: None)
    console.print("starting; the first start takes half a minute")
    from prefect.settings import get_current_settings

    from flows.standing.deployments import register as register_deployments
    from flows.standing.server import require_access
    from flows.standing.services import Services

    services = Services(home)
    configured = get_current_settings().api.url
    try:
        if configured:
            require_access()
            ui = get_current_settings().ui_url or configured.removesuffix("/api")
        else:
            ui = services.start_server(port, password)
        register_deployments(store.location if is_of_all else None, Path.cwd(), limit)
        services.start_worker()
        standing = Standing(
            pid=os.getpid(),
            ui=ui,
            api=str(get_current_settings().api.url),
            store=store.location,
            password_file=str(home.password_file) if password and not configured else None,
        )
        home.announce(standing)
        _show(standing)
        console.print("Ctrl-C, or `geb up --stop` in another terminal, ends it")
        services.wait()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        services.end(console.print)


def _show_running(home: Home, store: str) -> None:
    standing = home.standing()
    if standing is None:
        raise UserError(f"another `geb up` of {home.path} has just ended", "try again")
    if standing.store != store:
        raise UserError(
            f"`geb up` is running already, with the store {standing.store}",
            "`geb up --stop` first, or use another --home and --port",
        )
    console.print(f"running already, pid {standing.pid}")
    _show(standing)


def _show(standing: Standing) -> None:
    console.print(f"Prefect UI     [bold]{standing.ui}[/]")
    if standing.password_file is not None:
        password = Path(standing.password_file).read_text()
        console.print(f"password       {password}", markup=False)
    console.print(f"store          {standing.store}", markup=False)
    exports = f"to have `geb run` report there: {standing.exports}"
    console.print(exports, markup=False)
