"""Prefect server of a run: the configured one, or one that is started for the time of the run.

Where none is configured, Prefect would start one in the terminal's process group. Ctrl-C would end
it before the run has reported that it stops, and the run would wait minutes for it. Ours has a
session of its own under the supervisor: it outlives Ctrl-C, serves the UI, and ends with the run.
"""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings

from stages.contract.errors import GebError, UserError

_START_SECONDS = 180.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_ACCESS_SECONDS = 30.0
_SERVER = "flows.standing.patient_server"


# Kept open to the end of this process: the server ends when the pipe closes, after Prefect has
# sent its last messages at exit.
_lifelines: list[IO[bytes]] = []


def ensure_prefect_server(log: Path, say: Callable[[str], None]) -> str | None:
    """Makes sure that this process has a Prefect server until it ends.

    A server that is started here and ends by itself is started again, at the same address and with
    the same database: Prefect's client waits for it.

    Args:
        log: File for the output of a server that is started here; its folder is created.
        say: Tells a person that the server has ended; called from another thread.

    Returns:
        Address of the UI of the server started here; None where one is configured already.

    Raises:
        UserError: The configured server does not know us.
        GebError: It does not answer, or the one of our own does not start.
    """
    if get_current_settings().api.url:
        _require_access()
        return None
    address = f"http://127.0.0.1:{_free_port()}"
    server = start_server(address, log, {})
    use_server(f"{address}/api")
    _require_access()
    threading.Thread(
        target=_keep_running, args=(server, address, log, say), name="server", daemon=True
    ).start()
    return address


def _keep_running(
    server: subprocess.Popen[bytes], address: str, log: Path, say: Callable[[str], None]
) -> None:
    """Starts the server again whenever it has ended; ends the command where that fails."""
    while True:
        assert server.stdin is not None
        _lifelines.append(server.stdin)
        server.wait()
        kept = log.with_name(f"{log.stem}-{time.strftime('%Y%m%d-%H%M%S')}.log")
        # Its folder may be gone, with the run's; a new one begins with a new log.
        with contextlib.suppress(FileNotFoundError):
            log.replace(kept)
        say(f"Prefect's server has ended by itself (its output: {kept}); starting it again")
        try:
            server = start_server(address, log, {})
        except GebError as error:
            say(str(error))
            os.kill(os.getpid(), signal.SIGTERM)
            return


def start_server(
    address: str, log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts a Prefect server that ends when the returned process's stdin is closed.

    Args:
        address: ``http://HOST:PORT`` to serve at.
        log: File for its output; its folder is created.
        environment: Variables for it beside this process's.

    Raises:
        GebError: The server does not start.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    server = _start_supervised(
        ["-m", _SERVER, "server", "start", "--host", host, "--port", port],
        log,
        # The UI asks port 4200 unless it is told; links in messages lead to it.
        {
            "PREFECT_SERVER_UI_API_URL": f"{address}/api",
            "PREFECT_UI_URL": address,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address,
            # Its output goes into a file of its own, whatever the terminal shows.
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",
            **environment,
        },
    )
    deadline = time.monotonic() + _START_SECONDS
    while not is_prefect(f"{address}/api"):
        if server.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text().splitlines()[-5:])
            raise GebError(f"Prefect's server does not start; see {log}:\n{last}")
        time.sleep(_POLL_SECONDS)
    return server


def _start_supervised(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts this interpreter under the supervisor, which ends all below it when stdin closes.

    Args:
        arguments: Arguments of the interpreter.
        log: File for the output; its folder is created.
        environment: Variables beside this process's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "stages.contract.supervisor"),
                *("--grace", str(_GRACE_SECONDS), "--", sys.executable, *arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def is_prefect(api: str) -> bool:
    """True where a healthy Prefect server answers at this address of an API."""
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=5) as answer:
            return bool(answer.read().strip() == b"true")
    except (urllib.error.URLError, OSError, ValueError):
        return False


def _require_access() -> None:
    """Asks the configured server for its version, as Prefect's client does first.

    Raises:
        UserError: It does not know us.
        GebError: It does not answer.
    """
    settings = get_current_settings().api
    request = urllib.request.Request(f"{settings.url}/admin/version")
    if settings.auth_string is not None:
        basic = base64.b64encode(settings.auth_string.get_secret_value().encode()).decode()
        request.add_header("Authorization", f"Basic {basic}")
    elif settings.key is not None:
        request.add_header("Authorization", f"Bearer {settings.key.get_secret_value()}")
    try:
        urllib.request.urlopen(request, timeout=_ACCESS_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise UserError(
                f"the Prefect server at {settings.url} does not let us in: {error.code} "
                f"{error.reason}",
                "set PREFECT_API_AUTH_STRING to what the server has as "
                "PREFECT_SERVER_API_AUTH_STRING (on Prefect Cloud, set PREFECT_API_KEY)",
            ) from error
        # Prefect's client understands its other answers.
    except OSError as error:
        raise GebError(
            f"no Prefect server answers at {settings.url}: {error}. Start it, or correct or unset "
            "PREFECT_API_URL: without it the command starts a server of its own"
        ) from error


def use_server(api: str) -> None:
    """Makes this process report to the server at this address of an API."""
    os.environ["PREFECT_API_URL"] = api
    refresh_global_settings_context()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
