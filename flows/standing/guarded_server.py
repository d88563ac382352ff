"""Prefect's server, closed to other sites' pages.

Prefect's server answers every origin, and looks at no Host: any page that a person has open could
start runs, which run code. Here a request with another origin than the server's own, or for
another host than this machine, is refused.

    python -m uvicorn --factory flows.standing.guarded_server:create_app --port 4200
"""

import os
import re
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

ALLOWED_HOSTS = "GEB_ALLOWED_HOSTS"
"""Variable with further host names of the server, such as a proxy's, separated by commas."""
_HOSTS = ("127.0.0.1", "localhost", "[::1]")


class Guarded:
    """An ASGI application that other sites' pages and rebound names cannot reach.

    It may be asked under the names of ``hosts``, without ports.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.strip().lower() for host in hosts if host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        served = self._app
        if scope["type"] in ("http", "websocket") and (
            reason := self._refusal(Headers(scope=scope))
        ):
            served = PlainTextResponse(reason, status_code=403)
        await served(scope, receive, send)

    def _refusal(self, headers: Headers) -> str | None:
        """Why a request is refused; None for one that is served."""
        host = headers.get("host", "").lower()
        origin = headers.get("origin")
        if re.sub(r":\d+$", "", host) not in self._hosts:
            return (
                f"the host {host!r} is not a name of this server; {ALLOWED_HOSTS} takes further "
                "names, separated by commas"
            )
        # Another port of the same host may be another program's page.
        if origin is not None and origin.lower().partition("://")[2] != host:
            return f"pages of {origin!r} may not use this server"
        return None


def create_app() -> Guarded:
    """Makes Prefect's server, for loopback names and the names in ``GEB_ALLOWED_HOSTS``."""
    # Imported here: Prefect's server takes seconds to load, and tests of the class do without it.
    from prefect.server.api import server
    from prefect.server.database.configurations import AioSqliteConfiguration

    begin = AioSqliteConfiguration.begin_transaction

    def begin_as_writer(self: AioSqliteConfiguration, session: Any, **_: Any) -> Any:
        return begin(self, session, with_for_update=True)

    # SQLite lets a transaction that began as a reader write only if no other has written since; it
    # fails at once, "database is locked", whatever timeout is set. A writer waits for its turn.
    AioSqliteConfiguration.begin_transaction = begin_as_writer  # type: ignore
    further = os.environ.get(ALLOWED_HOSTS, "").split(",")
    return Guarded(server.create_app(final=True), (*_HOSTS, *further))
