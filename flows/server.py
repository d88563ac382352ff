"""The Prefect server that a run reports to: the configured one, or one for the time of the run.

Prefect would start a server of its own where none is configured. That one belongs to the terminal's
process group, so that Ctrl-C ends it before the run has reported that it stops, and the run then
waits minutes for a server that is gone. Ours sits in a session of its own under the supervisor: it
outlives Ctrl-C, serves the UI as well, and ends with the run however the run ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from prefect.context import refresh_global_settings_context
from prefect.settings import get_current_settings

from stages.contract.errors import GebError

_START_SECONDS = 180.0
_POLL_SECONDS = 0.2


# Kept open to the end of this process: the server ends when the pipe does, after Prefect has sent
# what it still has to say at exit.
_lifelines: list[IO[bytes]] = []


def ensure_prefect_server(log: Path) -> str | None:
    """Makes sure that this process has a Prefect server until it ends.

    Args:
        log: File for the output of a server that is started here; its folder is created.

    Returns:
        Address of the UI of the server started here; None where one is configured already.

    Raises:
        GebError: The server does not start.
    """
    if get_current_settings().api.url:
        return None
    port = _free_port()
    address = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "stages.contract.supervisor", "--grace", "10", "--"),
                *(sys.executable, "-m", "prefect", "server", "start", "--port", str(port)),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # The UI asks port 4200 unless it is told.
            env=os.environ | {"PREFECT_SERVER_UI_API_URL": f"{address}/api"},
        )
    assert server.stdin is not None
    _lifelines.append(server.stdin)
    _wait_until_healthy(f"{address}/api/health", server, log)
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    refresh_global_settings_context()
    return address


def _wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                last = "\n".join(log.read_text().splitlines()[-5:])
                raise GebError(f"Prefect's server does not start; see {log}:\n{last}") from None
            time.sleep(_POLL_SECONDS)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
