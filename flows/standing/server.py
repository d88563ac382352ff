"""Prefect server of a run: the configured one, or one that is started for the time of the run.

If none is configured, Prefect would start one in the terminal's process group. Ctrl-C would end
it before the run has reported that it stops, and the run would wait minutes for it. The supervisor
starts ours in a new session: it outlives Ctrl-C, serves the UI, and ends with the run.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings

from flows.runners.command_lines import supervised
from flows.standing.home import Home
from stages.contract.errors import GebError, UserError

_START_SECONDS = 180.0
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_PORTS = range(20_000, 30_000)


def ensure_prefect_server(log: Path, say: Callable[[str], None]) -> str | None:
    """Makes sure that this process has a Prefect server until it ends.

    A server that is started here and ends by itself is started again, at the same address and with
    the same database: Prefect's client waits for it. ``say`` tells a person so, from another
    thread.

    Returns:
        Address of the UI of the server started here; None if one is configured already.

    Raises:
        UserError: The configured server does not know us.
        GebError: It does not answer, or ours does not start.
    """
    if get_current_settings().api.url:
        require_access()
        return None
    address = f"http://127.0.0.1:{free_port()}"
    server = start_server(address, log, {})
    use_server(f"{address}/api")
    require_access()
    threading.Thread(
        target=_keep_running, args=(server, address, log, say), name="server", daemon=True
    ).start()
    return address


def _keep_running(
    server: subprocess.Popen[bytes], address: str, log: Path, say: Callable[[str], None]
) -> None:
    """Starts the server again whenever it has ended; ends the command if that fails.

    The thread holds the pipe to the server up to the end of this process: the server ends when the
    pipe closes, after Prefect has sent its last messages at exit.
    """
    while True:
        server.wait()
        say(f"Prefect's server has ended by itself (its output: {log}); starting it again")
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

    The log's folder is created, and the output appended. GebError if the server does not start.
    """
    host, _, port = address.removeprefix("http://").rpartition(":")
    program = ["uvicorn", "--log-level", "warning", "--factory", "--host", host, "--port", port]
    # uvicorn would import from the present folder, in which Prefect's users have a folder `flows`.
    program += ["--app-dir", os.devnull, "flows.standing.guarded_server:create_app"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        _reach_loopback()
        server = subprocess.Popen(
            supervised(sys.executable, _GRACE_SECONDS, program=program),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Without it the UI asks port 4200; links in messages lead to it.
            env={
                **os.environ,
                "PREFECT_SERVER_UI_API_URL": f"{address}/api",
                "PREFECT_UI_URL": address,
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": address,
                # Its output goes into its log, whatever the terminal shows.
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


def _reach_loopback() -> None:
    """Keeps requests of this process and its children to this machine from a proxy."""
    # A library reads only one of the two.
    names = ("NO_PROXY", "no_proxy")
    hosts = {"127.0.0.1"}
    for name in names:
        hosts |= set(filter(None, os.environ.get(name, "").split(",")))
    os.environ.update(dict.fromkeys(names, ",".join(sorted(hosts))))


def is_prefect(api: str) -> bool:
    """True if a healthy Prefect server answers at this address of an API."""
    try:
        return httpx.get(f"{api}/health", timeout=5).text.strip() == "true"
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def require_access() -> None:
    """Asks the configured server for its version.

    Raises:
        UserError: It asks for another password.
        GebError: It does not answer.
    """
    api = get_current_settings().api.url
    try:
        with get_client(sync_client=True) as client:
            client.api_version()
    except httpx.HTTPError as error:
        code = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else None
        if code in (401, 403):
            raise UserError(
                f"the Prefect server at {api} does not let us in: {code}",
                "set PREFECT_API_AUTH_STRING to what the server has as "
                "PREFECT_SERVER_API_AUTH_STRING (on Prefect Cloud, set PREFECT_API_KEY)",
            ) from error
        raise GebError(
            f"no Prefect server answers at {api}: {error}. Start it, or correct or unset "
            "PREFECT_API_URL: without it the command starts a server"
        ) from error


def use_server(api: str) -> None:
    """Makes this process report to the server at this address of an API."""
    os.environ["PREFECT_API_URL"] = api
    refresh_global_settings_context()


def use_standing_server() -> None:
    """Makes the server of PREFECT_API_URL, or the one of `geb up`, this process's.

    Raises:
        UserError: There is none, or it asks for another password.
    """
    if not get_current_settings().api.url:
        standing = Home().standing()
        if standing is None:
            raise UserError(
                "schedules live on a Prefect server, and none is named",
                "start `geb up`, or set PREFECT_API_URL to the server's",
            )
        if standing.password_file is not None:
            password = Path(standing.password_file).read_text().strip()
            os.environ["PREFECT_API_AUTH_STRING"] = password
        use_server(standing.api)
    require_access()


def free_port() -> int:
    """A free TCP port below the kernel's own range.

    A server binds it seconds later. Until then the kernel could give a port of its range to any
    connection.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise GebError("no TCP port is free on this machine")
