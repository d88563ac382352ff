"""PostgreSQL behind a Prefect server: its address in Prefect's form, and a first connection."""

import asyncio
from contextlib import suppress

import asyncpg
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from stages.contract.errors import UserError

_CONNECT_SECONDS = 15.0


def parse_database(address: str) -> URL:
    """The address of a PostgreSQL database, ``postgresql://…`` or ``postgres://…`` as libpq's."""
    with suppress(ArgumentError):
        url = make_url(address)
        if url.drivername in ("postgres", "postgresql") and url.database:
            return url.set(drivername="postgresql")
    # Not the address itself: it may hold a password.
    raise UserError(
        "--database is not the address of a PostgreSQL database",
        "write it as postgresql://USER:PASSWORD@HOST:5432/DATABASE",
    )


def for_prefect(url: URL) -> str:
    """The address with its password and the driver that Prefect needs."""
    # The driver's name for libpq's setting; its values are the same.
    query = {"ssl" if name == "sslmode" else name: each for name, each in url.query.items()}
    return url.set(drivername="postgresql+asyncpg", query=query).render_as_string(
        hide_password=False
    )


def check_database(url: URL) -> None:
    """Connects to a database once.

    Raises:
        UserError: It does not let us in, is not there, or cannot hold Prefect's texts.
    """
    shown = url.render_as_string()
    try:
        encoding = asyncio.run(_encoding(url.render_as_string(hide_password=False)))
    # The driver's own timeout has no words.
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise UserError(
            f"--database {shown} cannot be used: {str(error) or type(error).__name__}",
            "correct the address, or start PostgreSQL and create user and database",
        ) from error
    if encoding != "UTF8":
        raise UserError(
            f"--database {shown} is encoded in {encoding}, and Prefect's texts in UTF-8",
            "create the database with: createdb --encoding UTF8 --template template0",
        )


async def _encoding(address: str) -> str:
    connection = await asyncpg.connect(address, timeout=_CONNECT_SECONDS)
    try:
        return str(await connection.fetchval("SHOW server_encoding"))
    finally:
        await connection.close()
