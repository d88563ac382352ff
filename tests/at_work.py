"""Probes that hang in whatever runner, while a test looks at them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from flows.runners.base import Runner
from stages.contract.events import Event, Log
from stages.contract.request import Request


class AtWork:
    """A probe that runs in a thread.

    Args:
        request: The probe, which hangs.
        runner: Runs it.
    """

    def __init__(self, request: Request, runner: Runner) -> None:
        self.heard: list[Event] = []
        self.error: BaseException | None = None
        self._hangs = threading.Event()
        self._request = request
        self._runner = runner
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._runner.run(self._request, self._hear)
        except BaseException as error:
            self.error = error
            self._hangs.set()

    def _hear(self, event: Event) -> None:
        self.heard.append(event)
        if isinstance(event, Log) and event.message.startswith("pids "):
            self._hangs.set()

    def wait_until_it_hangs(self) -> None:
        """Returns when the stage has said that it does nothing more."""
        assert self._hangs.wait(120)
        assert self.error is None, self.error

    def join(self) -> BaseException | None:
        """Waits for the end and returns the error that it raised."""
        self._thread.join()
        return self.error


@contextlib.contextmanager
def at_work(request: Request, runner: Runner) -> Iterator[AtWork]:
    """A probe that hangs while the test looks at it; it is stopped afterwards."""
    work = AtWork(request, runner)
    try:
        work.wait_until_it_hangs()
        yield work
    finally:
        runner.stop_all()
        work.join()
