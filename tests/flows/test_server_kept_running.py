"""The watch over a command's own server, without a server."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.standing import server
from stages.contract.errors import GebError


def test_a_server_whose_log_was_removed_with_its_run_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    signals: list[tuple[int, int]] = []

    def start(*_: object) -> None:
        raise GebError("it does not start")

    monkeypatch.setattr(server, "start_server", start)
    monkeypatch.setattr(os, "kill", lambda *sent: signals.append(sent))
    ended = SimpleNamespace(stdin=object(), wait=lambda: 0)
    monkeypatch.setattr(server, "_lifelines", [])
    server._keep_running(ended, "http://127.0.0.1:1", tmp_path / "gone" / "server.log", said.append)
    assert said[-1] == "it does not start"
    assert signals == [(os.getpid(), signal.SIGTERM)]
