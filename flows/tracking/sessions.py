"""Sessions of a run with its trackers: figures are queued, and sent beside the run.

A tracker that fails, or does not answer, costs a warning and nothing else. The folder of the run
has on record what each session has got, so that a run which goes on adds to it what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.tracking import TRACKERS, Tracker
from flows.report.summary import Summary
from flows.runners.local.environment import stage_environment
from flows.tracking import program
from flows.tracking.updates import digest_of, links, updates
from stages.contract.atomic import write_atomically

# Time for the trackers to take what is left when the run is over.
_LAST_SECONDS = 60.0

Request = dict[str, Any]
Warn = Callable[[str], None]


class SessionRecord(BaseModel):
    """Session of a run with a tracker."""

    model_config = ConfigDict(extra="forbid")

    session: str
    """Its identity at the tracker, by which it is continued."""
    sent: dict[str, str] = Field(default_factory=dict)
    """Digest of each update that it has, by name."""


class TrackerError(Exception):
    """A tracker cannot be used any more."""


class Sessions:
    """Sessions of one run; use it through :func:`tracked`."""

    def __init__(self, config: RunConfig, record: RunRecord, warn: Warn) -> None:
        self._warn = warn
        self._sessions = [
            TrackerSession(name, config, record) for name in config.tracking.report_to
        ]

    def update(self, summary: Summary) -> None:
        """Sends the figures of the iterations that are done."""
        for each in self._sessions:
            each.put(summary)
        self._tell()

    def finish(self, summary: Summary, report: str) -> None:
        """Sends what is left, and the names and places that the run is linked with."""
        for each in self._sessions:
            each.put(summary, report)

    def close(self, ok: bool) -> None:
        """Ends the sessions; waits a limited time for trackers that are behind."""
        deadline = time.monotonic() + _LAST_SECONDS
        for each in self._sessions:
            each.close(ok)
        for each in self._sessions:
            each.join(deadline)
        self._tell()

    def _tell(self) -> None:
        for each in self._sessions:
            if message := each.take_error():
                self._warn(
                    f"tracker {each.tracker}: {message}; the run goes on without it, "
                    f"`geb resume` sends what it lacks (its output: {each.log})"
                )


@contextmanager
def tracked(config: RunConfig, record: RunRecord, warn: Warn) -> Iterator[Sessions]:
    """Sessions with the trackers of a run, ended after the block.

    Args:
        config: The run.
        record: Its folder.
        warn: Tells a person about a tracker that fails; called in the thread of the caller.
    """
    sessions = Sessions(config, record, warn)
    ok = False
    try:
        yield sessions
        ok = True
    finally:
        sessions.close(ok)


class TrackerSession:
    """Session with one tracker: a thread that talks to the tracker's process.

    Args:
        tracker: The tracker.
        config: The run.
        record: Its folder.
    """

    def __init__(self, tracker: Tracker, config: RunConfig, record: RunRecord) -> None:
        self.tracker = tracker
        self.log = record.path / TRACKERS / f"{tracker}.log"
        self._config = config
        self._record = record
        self._queue: queue.SimpleQueue[tuple[Summary, str | None] | bool] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._error: str | None = None
        self._thread = threading.Thread(target=self._serve, name=tracker, daemon=True)
        self._thread.start()

    def put(self, summary: Summary, report: str | None = None) -> None:
        """Queues a run's figures, and with a report its links; returns at once."""
        self._queue.put((summary, report))

    def close(self, ok: bool) -> None:
        """Asks for the end of the session once all is sent; returns at once."""
        self._queue.put(ok)

    def join(self, deadline: float) -> None:
        """Waits for the end until a deadline of the monotonic clock; kills the process then."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._error = f"it has not taken everything {_LAST_SECONDS:g} s after the run"
            if self._process is not None:
                self._process.kill()

    def take_error(self) -> str | None:
        """The error that ended the session, the first time that it is asked for."""
        error, self._error = self._error, None
        return error

    def _serve(self) -> None:
        try:
            self._talk()
        except TrackerError as error:
            self._error = self._error or str(error)
        except Exception as error:
            # Whatever it is, the run goes on; a person is told.
            self._error = self._error or f"{type(error).__name__}: {error}"
        finally:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()

    def _talk(self) -> None:
        known = self._known()
        while not isinstance(item := self._queue.get(), bool):
            summary, report = item
            for each in updates(summary):
                if known is None or known.sent.get(each.name) != each.digest:
                    known = self._open(known)
                    self._ask(do="log", axis=each.axis, points=each.points)
                    self._keep(known, each.name, each.digest)
            facts = links(summary, report) if report is not None else {}
            digest = digest_of(facts)
            if facts and (known is None or known.sent.get("links") != digest):
                known = self._open(known)
                self._ask(do="link", facts=facts)
                self._keep(known, "links", digest)
        if self._process is not None:
            self._ask(do="close", ok=item)

    def _open(self, known: SessionRecord | None) -> SessionRecord:
        """Starts the tracker's process where there is none yet."""
        if self._process is not None:
            assert known is not None
            return known
        self.log.parent.mkdir(parents=True, exist_ok=True)
        interpreter = self._config.execution.interpreters.get(TRACKERS, sys.executable)
        # With the keys of buckets: a tracker may keep its files in one.
        environment = stage_environment(in_bucket=False)
        with self.log.open("a") as output:
            self._process = subprocess.Popen(
                # -P: the folder of the program is no place to import from.
                [interpreter, "-P", str(Path(program.__file__).resolve())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                # Ctrl-C is for the run, which ends the session.
                start_new_session=True,
                env={name: value for name, value in environment.items() if name != "PYTHONPATH"},
            )
        answer = self._ask(
            do="open",
            tracker=self.tracker,
            project=self._config.tracking.project,
            run=self._record.name,
            session=known.session if known else None,
            folder=str(self._record.store.root / TRACKERS),
            config=json.loads(self._config.to_json()),
        )
        opened = SessionRecord(session=answer["session"], sent=known.sent if known else {})
        self._save(opened)
        return opened

    def _ask(self, **request: Any) -> Request:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        # A process that has ended may have left an answer that says why.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        answer: Request = json.loads(line) if line else {"error": "its process has ended"}
        if "error" in answer:
            raise TrackerError(answer["error"])
        return answer

    def _keep(self, known: SessionRecord, name: str, digest: str) -> None:
        known.sent[name] = digest
        self._save(known)

    def _known(self) -> SessionRecord | None:
        try:
            return SessionRecord.model_validate_json(self._place.read_text())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise TrackerError(f"{self._place} is damaged; remove it for a new session") from error

    def _save(self, known: SessionRecord) -> None:
        write_atomically(self._place, known.model_dump_json(indent=2))
        self._record.store.share(self._place)

    @property
    def _place(self) -> Path:
        return self._record.path / TRACKERS / f"{self.tracker}.json"
