"""Log and request file of each attempt at a stage, kept in the store."""

import os
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from stages.contract.events import Failure, Log, OnEvent, escape_controls, parse_event
from stages.contract.request import Request
from stages.store.base import Store

# In UTC: hosts of several time zones may share a store, and clocks are put back in autumn.
_STARTED = "%Y%m%d-%H%M%SZ"
# Last lines of a failed stage's log that people see; the message names the file, which has all.
_KEPT_LINES = 30
LONGEST_LINE = 1 << 20
"""Bytes after which what has no end counts as a line."""
# As tqdm draws it: `45%|████▌     | 9/20 [00:03<00:04]`.
_PROGRESS_BAR = re.compile(r"\d%\|.*\|")


def new_log(store: Store, request: Request) -> Path:
    """Path for the log of a new attempt at a request, named by its start; its folder is made."""
    stamp = time.strftime(_STARTED, time.gmtime())
    folder = store.log_path(request.stage, request.key)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{stamp}-{os.getpid()}-{uuid.uuid4().hex[:6]}.log"
    return folder / name


def write_request(request: Request, log: Path) -> str:
    """Writes the request next to the log of its attempt; returns its path."""
    path = log.with_suffix(".json")
    request.write(path)
    # A request holds no secrets, and its stage may run as another user in a container.
    path.chmod(0o644)
    return str(path)


class AttemptLog:
    """Log of one attempt; its last lines and its failure event explain the attempt's error."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path = path
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.failure: Failure | None = None
        self._file = file

    def quote(self, line: str) -> None:
        """Keeps a line for the error, unless it is the bar by which a library shows progress."""
        if not _PROGRESS_BAR.search(line):
            self.lines.append(escape_controls(line.rstrip("\n")))

    def write(self, line: str, *, quoted: bool = True) -> None:
        """Writes one line, its end included; a ``quoted`` one may help to explain a failure."""
        if quoted:
            self.quote(line)
        # A full disk must not stop the reading, on which the stage would wait.
        with suppress(OSError):
            self._file.write(line)
            self._file.flush()

    def handle_line(self, line: str, on_event: OnEvent) -> None:
        """Handles a line of a stage's output: passes an event on, writes anything else."""
        event = parse_event(line)
        if event is None:
            self.write(line)
            return
        if isinstance(event, Log):
            self.write(f"[{event.level}] {event.message}\n")
        elif isinstance(event, Failure):
            word = "stopped" if event.kind == "stopped" else "error"
            remedy = f"\nremedy: {event.remedy}" if event.remedy else ""
            # The error has the event itself.
            self.write(f"[{word}] {event.message}{remedy}\n", quoted=False)
            self.failure = event
        on_event(event)


def whole_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines of a stream that comes in chunks, each with its end."""
    unread = b""
    for data in chunks:
        *lines, unread = (unread + data).split(b"\n")
        # A progress bar may never end its line.
        if len(unread) > LONGEST_LINE:
            lines.append(unread)
            unread = b""
        for line in lines:
            yield line.decode(errors="replace") + "\n"
    if unread:
        yield unread.decode(errors="replace") + "\n"
