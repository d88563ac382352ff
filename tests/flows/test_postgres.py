"""`geb up` with PostgreSQL behind its server: the address, and what is kept there."""

import getpass
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.standing.database import for_prefect, parse_database
from stages.contract.errors import UserError
from tests.flows.loop import geb, geb_refused
from tests.flows.standing import geb_up
from tests.lacking import lacking
from tests.programs import run_program


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://me:p%40ss@db/prefect", "postgresql+asyncpg://me:p%40ss@db/prefect"),
        ("postgres://me@db:5433/prefect", "postgresql+asyncpg://me@db:5433/prefect"),
        ("postgresql://db/prefect?sslmode=require", "postgresql+asyncpg://db/prefect?ssl=require"),
    ],
)
def test_an_address_as_psql_takes_it_becomes_the_one_that_prefect_needs(
    given: str, used: str
) -> None:
    assert for_prefect(parse_database(given)) == used


@pytest.mark.parametrize(
    "given", ["db/prefect", "mysql://me:secret@db/prefect", "postgresql://me:secret@db"]
)
def test_what_is_no_address_of_postgresql_is_refused(given: str) -> None:
    with pytest.raises(UserError, match="not the address of a PostgreSQL database") as refused:
        parse_database(given)
    assert "postgresql://USER:PASSWORD@HOST" in refused.value.remedy
    assert "secret" not in str(refused.value)


def test_a_database_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    said = geb_refused(
        *("up", "--home", tmp_path / "home", "--store", tmp_path / "store"),
        *("--database", "postgresql://me:secret@nowhere.invalid/prefect"),
    )
    assert "postgresql://me:***@nowhere.invalid/prefect cannot be used" in said
    assert "secret" not in said


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
        self.url = f"postgresql://{self._user}@127.0.0.1:{self._port}/postgres"

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
        user = self._user if os.getuid() == 0 else None
        done = run_program(self._bin / program, *arguments, input="", user=user, cwd=self._folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    database = Postgres()
    database.start()
    yield database
    database.stop()


@pytest.mark.slow
@pytest.mark.postgres
def test_geb_up_keeps_its_server_s_data_in_the_database_that_it_is_given(
    postgres: Postgres, tmp_path: Path
) -> None:
    address = postgres.url
    with geb_up(tmp_path, "--database", address) as (_, up):
        with up.client() as client:
            assert postgres.count("deployment") == len(client.read_deployments()) > 0
        again = ("up", "--home", up.home, "--store", up.store, "--database")
        same = geb(*again, address)
        assert f"database       {address}" in same.stdout
        assert f"the database {address}" in geb_refused(*again, f"{address}2")
    assert not list(up.home.rglob("*.db"))
    assert 'database "postgres2" does not exist' in geb_refused(*again, f"{address}2")
