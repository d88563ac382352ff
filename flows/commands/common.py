"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from flows.commands.terminal import TerminalConsole, messages
from flows.pipeline.config import RunConfig
from flows.pipeline.loading import load_config
from stages.store.opening import open_store

if TYPE_CHECKING:
    # It takes scipy and matplotlib, which most commands do without.
    from flows.execution.observer import Session
    from flows.report.comparison import Comparison

_WIDE_COLUMNS = 200


ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set one field, e.g. train.kappa=1e-3."),
]
NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder; new, or empty.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run in the store.")]
Registered = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="NAME:VERSION, NAME@ALIAS, or NAME: what its alias production means, else the newest.",
    ),
]
StorePath = Annotated[
    str,
    typer.Option(
        "--store", envvar="GEB_STORE", help="The store: a folder, or s3://, gs:// or az://."
    ),
]
ConfigStore = Annotated[
    str | None,
    typer.Option(
        "--store", envvar="GEB_STORE", help="The store, in place of the one that CONFIG names."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be done and start nothing.")
]
ParallelRuns = Annotated[int, typer.Option(min=1, help="Runs at the same time.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", file_okay=False, help="Copy tables and figures there as well."
    ),
]
RunnerName = Annotated[
    str | None, typer.Option("--runner", metavar="NAME", help="Where stages run: execution.runner.")
]
FromStep = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="STEP", help="Compute again: this step, and all that comes of it."
    ),
]

# Into a file or a pipe, tables keep their lines whole.
console = TerminalConsole(
    highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDE_COLUMNS
)


def config_of_command(
    path: Path, overrides: list[str] | None, runner: str | None, store: str | None
) -> RunConfig:
    """The configuration that a command line names; UserError if it is wrong or not there."""
    # --set wins over --store and --runner.
    options = [f"store={json.dumps(store)}"] if store else []
    options += [f"execution.runner={runner}"] if runner else []
    return load_config(path, [*options, *(overrides or ())])


def quiet_prefect() -> None:
    """Prefect's settings for a terminal: only the observer's log lines, no analytics."""
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    # Prefect's client asks for this one, the server for the other.
    os.environ.setdefault("DO_NOT_TRACK", "1")


def watched(as_json: bool) -> Console:
    """The console for what a command says at work; with --json, stdout is for the document."""
    return messages() if as_json else console


@contextmanager
def prefect_session(
    store: str, run: str, as_json: bool, num_steps: int | None = None
) -> Iterator[Session]:
    """A Prefect server for the flows of the block, and a display of their steps.

    SIGTERM ends the block as Ctrl-C does. A server that is started here has its log in the folder
    of ``run`` in the store. Without a number of steps, several runs show a line for each step.
    """
    quiet_prefect()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from flows.execution.console import ConsoleObserver
    from flows.execution.observer import Session
    from flows.standing.server import ensure_prefect_server

    shown = watched(as_json)
    log = open_store(store, create=True).run_path(run) / "prefect-server.log"
    if ui := ensure_prefect_server(log, lambda line: shown.print(line, markup=False)):
        shown.print(f"Prefect UI while it runs: {ui}")
    session = Session([ConsoleObserver(shown, num_steps)])
    with _set_by_signals(session.stop):
        try:
            yield session
        except BaseException as error:
            for command in getattr(error, "__notes__", ()):
                shown.print("finished steps are kept; run the same command again, or")
                shown.print(command, markup=False)
            raise


@contextmanager
def _set_by_signals(event: threading.Event) -> Iterator[None]:
    """Sets an event when SIGINT or SIGTERM comes, whichever handler Prefect has put in our place.

    The exception of a handler is lost where it is raised in a destructor or a callback; the bytes
    that Python's C code writes are not.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(64):
            if {signal.SIGINT, signal.SIGTERM} & set(numbers):
                event.set()

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    listener.start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        listener.join()
        reader.close()


def answer(as_json: bool, document: Any, *shown: RenderableType) -> None:
    """Prints a JSON document for programs to read, or what a person reads; text as it is."""
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for renderable in shown:
        # The console's setting holds for the cells of a table, too.
        console.print(renderable, markup=not isinstance(renderable, str))


def answer_comparison(as_json: bool, comparison: Comparison) -> None:
    """Prints a comparison of runs: its verdict, its tables, and the address of its page, if any."""
    shown: list[RenderableType] = [Text(f"{comparison.verdict()}\n", style="bold")]
    for table in comparison.tables():
        shown += [table, Text(f"{table.note}\n", style="dim")]
    if comparison.page:
        shown.append(f"page  {comparison.page}")
    answer(as_json, comparison.to_json() | {"page": comparison.page}, *shown)
