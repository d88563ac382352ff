"""Log and request file of each attempt at a stage, kept in the store."""

import calendar
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from flows.runners.base import FailureTail, OnEvent
from stages.contract.events import Failure, Log, parse_event
from stages.contract.request import Request
from stages.store.base import Store

# In UTC: hosts of several time zones may share a store, and clocks are put back in autumn.
_STARTED = "%Y%m%d-%H%M%SZ"


def new_log(request: Request) -> Path:
    """Path for the log of a new attempt at a request, named by its start; its folder is made."""
    folder = Store.open(request.store).log_path(request.stage, request.key)
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime(_STARTED, time.gmtime())
    return folder / f"{stamp}-{os.getpid()}-{uuid.uuid4().hex[:6]}.log"


def attempt_logs(folder: Path) -> list[Path]:
    """Logs of the attempts at a key, without those of other nodes than the first."""
    return [path for path in folder.glob("*.log") if ".node" not in path.name]


def started(log: Path) -> float | None:
    """Start of an attempt by its log's name, in seconds since the epoch; None of any other log."""
    stamp = "-".join(log.stem.split("-")[:2])
    try:
        return calendar.timegm(time.strptime(stamp, _STARTED))
    except ValueError:
        return None


def left_log(store: Path, stage: str, key: str, name: str) -> Path:
    """Path for the output of an attempt whose orchestrator is dead; its folder is made."""
    folder = store / "logs" / stage / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"left-{name}.log"


def write_request(request: Request) -> str:
    """Writes the request where the stage's folder of logs keeps it and returns its path."""
    folder = Store.open(request.store).log_path(request.stage, request.key)
    folder.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix="request-", suffix=".json", dir=folder)
    os.close(descriptor)
    request.write(Path(name))
    # A request holds no secrets, and its stage may run as another user in a container.
    Path(name).chmod(0o644)
    return name


class AttemptLog(FailureTail):
    """Log of one attempt. Lines are read even when the disk is full: the stage must not block."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        super().__init__(path)
        self._file = file
        self.error: OSError | None = None
        self._lock = threading.Lock()
        self._ended = False

    def write(self, line: str, *, telling: bool = True) -> None:
        """Writes one line, its end included.

        With ``telling``, it may help to explain a failure.
        """
        if telling:
            self.add_line(line.rstrip("\n"))
        with self._lock:
            if self.error is not None or self._ended:
                return
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as error:
                self.error = error

    def end(self) -> None:
        """Takes no further lines: the file is about to be closed."""
        with self._lock:
            self._ended = True

    def handle_line(self, line: str, on_event: OnEvent) -> None:
        """Handles a line of a stage's stdout: passes an event on, writes anything else."""
        event = parse_event(line)
        if event is None:
            self.write(line)
            return
        if isinstance(event, Log):
            self.write(f"[{event.level}] {event.message}\n")
        elif isinstance(event, Failure):
            word = "stopped" if event.kind == "stopped" else "error"
            remedy = f"\nremedy: {event.remedy}" if event.remedy else ""
            # The tail has the event itself.
            self.write(f"[{word}] {event.message}{remedy}\n", telling=False)
            self.failure = event
        on_event(event)

    def warn_if_incomplete(self, on_event: OnEvent) -> None:
        """Warns when the log could not be written to its end."""
        if self.error is not None:
            message = f"the log {self.path} is not whole: {self.error.strerror}"
            on_event(Log(level="warning", message=message))

    def write_all(self, stream: Iterable[str]) -> None:
        """Writes all lines of a stream until it ends."""
        for line in stream:
            self.write(line)
