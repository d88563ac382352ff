"""PostgreSQL behind a Prefect server: its address in Prefect's form, and a first connection."""

from __future__ import annotations

import asyncio

from asyncpg.exceptions import InterfaceError, PostgresError
from sqlalchemy import text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from stages.contract.errors import UserError

_DRIVER = "postgresql+asyncpg"
_EXAMPLE = "write it as postgresql://USER:PASSWORD@HOST:5432/DATABASE"
_CONNECT_SECONDS = 15.0


def parse_database(address: str) -> URL:
    """The address of a PostgreSQL database, with the driver that Prefect needs.

    Args:
        address: ``postgresql://…`` as libpq takes it, ``postgres://…`` or ``postgresql+asyncpg://…``.

    Raises:
        UserError: It is none of them.
    """
    try:
        url = make_url(address)
    except ArgumentError as error:
        # Not the address itself: it may hold a password.
        raise UserError("--database is not the address of a database", _EXAMPLE) from error
    if url.drivername not in ("postgres", "postgresql", _DRIVER):
        raise UserError(
            f"--database: {url.drivername}:// is not PostgreSQL", f"{_EXAMPLE}, or leave it out"
        )
    if not url.database:
        raise UserError(f"--database {shown(url)} names no database", _EXAMPLE)
    query = dict(url.query)
    # The driver's name for libpq's setting; its values are the same.
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername=_DRIVER, query=query)


def shown(url: URL) -> str:
    """The address without its password."""
    return url.set(drivername="postgresql").render_as_string(hide_password=True)


def check_database(url: URL) -> None:
    """Connects to a database once.

    Raises:
        UserError: It does not let us in, is not there, or cannot hold Prefect's texts.
    """
    try:
        encoding = asyncio.run(_encoding(url))
    # The driver's own are not wrapped while it connects.
    except (OSError, PostgresError, InterfaceError, SQLAlchemyError, TypeError) as error:
        cause = error.__cause__ or error
        # asyncpg's own timeout has no words.
        raise UserError(
            f"--database {shown(url)} cannot be used: {str(cause) or type(cause).__name__}",
            "correct the address, or start PostgreSQL and create user and database",
        ) from error
    if encoding != "UTF8":
        raise UserError(
            f"--database {shown(url)} is encoded in {encoding}, and Prefect's texts in UTF-8",
            "create the database with: createdb --encoding UTF8 --template template0",
        )


async def _encoding(url: URL) -> str:
    engine = create_async_engine(
        url, poolclass=NullPool, connect_args={"timeout": _CONNECT_SECONDS}
    )
    async with engine.connect() as connection:
        found = await connection.execute(text("SHOW server_encoding"))
        return str(found.scalar_one())
