"""Prefect's command line, whose server tries a write again that SQLite refused.

A transaction of Prefect's server begins with reading. Where another one writes before it does,
SQLite refuses its own write at once (SQLITE_BUSY_SNAPSHOT), whatever time it may wait for locks,
and the server answers 503. Prefect's Python client then asks again; its UI shows the person an
error. So the server asks itself again: what it refuses this way, it has not done.

    python -m flows.standing.patient_server server start --port 4200
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_WRITES = ("POST", "PUT", "PATCH", "DELETE")
_UNAVAILABLE = 503
# Together some 12 seconds; a database that is gone for longer is another matter.
PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0)


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
    """Runs Prefect's command line with servers that are patient."""
    # Imported here: Prefect's server takes seconds to load, and tests of the class do without it.
    import prefect.cli
    import prefect.server.api.server as api

    made = api.create_app

    def create_app(*arguments: Any, **options: Any) -> Patient:
        return Patient(made(*arguments, **options))

    # `prefect server start` looks the function up there when it starts.
    vars(api)["create_app"] = create_app
    prefect.cli.app()


if __name__ == "__main__":
    main()
