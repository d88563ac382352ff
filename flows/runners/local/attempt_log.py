"""What an attempt at a stage leaves in the store besides its artifact: its request and its log."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from flows.runners.base import FailureTail, OnEvent
from stages.contract.events import Log, parse_event
from stages.contract.local_store import LocalStore
from stages.contract.request import Request


def new_log(request: Request) -> Path:
    """Path for the log of a new attempt; its folder is made."""
    folder = LocalStore.open(request.store).log_path(request.stage, request.key)
    folder.mkdir(parents=True, exist_ok=True)
    stem = time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}-{threading.get_ident() % 10**6}"
    return folder / f"{stem}.log"


def write_request(request: Request) -> str:
    """Writes the request where the stage's folder of logs keeps it and returns its path."""
    folder = LocalStore.open(request.store).log_path(request.stage, request.key)
    descriptor, name = tempfile.mkstemp(prefix="request-", suffix=".json", dir=folder)
    os.close(descriptor)
    request.write(Path(name))
    # A request holds no secrets, and its stage may run as another user in a container.
    Path(name).chmod(0o644)
    return name


class AttemptLog:
    """The log of one attempt. It goes on listening when its disk is full: the stage must not block.

    Args:
        file: Where the lines go.
        words: Remembers the last of them.
    """

    def __init__(self, file: IO[str], words: FailureTail) -> None:
        self._file = file
        self._words = words
        self.error: OSError | None = None

    def keep(self, line: str) -> None:
        """Writes one line, its end included."""
        self._words.lines.append(line.rstrip("\n"))
        if self.error is None:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                self.error = error

    def take(self, line: str, on_event: OnEvent) -> None:
        """Takes one line of a stage's stdout: an event is passed on, anything else is kept."""
        event = parse_event(line)
        if event is None:
            self.keep(line)
            return
        if isinstance(event, Log):
            self.keep(f"[{event.level}] {event.message}\n")
        self._words.hear(event)
        on_event(event)

    def tell_if_cut(self, path: Path, on_event: OnEvent) -> None:
        """Warns when the log could not be written to its end."""
        if self.error is not None:
            message = f"the log {path} is not whole: {self.error.strerror}"
            on_event(Log(level="warning", message=message))

    def copy(self, stream: Iterable[str]) -> None:
        """Keeps all lines of a stream until it ends."""
        for line in stream:
            self.keep(line)
