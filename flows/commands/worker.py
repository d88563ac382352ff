"""Command ``geb worker``: serves a work pool with stages or whole runs on this machine."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from flows.commands.common import console
from flows.commands.run import interrupt
from stages.contract.errors import GebError, UserError


def register(app: typer.Typer) -> None:
    """Adds this command."""
    app.command()(worker)


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
