"""Prefect's command line, with a server that is patient with SQLite and closed to web pages.

Prefect's server answers every origin, and looks at no Host: any page that a person has open could
start runs, which run code. Here a request with another origin than the server's own, or for
another host than this machine, is refused.

A transaction of Prefect's server begins with reading. Where another one writes before it does,
SQLite refuses its own write at once (SQLITE_BUSY_SNAPSHOT), whatever time it may wait for locks,
and the server answers 503. Prefect's Python client then asks again; its UI shows the person an
error. So the server asks itself again: what it refuses this way, it has not done.

    python -m flows.standing.patient_server server start --port 4200
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_UNAVAILABLE = 503
ALLOWED_HOSTS = "GEB_ALLOWED_HOSTS"
"""Variable with further host names of the server, separated by commas: those of a proxy."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# Together some 12 seconds; a database that is gone for longer is another matter.
PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0)


class Guarded:
    """An ASGI application that other sites' pages and rebound names cannot reach.

    Args:
        app: The application.
        hosts: Host names under which it may be asked, without ports.
    """

    def __init__(self, app: App, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {each.lower() for each in hosts}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] in ("http", "websocket") and (reason := self._refusal(scope)):
            await _refuse(scope, reason, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Message) -> str | None:
        """Why a request is refused; None for one that is served."""
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if _name_of(f"//{host}") not in self._hosts:
            return (
                f"the host {host!r} is not a name of this server; {ALLOWED_HOSTS} takes further "
                "names, separated by commas"
            )
        # Another port of the same host may be another program's page.
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return f"pages of {origin!r} may not use this server"
        return None


def _name_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


async def _refuse(scope: Message, reason: str, send: Send) -> None:
    if scope["type"] == "websocket":
        # Before it is accepted: the server answers 403.
        await send({"type": "websocket.close", "code": 1008, "reason": reason[:120]})
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})


class Patient:
    """An ASGI application that answers 503 to a write only where trying again does not help.

    Args:
        app: The application.
        pauses_seconds: Pauses before each further attempt.
    """

    def __init__(self, app: App, pauses_seconds: tuple[float, ...] = PAUSES_SECONDS) -> None:
        self._app = app
        self._pauses_seconds = pauses_seconds

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one connection."""
        if scope["type"] != "http" or scope["method"] not in _WRITES:
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        for pause in self._pauses_seconds:
            if await _answered(self._app, scope, body, receive, send):
                return
            # Writes that were refused together must not come back together.
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        await self._app(scope, _replayed(body, receive), send)


async def _whole(receive: Receive) -> list[Message]:
    """Messages of a request to the end of its body, or to the client's leaving."""
    messages = [await receive()]
    while messages[-1].get("more_body"):
        messages.append(await receive())
    return messages


def _replayed(body: list[Message], receive: Receive) -> Receive:
    waiting = list(body)

    async def replay() -> Message:
        return dict(waiting.pop(0)) if waiting else await receive()

    return replay


async def _answered(
    app: App, scope: Message, body: list[Message], receive: Receive, send: Send
) -> bool:
    """True where the application answered something else than 503, which is not passed on."""
    refused = False

    async def passed_on(message: Message) -> None:
        nonlocal refused
        if message["type"] == "http.response.start":
            refused = message["status"] == _UNAVAILABLE
        if not refused:
            await send(message)

    try:
        # Middleware leaves its marks on the scope.
        await app(dict(scope), _replayed(body, receive), passed_on)
    except Exception:
        # Starlette raises an error again once it has answered it, for the server's log.
        if not refused:
            raise
    return not refused


def main() -> None:
    """Runs Prefect's command line with servers that are patient and guarded."""
    # Imported here: Prefect's server takes seconds to load, and tests of the class do without it.
    import prefect.cli
    import prefect.server.api.server as api

    made = api.create_app
    further = [each.strip() for each in os.environ.get(ALLOWED_HOSTS, "").split(",")]
    hosts = {*_LOOPBACK, *filter(None, further)}

    def create_app(*arguments: Any, **options: Any) -> Guarded:
        return Guarded(Patient(made(*arguments, **options)), hosts)

    # `prefect server start` looks the function up there when it starts.
    vars(api)["create_app"] = create_app
    prefect.cli.app()


if __name__ == "__main__":
    main()
