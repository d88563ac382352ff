"""A write that the server refused for want of its database's lock is tried again by the server."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from flows.standing.patient_server import Message, Patient, Receive, Send

CREATED, REFUSED, WRONG = 201, 503, 422


class Server:
    """Answers with the given statuses in turn, and keeps what it was asked."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        status = self.statuses.pop(0)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": f"answer {status}".encode()})
        if status == REFUSED:
            # As Starlette does with an error that it has answered.
            raise OSError("database is locked")


def asked(server: Server, method: str = "POST", pauses: int = 3) -> tuple[list[int], bytes]:
    """Statuses and body that a client of the patient server gets to see."""
    parts = [
        {"type": "http.request", "body": b"one ", "more_body": True},
        {"type": "http.request", "body": b"run", "more_body": False},
    ]
    seen: list[Message] = []

    async def receive() -> Message:
        return parts.pop(0)

    async def send(message: Message) -> None:
        seen.append(message)

    scope: dict[str, Any] = {"type": "http", "method": method}
    with contextlib.suppress(OSError):
        asyncio.run(Patient(server, (0.0,) * pauses)(scope, receive, send))
    return [each["status"] for each in seen if "status" in each], seen[-1]["body"]


def test_a_refused_write_is_asked_again_with_its_whole_body() -> None:
    server = Server(REFUSED, REFUSED, CREATED)
    assert asked(server) == ([CREATED], b"answer 201")
    assert server.bodies == [b"one run"] * 3


def test_a_write_that_stays_refused_is_answered_so_in_the_end() -> None:
    server = Server(*[REFUSED] * 4)
    assert asked(server, pauses=3) == ([REFUSED], b"answer 503")
    assert len(server.bodies) == 4


def test_other_answers_and_reads_are_passed_on_as_they_are() -> None:
    assert asked(Server(WRONG)) == ([WRONG], b"answer 422")
    assert asked(Server(REFUSED), "GET") == ([REFUSED], b"answer 503")
