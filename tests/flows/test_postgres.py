"""A run on two workers that share a store, with PostgreSQL behind the server; one is killed."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient

from stages.contract.local_store import LocalStore
from tests.flows.cluster import deploy_stage, make_pool, worker
from tests.flows.loop import geb, started, steps, wait_for_line, write_config
from tests.flows.prefect_server import Server
from tests.flows.probes import wait_until
from tests.flows.standing import geb_up
from tests.lacking import lacking

pytestmark = [pytest.mark.slow, pytest.mark.postgres]


class Postgres:
    """A PostgreSQL server of the test's own on loopback."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        beside = shutil.which("initdb")
        if not found and beside is None:
            lacking("PostgreSQL is not installed")
        self._bin = found[-1] if found else Path(str(beside)).parent
        # It refuses to run as root, and its user must be able to reach its folder.
        self._user = "postgres" if getpass.getuser() == "root" else getpass.getuser()
        self._folder = Path(tempfile.mkdtemp(prefix="geb-postgres-"))
        shutil.chown(self._folder, self._user)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"postgresql+asyncpg://{self._user}@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        data = str(self._folder / "data")
        self._run("initdb", "--pgdata", data, "--auth", "trust", "--no-sync")
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "--pgdata", data, "--log", log, "--wait", "-o", options, "start")

    def stop(self) -> None:
        data = str(self._folder / "data")
        self._run("pg_ctl", "--pgdata", data, "--wait", "--mode", "immediate", "stop")
        shutil.rmtree(self._folder)

    def count(self, table: str) -> int:
        """Rows of a table."""
        psql = ("-h", "127.0.0.1", "-p", str(self._port), "-d", "postgres", "-At")
        return int(self._run("psql", *psql, "-c", f"select count(*) from {table}"))

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self._bin / program, *arguments],
            user=self._user if os.getuid() == 0 else None,
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    database = Postgres()
    database.start()
    yield database
    database.stop()


@pytest.fixture
def server(postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    home = tmp_path / "server"
    home.mkdir()
    server = Server(home, PREFECT_API_DATABASE_CONNECTION_URL=postgres.url)
    server.start()
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    yield server
    server.stop()


def test_a_run_s_stages_land_where_they_should_and_a_killed_worker_loses_nothing(
    server: Server, postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEB_GPUS", "0")
    monkeypatch.setenv("GEB_GPU_LOCKS", str(tmp_path / "locks"))
    config = write_config(
        tmp_path,
        name="clustered",
        execution={
            "runner": "work_pool",
            "parallel": 4,
            "retries": 1,
            "retry_delay_seconds": 0,
            "work_pool": {"poll_seconds": 0.5},
        },
        # There by name alone: these stages do without where there is none.
        resources={"generate": {"gpus": 1}, "score": {"gpus": 1}},
    )
    with SyncPrefectClient(server.api) as client:
        for name in ("cpu", "gpu"):
            make_pool(client, f"pool-{name}", name)
            deploy_stage(client, name, f"pool-{name}", name)
        with (
            worker(client, tmp_path, "pool-gpu", "gpu", "on-gpus"),
            worker(client, tmp_path, "pool-cpu", "cpu", "on-cpus") as first,
            started("run", config) as process,
        ):
            wait_for_line(process, "sft:", "steps")
            first.kill()
            first.wait()
            wait_until(lambda: not lease_held(tmp_path / "store", "sft"))
            with worker(client, tmp_path, "pool-cpu", "cpu", "on-cpus"):
                output, _ = process.communicate()
            assert process.returncode == 0, output
        runs = client.read_flow_runs()
    places = {
        (run.name.split(" · ")[1], run.labels["prefect.worker.name"])
        for run in runs
        if run.name.startswith("clustered · ") and run.parent_task_run_id is not None
    }
    records = steps(tmp_path / "store", "clustered")
    expected = {
        (name, "on-gpus" if each["stage"] in ("generate", "score") else "on-cpus")
        for name, each in records.items()
    }
    assert places == expected
    assert {each["state"] for each in records.values()} == {"done"}
    assert all_whole(tmp_path / "store") == len(records)
    assert postgres.count("flow_run") == len(runs)


def test_geb_up_keeps_its_server_s_data_in_the_database_that_it_is_given(
    postgres: Postgres, tmp_path: Path
) -> None:
    address = postgres.url.replace("+asyncpg", "")
    with geb_up(tmp_path, "--database", address) as (_, up):
        with up.client() as client:
            assert postgres.count("deployment") == len(client.read_deployments()) > 0
        same = geb("up", "--home", up.home, "--store", up.store, "--database", address)
        assert f"database       {address}" in same.stdout
        other = geb("up", "--home", up.home, "--store", up.store, "--database", f"{address}2")
        assert other.returncode == 64
        assert f"with {address} as its database" in other.stderr
    assert not list(up.home.rglob("*.db"))
    missing = geb("up", "--home", up.home, "--store", up.store, "--database", f"{address}2")
    assert missing.returncode == 64
    assert 'database "postgres2" does not exist' in missing.stderr


def lease_held(store: Path, stage: str) -> bool:
    opened = LocalStore.open(str(store))
    return any(
        opened.lease(stage, lease.name).holder() is not None
        for lease in (store / "leases" / stage).glob("*")
        if "." not in lease.name
    )


def all_whole(store: Path) -> int:
    """Number of artifacts, all of them as their manifests say."""
    opened = LocalStore.open(str(store))
    found = list(opened.artifacts())
    for stage, key in found:
        artifact = opened.load(stage, key)
        assert artifact is not None
        opened.verify(artifact)
    return len(found)
