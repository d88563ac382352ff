"""The ``geb`` command."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Annotated, TextIO

import typer
from rich.markup import escape
from typer.exceptions import TyperException

from flows.commands import (
    bandit,
    doctor,
    evaluate,
    images,
    init,
    inspect,
    models,
    paper,
    run,
    status,
    store,
    up,
)
from flows.commands.terminal import messages
from flows.execution.run_record import DamagedRecordWarning
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
# Of a failed stage's log; all of it is in the file that the message names.
_SHOWN_LINES = 20
_STOPPED = "stopped"

app = typer.Typer(
    name="geb",
    help="Iterative online RLHF with the General Exploratory Bonus.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (
    init,
    run,
    status,
    evaluate,
    inspect,
    models,
    store,
    doctor,
    bandit,
    paper,
    up,
    images,
):
    module.register(app)


def _version(asked: bool) -> None:
    if asked:
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
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        sys.exit(_run())


def _run() -> int:
    errors = messages()
    try:
        result = typer.main.get_command(app).main(prog_name="geb", standalone_mode=False)
        if result == _EXIT_INTERRUPTED:
            errors.print(_STOPPED)
        return result if isinstance(result, int) else 0
    except UserError as error:
        errors.print(f"[bold red]error[/] {escape(error.message)}")
        if error.remedy:
            errors.print(f"[bold]remedy[/] {escape(error.remedy)}")
        return EXIT_USER
    except TyperException as error:
        errors.print(f"[bold red]error[/] {escape(error.format_message())}")
        errors.print("[bold]remedy[/] add --help to the command to see what it takes")
        return EXIT_USER
    except StageFailedError as error:
        for line in error.last_lines[-_SHOWN_LINES:]:
            errors.print(f"[dim]│[/] {escape(line)}")
        errors.print(f"[bold red]error[/] {escape(str(error))}")
        errors.print(
            "[bold]remedy[/] fix the cause, then run the command again: what is done stays done"
        )
        return EXIT_FAILED
    except RunCancelledError as error:
        errors.print(escape(str(error)))
        return _EXIT_INTERRUPTED
    except NoStoreError as error:
        errors.print(f"[bold red]error[/] {escape(str(error))}")
        errors.print("[bold]remedy[/] correct --store, GEB_STORE or `store` of the configuration")
        return EXIT_USER
    except GebError as error:
        errors.print(f"[bold red]error[/] {escape(str(error))}")
        return EXIT_FAILED
    except (typer.Abort, StoppedError):
        errors.print(_STOPPED)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it; Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # What did not fit may be the output; Python must not try it once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            errors.print(f"[bold red]error[/] a file or the output: {error.strerror}")
            errors.print("[bold]remedy[/] make room on the disk, then call the command again")
            return EXIT_FAILED
        if error.filename is None:
            raise
        # Permissions, a full disk, a folder where a file should be.
        errors.print(f"[bold red]error[/] {escape(str(error.filename))}: {error.strerror}")
        errors.print("[bold]remedy[/] check that the place exists, is yours, and has room")
        return EXIT_FAILED
    except Exception as error:
        if any(isinstance(each, KeyboardInterrupt) for each in _causes(error)):
            # pydantic makes an error of its own of a signal that comes while it serialises.
            errors.print(_STOPPED)
            return _EXIT_INTERRUPTED
        if not _is_of_connection(error):
            raise
        said = str(error) or type(error).__name__
        errors.print(f"[bold red]error[/] the Prefect server does not answer: {escape(said)}")
        errors.print(
            "[bold]remedy[/] start it, or correct PREFECT_API_URL; then resume: what is done stays "
            "done"
        )
        return EXIT_FAILED


def _is_of_connection(error: Exception) -> bool:
    # Prefect's client loads httpx; the commands that do without it start faster.
    httpx = sys.modules.get("httpx")
    # Of a client's first request Prefect makes another error.
    return httpx is not None and any(
        isinstance(each, httpx.TransportError) for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was made of."""
    while error is not None:
        yield error
        error = error.__cause__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Shows warnings about a configuration or a record as messages, others as Python does."""
    if issubclass(category, DamagedRecordWarning):
        errors = messages()
        errors.print(f"[bold yellow]warning[/] {escape(str(message))}")
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


if __name__ == "__main__":
    main()
