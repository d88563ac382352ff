"""Processes of `geb up`: a Prefect server and a worker, started and ended together."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from flows.runners.command_lines import supervised
from flows.standing.deployments import POOL
from flows.standing.home import Home
from flows.standing.server import start_server, use_server
from stages.contract.errors import GebError, UserError

_POLL_SECONDS = 0.5
# A stage gets its own grace period from its supervisor; the flow run above it must outlive that.
_GRACE_SECONDS = 60.0
_SERVER_SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Slots that a run holds survive a restart of the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
    # SQLite lets one write at a time; while stages take every core it needs patience.
    "PREFECT_SERVER_DATABASE_TIMEOUT": "60",
    "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": "60",
}


class Services:
    """A Prefect server, if none is configured, and a worker."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self, port: int, password: bool) -> str:
        """Starts a server and returns the address of its UI.

        Its database is a file in the home, unless PREFECT_SERVER_DATABASE_CONNECTION_URL names
        another one.

        Raises:
            UserError: Something else has the port.
            GebError: The server does not start.
        """
        address = f"http://127.0.0.1:{port}"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise UserError(
                    f"port {port} of this machine is taken",
                    f"name a free one, --port {port + 1}; a Prefect server there is used with "
                    f"PREFECT_API_URL={address}/api",
                )
        settings = _SERVER_SETTINGS | {"PREFECT_HOME": str(self._home.path / "prefect")}
        if password:
            settings["PREFECT_SERVER_API_AUTH_STRING"] = self._home.password()
            os.environ["PREFECT_API_AUTH_STRING"] = self._home.password()
        self._running["server"] = start_server(address, self._home.log("server"), settings)
        use_server(f"{address}/api")
        return address

    def start_worker(self) -> None:
        """Starts a worker for all queues of the pool; it ends with this process."""
        program = ["prefect", "worker", "start", "--install-policy", "never", "--type", "process"]
        program += ["--pool", POOL, "--name", f"geb-up-{socket.gethostname()}-{os.getpid()}"]
        with self._home.log("worker").open("w") as output:
            self._running["worker"] = subprocess.Popen(
                supervised(sys.executable, _GRACE_SECONDS, program=program),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    # Between two polls for flow runs to start.
                    "PREFECT_WORKER_QUERY_SECONDS": "2",
                },
            )

    def wait(self) -> NoReturn:
        """Waits until a signal raises an exception; GebError if a process ends by itself."""
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    raise GebError(f"the {name} has ended; see {self._home.log(name)}")
            time.sleep(_POLL_SECONDS)

    def end(self, say: Callable[[str], None]) -> None:
        """Ends the processes that were started here, the server last."""
        if worker := self._running.get("worker"):
            say("ending the worker and its flow runs")
            _end_flow_runs(worker.pid)
            worker.communicate()
        if server := self._running.get("server"):
            say("ending the server")
            server.communicate()


def _end_flow_runs(supervisor: int) -> None:
    """Ends the flow runs of the worker below a supervisor; each reports that it crashed.

    The worker is halted meanwhile: told to end, it would kill them, and they would stay Running.
    """
    for worker in _children(supervisor):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            left = [os.pidfd_open(child) for child in _children(worker)]
            for run in left:
                signal.pidfd_send_signal(run, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_SECONDS
            while left and (rest := deadline - time.monotonic()) > 0:
                ended, _, _ = select.select(left, [], [], rest)
                left = [process for process in left if process not in ended]
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGCONT)


def _children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, task.read_text().split())
    return children
