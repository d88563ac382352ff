"""Log of a pod from an API server that is busy as the pod ends; no cluster is asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.client import INTERNAL_SERVER_ERROR, NOT_FOUND
from typing import Any, cast

import pytest
from kubernetes.client.exceptions import ApiException

from flows.runners.kubernetes import watch as logs
from flows.runners.kubernetes.client import Cluster
from flows.runners.kubernetes.watch import LogReader

LINES = [b"2026-01-01T00:00:00.1Z one", b"2026-01-01T00:00:00.2Z two"]


class Server:
    """An API server that follows the log up to its first line, and then gives some answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.followed = threading.Event()

    def log(self, name: str, *, follow: bool, since_seconds: int | None) -> Iterator[bytes]:
        if follow:
            yield LINES[0]
            self.followed.set()
            return
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        yield from answer


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([ApiException(INTERNAL_SERVER_ERROR), ConnectionResetError(), LINES], ["one\n", "two\n"]),
        ([ApiException(NOT_FOUND), LINES], ["one\n"]),
    ],
    ids=["busy", "gone"],
)
def test_the_last_lines_are_asked_for_until_there_is_an_answer(
    answers: list[Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_RETRY_SECONDS", 0.01)
    server, lines = Server(*answers), list[str]()
    reader = LogReader(cast(Cluster, server), "pod", lines.append)
    assert server.followed.wait(60)
    reader.finish(node_answers=True)
    assert lines == expected
    assert server.answers == ([LINES] if len(expected) == 1 else [])
