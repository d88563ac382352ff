"""Processes of `geb up`: a Prefect server and a worker, started and ended together."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.settings import get_current_settings
from sqlalchemy.engine import URL

from flows.standing.deployments import POOL
from flows.standing.home import Home
from flows.standing.server import is_prefect, start_server, use_server
from flows.standing.worker import Worker, report_left_runs
from stages.contract.errors import GebError, UserError

_WORKER_START_SECONDS = 120.0
_POLL_SECONDS = 0.2
# Between two polls of the worker for flow runs to start.
_QUERY_SECONDS = "2"
_DATABASE_SECONDS = "60"
_CONNECTION_VARIABLE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
_LEASES_ON_DISK = "prefect.server.concurrency.lease_storage.filesystem"


@dataclass
class Machine:
    """A Prefect server, found or started, and a worker.

    Attributes:
        home: Folder of the server's database and of the logs.
        ui: Address of the UI.
    """

    home: Home
    ui: str
    _server: subprocess.Popen[bytes] | None = None
    _worker: Worker | None = None
    _worker_name: str = field(
        default_factory=lambda: f"geb-up-{socket.gethostname()}-{os.getpid()}"
    )

    @classmethod
    def with_server(cls, home: Home, port: int, database: URL | None = None) -> Machine:
        """Finds the server: the configured one, one that listens at the port, or a new one.

        Args:
            home: Folder of the new one's database and of the logs.
            port: Port of the new one.
            database: Database of the new one; None is a file in ``home``.

        Raises:
            UserError: The configured server does not answer, something else has the port, or a
                database is given and no server would use it.
            GebError: The server does not start.
        """
        own = f"http://127.0.0.1:{port}"
        configured = (get_current_settings().api.url or "").rstrip("/")
        if configured and configured != f"{own}/api":
            if not is_prefect(configured):
                raise UserError(
                    f"no Prefect server answers at {configured}, to which PREFECT_API_URL points",
                    "start it, or unset PREFECT_API_URL for a server of this machine's own",
                )
            _refuse_database(database, f"{configured}, to which PREFECT_API_URL points")
            return cls(home, get_current_settings().ui_url or configured.removesuffix("/api"))
        if is_prefect(f"{own}/api"):
            _refuse_database(database, own)
            use_server(f"{own}/api")
            return cls(home, own)
        if _is_taken(port):
            raise UserError(
                f"port {port} of this machine is taken by something that is no Prefect server",
                "name a free one: --port 4201",
            )
        machine = cls(home, own)
        machine._server = start_server(
            own, home.log("server"), _server_environment(home.prefect, database)
        )
        use_server(f"{own}/api")
        return machine

    @property
    def supervisors(self) -> tuple[int, ...]:
        """Process ids of the supervisors that were started here."""
        return tuple(each.pid for each in self._processes().values())

    def start_worker(self) -> None:
        """Starts a worker for all queues of the pool and waits until it is there.

        Raises:
            GebError: It does not start.
        """
        log = self.home.log("worker")
        with log.open("w") as output:
            worker = self._worker = Worker(
                ["--pool", POOL, "--type", "process", "--name", self._worker_name],
                output,
                {"PREFECT_WORKER_QUERY_SECONDS": _QUERY_SECONDS},
            )
        deadline = time.monotonic() + _WORKER_START_SECONDS
        with get_client(sync_client=True) as client:
            while not any(
                each.name == self._worker_name and each.status == WorkerStatus.ONLINE
                for each in client.read_workers_for_work_pool(POOL)
            ):
                if worker.process.poll() is not None or time.monotonic() > deadline:
                    last = "\n".join(log.read_text().splitlines()[-5:])
                    raise GebError(f"the worker does not start; see {log}:\n{last}")
                time.sleep(_POLL_SECONDS)

    def wait(self) -> None:
        """Waits until a signal raises an exception; never returns.

        Raises:
            GebError: A process ended by itself.
        """
        watched = select.poll()
        names = {os.pidfd_open(each.pid): name for name, each in self._processes().items()}
        for descriptor in names:
            watched.register(descriptor, select.POLLIN)
        [(ended, _), *_] = watched.poll()
        raise GebError(f"the {names[ended]} has ended; see {self.home.log(names[ended])}")

    def stop(self, say: Callable[[str], None]) -> None:
        """Ends the processes that were started here, the server last."""
        if self._worker is not None:
            say("ending the worker and its flow runs")
            self._worker.end()
            # Where the server is gone as well, the automation finds them when it is back.
            with contextlib.suppress(httpx.HTTPError):
                report_left_runs(POOL, self._worker_name)
        if self._server is not None:
            say("ending the server")
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()

    def _processes(self) -> dict[str, subprocess.Popen[bytes]]:
        started = {} if self._server is None else {"server": self._server}
        return started if self._worker is None else {**started, "worker": self._worker.process}


def _refuse_database(database: URL | None, server: str) -> None:
    if database is not None:
        raise UserError(
            f"--database is for a Prefect server that is started here, and one answers at {server}",
            "leave --database out, or name a free port and unset PREFECT_API_URL",
        )


def _server_environment(prefect_home: Path, database: URL | None) -> dict[str, str]:
    connection = (
        {}
        if database is None
        else {_CONNECTION_VARIABLE: database.render_as_string(hide_password=False)}
    )
    return {
        **connection,
        "PREFECT_HOME": str(prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Slots that a run holds survive a restart of the server.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": _LEASES_ON_DISK,
        # SQLite lets one write at a time; beside stages that take every core it needs patience.
        "PREFECT_SERVER_DATABASE_TIMEOUT": _DATABASE_SECONDS,
        "PREFECT_SERVER_DATABASE_CONNECTION_TIMEOUT": _DATABASE_SECONDS,
    }


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
