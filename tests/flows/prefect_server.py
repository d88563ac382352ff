"""A Prefect server of a test's own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

_START_SECONDS = 600


class Server:
    """A server on loopback that can be stopped and started again.

    Args:
        home: Its folder: database and log.
        environment: Variables beside this process's.
    """

    def __init__(self, home: Path, **environment: str) -> None:
        self.home = home
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self._environment = os.environ | {"PREFECT_HOME": str(home)} | environment
        # It is to be a server with its own database, not a client of another.
        self._environment.pop("PREFECT_API_URL", None)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it and waits until it answers."""
        with (self.home / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--port", str(self.port)],
                env=self._environment,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{self.api}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self._process.poll() is None, (self.home / "server.log").read_text()
                assert time.monotonic() < deadline, "the Prefect server does not answer"
                time.sleep(0.2)

    def stop(self) -> None:
        """Ends it; its database stays."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()
