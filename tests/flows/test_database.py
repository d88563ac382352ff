"""The address of a PostgreSQL database for `geb up --database`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.standing.database import parse_database
from stages.contract.errors import UserError
from tests.flows.loop import geb


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://me:p%40ss@db/prefect", "postgresql+asyncpg://me:p%40ss@db/prefect"),
        ("postgres://me@db:5433/prefect", "postgresql+asyncpg://me@db:5433/prefect"),
        ("postgresql+asyncpg://db/prefect", "postgresql+asyncpg://db/prefect"),
        ("postgresql://db/prefect?sslmode=require", "postgresql+asyncpg://db/prefect?ssl=require"),
    ],
)
def test_an_address_as_psql_takes_it_becomes_the_one_that_prefect_needs(
    given: str, used: str
) -> None:
    assert parse_database(given).render_as_string(hide_password=False) == used


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("db/prefect", "not the address of a database"),
        ("mysql://me:secret@db/prefect", "mysql:// is not PostgreSQL"),
        ("postgresql://me:secret@db", "names no database"),
    ],
)
def test_what_is_no_address_of_postgresql_is_refused(given: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        parse_database(given)
    assert "postgresql://USER:PASSWORD@HOST" in refused.value.remedy
    assert "secret" not in str(refused.value)


def test_a_database_that_cannot_be_reached_is_named_without_its_password(tmp_path: Path) -> None:
    done = geb(
        *("up", "--home", tmp_path / "home", "--store", tmp_path / "store"),
        *("--database", "postgresql://me:secret@nowhere.invalid/prefect"),
    )
    assert done.returncode == 64
    assert "postgresql://me:***@nowhere.invalid/prefect cannot be used" in done.stderr
    assert "secret" not in done.stderr
