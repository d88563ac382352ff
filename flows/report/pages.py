"""The reports of a store, served beside Prefect's UI, and the links that lead to them."""

import base64
import os
import secrets
from pathlib import Path
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SERVED_RUNS = "GEB_SERVED_RUNS"
"""Variable with the folder of a store's runs; the server of ``geb up`` shows the pages in it."""
REPORTS_PATH = "/reports"
"""Path of these pages on that server."""


class Pages:
    """The HTML pages below a folder, for who knows the password.

    A browser treats each page as a site of its own: what a model wrote into it reaches neither the
    server's API nor the password that Prefect's UI keeps. The password is ``NAME:PASSWORD``; an
    empty one is not asked for.
    """

    def __init__(self, folder: str, password: str) -> None:
        self._files = StaticFiles(directory=folder, check_dir=False)
        self._access = f"Basic {base64.b64encode(password.encode()).decode()}" if password else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        served: ASGIApp = self._files
        given = Headers(scope=scope).get("authorization", "")
        if self._access and not secrets.compare_digest(given.encode(), self._access.encode()):
            asks = {"WWW-Authenticate": 'Basic realm="reports"'}
            served = PlainTextResponse("the password, please", status_code=401, headers=asks)
        elif not scope["path"].endswith(".html"):
            served = PlainTextResponse("not a page", status_code=404)

        async def send_as_own_site(message: Message) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", b"sandbox allow-scripts allow-downloads")
                message["headers"] = [*message["headers"], policy]
            await send(message)

        await served(scope, receive, send_as_own_site)


def page_address(ui: str, page: str) -> str | None:
    """Address at which the server of ``geb up`` shows a page; None if it does not show it."""
    runs = os.environ.get(SERVED_RUNS)
    if not runs or not Path(page).is_relative_to(runs):
        return None
    return f"{ui.rstrip('/')}{REPORTS_PATH}/{quote(Path(page).relative_to(runs).as_posix())}"
