"""The ``geb`` command."""

import errno
import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from flows.commands import (
    bandit,
    evaluate,
    init,
    inspect,
    models,
    run,
    schedule,
    status,
    store,
    up,
)
from flows.commands.terminal import messages, show_warning
from stages.contract.errors import (
    EXIT_FAILED,
    EXIT_USER,
    GebError,
    NoStoreError,
    RunCancelledError,
    StageFailedError,
    StoppedError,
    UserError,
)

# Exit code of Ctrl-C in Typer, by the shell's convention.
_EXIT_INTERRUPTED = 130
_STOPPED = "stopped"
# No file system takes them back: a name is too long, or a file is where a folder belongs.
_MISTAKES = (errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR)

app = typer.Typer(
    name="geb",
    help="Iterative online RLHF with the General Exploratory Bonus.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
# The help keeps this order.
_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Runs": (init.init, run.plan, run.run, run.resume, status.status, status.logs, run.report),
    "Comparisons": (evaluate.evaluate, evaluate.sweep, inspect.compare),
    "Models": (models.models, models.promote, models.export),
    "Prefect": (up.up, schedule.schedule),
    "Store": (store.verify, store.gc),
    "Reference": (inspect.fields, bandit.bandit),
}
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(importlib.metadata.version("geb"))
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Iterative online RLHF with the General Exploratory Bonus."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Runs the command line; 0 when the work is done, 64 for a person's mistake, 1 otherwise."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or a log that has no κ shows a question mark.
        sys.stdout.reconfigure(errors="replace")
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: show_warning(str(message))
        sys.exit(_exit_code())


def _exit_code() -> int:
    try:
        result = typer.main.get_command(app).main(prog_name="geb", standalone_mode=False)
    except (Exception, StoppedError) as error:
        return _tell(error)
    if result == _EXIT_INTERRUPTED:
        messages().print(_STOPPED)
    return result if isinstance(result, int) else 0


def _tell(error: BaseException) -> int:
    """Prints an error's message and remedy and returns the exit code; raises what is a defect."""
    match error:
        case UserError():
            return _say(EXIT_USER, error.message, error.remedy)
        case TyperException():
            remedy = "add --help to the command to see what it takes"
            if "unexpected extra argument" in error.format_message() and "--set" in sys.argv:
                remedy = "write each setting as one word, --set NAME=VALUE; " + remedy
            return _say(EXIT_USER, error.format_message(), remedy)
        case StageFailedError():
            for line in error.last_lines:
                messages().print(f"[dim]│[/] {escape(line)}")
            remedy = "fix the cause, then run the command again: finished steps are kept"
            return _say(EXIT_FAILED, str(error), remedy)
        case RunCancelledError():
            messages().print(escape(str(error)))
            return _EXIT_INTERRUPTED
        case NoStoreError():
            remedy = "correct --store, GEB_STORE or `store` of the configuration"
            return _say(EXIT_USER, str(error), remedy)
        case GebError():
            return _say(EXIT_FAILED, str(error))
        case RuntimeError() if "home directory" in str(error):
            # The home folder of a user whom this machine does not know.
            return _say(EXIT_USER, str(error), "write the path without ~")
        case BrokenPipeError():
            _drop_output()
            return EXIT_FAILED
        case OSError(filename=None, errno=errno.ENOSPC | errno.EDQUOT):
            _drop_output()
            remedy = "make room on the disk, then call the command again"
            return _say(EXIT_FAILED, f"a file or the output: {error.strerror}", remedy)
        case OSError(filename=str() | bytes()):
            message = f"{error.filename!s}: {error.strerror}"
            if error.errno in _MISTAKES:
                return _say(EXIT_USER, message, "name another place")
            return _say(EXIT_FAILED, message, "check that the place exists, is yours, and has room")
    causes = list(_causes(error))
    # pydantic turns a signal that comes while it serialises into its error.
    if any(isinstance(cause, typer.Abort | StoppedError | KeyboardInterrupt) for cause in causes):
        messages().print(_STOPPED)
        return _EXIT_INTERRUPTED
    # Prefect's client loads httpx and wraps the error of its first request; the commands that do
    # without it start faster.
    httpx = sys.modules.get("httpx")
    if httpx is not None and any(isinstance(cause, httpx.TransportError) for cause in causes):
        message = f"the Prefect server does not answer: {error or type(error).__name__}"
        remedy = "start it, or correct PREFECT_API_URL; then resume: finished steps are kept"
        return _say(EXIT_FAILED, message, remedy)
    raise error


def _say(code: int, message: str, remedy: str = "") -> int:
    messages().print(f"[bold red]error[/] {escape(message)}")
    if remedy:
        messages().print(f"[bold]remedy[/] {escape(remedy)}")
    return code


def _drop_output() -> None:
    """Discards what stdout still holds: Python must not try to write it once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


if __name__ == "__main__":
    main()
