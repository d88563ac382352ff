"""Services that the runs of a campaign share: a Prefect server, an S3 server, clusters."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.launchers import Launchers
from flows.standing.server import free_port, start_server
from tests.object_storage import aws_environment, make_bucket, s3_server

# A cut of the network is drawn shorter and longer than this.
_PATIENCE_SECONDS = "4"


class PrefectServer:
    """A Prefect server on loopback that is started again on demand, with the same database.

    Args:
        home: Its folder: database and log.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._address = f"http://127.0.0.1:{free_port()}"
        self.api = f"{self._address}/api"
        self.restarts = 0
        self._lock = threading.Lock()
        self._start()

    def restart(self) -> None:
        """Ends it and starts it again; returns when it answers."""
        with self._lock:
            self.restarts += 1
            self.end()
            self._start()

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keeps restarts out of a block; waits for the end of one."""
        with self._lock:
            yield

    def end(self) -> None:
        """Ends it; its database stays."""
        self._server.communicate()

    def _start(self) -> None:
        environment = {"PREFECT_HOME": str(self._home)}
        self._server = start_server(self._address, self._home / "server.log", environment)


class Services:
    """Services of all runs of a campaign, each started when the first run asks for it.

    Args:
        folder: Folder of their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._s3_port: int | None = None
        self.launchers = Launchers(folder, self._stack)
        self.prefect = PrefectServer(folder / "prefect")
        # All programs started from here report to it, except runs that start a server.
        os.environ["PREFECT_API_URL"] = self.prefect.api
        self._stack.callback(self.prefect.end)

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def s3_port(self) -> int:
        """Port of an S3 server with an empty bucket, which this process reaches from now on."""
        with self._lock:
            if self._s3_port is None:
                self._s3_port = self._stack.enter_context(s3_server())
                os.environ |= bucket_environment(self._s3_port)
                make_bucket()
            return self._s3_port


def bucket_environment(port: int) -> dict[str, str]:
    """Environment of a process that reaches the S3 server by this port."""
    return aws_environment(port) | {"GEB_STORE_PATIENCE_SECONDS": _PATIENCE_SECONDS}
