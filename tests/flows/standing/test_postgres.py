"""`geb up` with PostgreSQL behind its server."""

import getpass
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from flows.standing.server import free_port
from tests.flows.loop import geb
from tests.flows.standing.standing import geb_up
from tests.programs import lacking, run_program


class Postgres:
    """A PostgreSQL server of the test's own on loopback."""

    def __init__(self):
        folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        beside = shutil.which("initdb")
        if not folders and beside is None:
            lacking("PostgreSQL is not installed")
        self._bin = folders[-1] if folders else Path(str(beside)).parent
        # It refuses to run as root, and its user must be able to reach its folder.
        self._user = "postgres" if getpass.getuser() == "root" else getpass.getuser()
        self._folder = Path(tempfile.mkdtemp(prefix="geb-postgres-"))
        shutil.chown(self._folder, self._user)
        self._port = free_port()
        self.url = f"postgresql+asyncpg://{self._user}@127.0.0.1:{self._port}/postgres"

    def start(self):
        data = str(self._folder / "data")
        self._run("initdb", "--pgdata", data, "--auth", "trust", "--no-sync")
        options = f"-p {self._port} -k {self._folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "--pgdata", data, "--log", log, "--wait", "-o", options, "start")

    def stop(self):
        data = str(self._folder / "data")
        self._run("pg_ctl", "--pgdata", data, "--wait", "--mode", "immediate", "stop")
        shutil.rmtree(self._folder)

    def count(self, table):
        """Rows of a table."""
        psql = ("-h", "127.0.0.1", "-p", str(self._port), "-d", "postgres", "-At")
        return int(self._run("psql", *psql, "-c", f"select count(*) from {table}"))

    def _run(self, program, *arguments):
        user = self._user if os.getuid() == 0 else None
        done = run_program(self._bin / program, *arguments, input="", user=user, cwd=self._folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def postgres():
    database = Postgres()
    database.start()
    yield database
    database.stop()


@pytest.mark.slow
@pytest.mark.postgres
def test_geb_up_uses_the_database_that_prefect_s_variable_names(postgres, tmp_path, monkeypatch):
    variable = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
    monkeypatch.setenv(variable, postgres.url)
    with geb_up(tmp_path) as (_, up), up.client() as client:
        assert postgres.count("deployment") == len(client.read_deployments()) > 0
    assert not list(up.home.rglob("*.db"))
    monkeypatch.setenv(variable, f"{postgres.url}2")
    done = geb("up", "--home", up.home, "--store", up.store, PREFECT_API_URL="")
    assert done.returncode == 1
    assert 'database "postgres2" does not exist' in done.stderr
