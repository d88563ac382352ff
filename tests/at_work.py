"""Stages at work in any runner, while a test looks at them."""

import contextlib
import threading

from stages.contract.events import Log


def hangs(event):
    """True once a probe has said that it does nothing more."""
    return isinstance(event, Log) and event.message.startswith("pids ")


def said(events):
    """Messages of the log among events."""
    return [event.message for event in events if isinstance(event, Log)]


class AtWork:
    """A stage that runs in a thread.

    Args:
        until: Says of an event whether it was waited for.
    """

    def __init__(self, request, runner, until):
        self.heard = []
        self.error = None
        self._until = until
        self._there = threading.Event()
        self.request = request
        self._runner = runner
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self):
        try:
            self._runner.run(self.request, self._hear)
        except BaseException as error:
            self.error = error
        self._there.set()

    def _hear(self, event):
        self.heard.append(event)
        if self._until(event):
            self._there.set()

    @property
    def pids(self):
        """The processes of a probe that has said that it does nothing more."""
        [line] = [line for line in said(self.heard) if line.startswith("pids ")]
        return [int(pid) for pid in line.split()[1:]]

    def wait(self):
        """Returns when the event has come."""
        assert self._there.wait(900)
        assert self.error is None, self.error

    def join(self):
        """Waits for the end and returns the error that it raised."""
        self._thread.join()
        return self.error


@contextlib.contextmanager
def at_work(request, runner, until=hangs):
    """A stage at work while the test looks at it; it is stopped afterwards."""
    work = AtWork(request, runner, until)
    try:
        work.wait()
        yield work
    finally:
        runner.stop_all()
        work.join()
