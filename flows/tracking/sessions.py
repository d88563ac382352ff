"""Sessions of a run with its trackers: a process of each sends the run's figures to it.

A tracker that fails, or does not answer, costs a warning and nothing else. The folder of the run
has on record what each session has got, so that a run which goes on adds to it what it lacks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.execution.run_record import RunRecord
from flows.pipeline.config import RunConfig
from flows.pipeline.tracking import TRACKERS, Tracker
from flows.report.summary import Summary
from flows.runners.local.environment import stage_environment
from flows.tracking import program
from flows.tracking.updates import links, updates
from stages.contract.atomic import write_atomically
from stages.contract.digests import sha256_of

# Time for the trackers to take what is left when the run is over.
_LAST_SECONDS = 60.0

Warn = Callable[[str], None]


class Sessions:
    """Sessions of one run; use it through :func:`tracked`."""

    def __init__(self, config: RunConfig, record: RunRecord, warn: Warn) -> None:
        self._config = config
        self._record = record
        self._warn = warn
        self._folder = record.path / TRACKERS
        # What every session is to have; their processes look into the file.
        self._file = self._folder / "wanted.json"
        self._wanted: dict[str, dict[str, Any]] = {}
        self._processes: dict[Tracker, subprocess.Popen[bytes]] = {}
        self._failed: set[Tracker] = set()

    def update(self, summary: Summary, report: str | None = None) -> None:
        """Asks for the figures of the iterations that are done, and with a report for the links.

        It returns at once.
        """
        for tracker in self._config.tracking.report_to:
            with self._surviving(tracker):
                self._collect(summary, report)
                if tracker not in self._processes and not self._has_all(tracker):
                    self._processes[tracker] = self._start(tracker)
                self._check(tracker)

    def close(self, ok: bool) -> None:
        """Ends the sessions; waits a limited time for trackers that are behind."""
        deadline = time.monotonic() + _LAST_SECONDS
        for tracker, process in self._processes.items():
            with self._surviving(tracker):
                self._write(ok)
                assert process.stdin is not None
                process.stdin.close()
        for tracker in self._processes:
            with self._surviving(tracker):
                self._join(tracker, deadline)

    def _collect(self, summary: Summary, report: str | None) -> None:
        self._wanted = {
            name: {"axis": axis, "points": points} for name, axis, points in updates(summary)
        }
        if report is not None:
            self._wanted["links"] = {"facts": links(summary, report)}
        for each in self._wanted.values():
            each["digest"] = sha256_of(each)
        self._write(ok=False)

    def _write(self, ok: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        told = {
            "project": self._config.tracking.project,
            "run": self._record.name,
            "folder": str(self._record.store.root / TRACKERS),
            "config": self._config.to_values(),
            "wanted": self._wanted,
            "ok": ok,
        }
        write_atomically(self._file, json.dumps(told))

    def _state(self, tracker: Tracker) -> Path:
        """File in which a tracker's process keeps its session's id, and what it has sent."""
        return self._folder / f"{tracker}.json"

    def _log(self, tracker: Tracker) -> Path:
        return self._folder / f"{tracker}.log"

    def _has_all(self, tracker: Tracker) -> bool:
        if not (state := self._state(tracker)).exists():
            return False
        sent: dict[str, str] = json.loads(state.read_text())["sent"]
        return all(sent.get(name) == each["digest"] for name, each in self._wanted.items())

    def _start(self, tracker: Tracker) -> subprocess.Popen[bytes]:
        """Starts a tracker's process, which serves its session until its stdin is closed."""
        interpreter = self._config.execution.interpreters.get(TRACKERS, sys.executable)
        # With the keys of buckets: a tracker may keep its files in one.
        environment = stage_environment(in_bucket=False)
        environment.pop("PYTHONPATH", None)
        with self._log(tracker).open("a") as output:
            return subprocess.Popen(
                # -P: the folder of the program is no place to import from.
                [
                    *(interpreter, "-P", str(Path(program.__file__).resolve()), tracker),
                    *(str(self._file), str(self._state(tracker))),
                ],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                # Ctrl-C is for the run, which ends the session.
                start_new_session=True,
                env=environment,
            )

    def _join(self, tracker: Tracker, deadline: float) -> None:
        """Waits for a process until a deadline of the monotonic clock; kills it then."""
        process = self._processes[tracker]
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self._fail(tracker, f"it has not taken everything {_LAST_SECONDS:g} s after the run")
        self._check(tracker)
        if not self._has_all(tracker):
            self._fail(tracker, "its process has ended and has not taken everything")
        if self._state(tracker).exists():
            self._record.store.share(self._state(tracker))

    def _check(self, tracker: Tracker) -> None:
        process = self._processes.get(tracker)
        if process is not None and (code := process.poll()):
            last = (self._log(tracker).read_text().strip().splitlines() or ["no output"])[-1]
            self._fail(tracker, f"its process has ended with exit code {code}: {last}")

    def _fail(self, tracker: Tracker, message: str) -> None:
        """Gives a tracker up; a person hears of it once."""
        if tracker not in self._failed:
            self._warn(
                f"tracker {tracker}: {message}; the run goes on without it, "
                f"`geb resume` sends what it lacks (its output: {self._log(tracker)})"
            )
        self._failed.add(tracker)

    @contextmanager
    def _surviving(self, tracker: Tracker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Whatever it is, the run goes on, and its log says so.
            self._fail(tracker, f"{type(error).__name__}: {error}")


@contextmanager
def tracked(config: RunConfig, record: RunRecord, warn: Warn) -> Iterator[Sessions]:
    """Sessions with a run's trackers, ended after the block; ``warn`` tells of one that fails."""
    sessions = Sessions(config, record, warn)
    ok = False
    try:
        yield sessions
        ok = True
    finally:
        sessions.close(ok)
