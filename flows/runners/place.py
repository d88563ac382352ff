"""One runner for every place that starts stages beyond this process: containers, pods, jobs.

A :class:`Place` says how a stage is found, submitted, followed and ended there; the
:class:`PlaceRunner` does the rest, which is the same everywhere.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from flows.runners.attempt_log import AttemptLog, new_log
from flows.runners.base import FailureTail, OnEvent
from flows.runners.local.outputs import remove_empty_work
from flows.runners.outcome import Ending, raise_for
from stages.contract.errors import LeaseLostError, StageFailedError
from stages.contract.events import Log
from stages.contract.request import Request


class PlaceAwayError(StageFailedError):
    """The place does not answer; the next attempt takes over what still runs there."""


class ComputedElsewhereError(Exception):
    """Another run's work has put the artifact into the store meanwhile."""


class Work(Protocol):
    """A stage at work at a place: its container, its job, its pods."""

    @property
    def title(self) -> str:
        """What it is and how it is called there, for people."""
        ...

    @property
    def num_nodes(self) -> int:
        """Number of its nodes, each of which has a log."""
        ...


W = TypeVar("W", bound=Work)

_STOP_SECONDS = 300.0
"""Longest wait for work that was told to end: a queue may never let go of it."""


class Place(Protocol[W]):
    """Somewhere that starts stages. Safe to use from several threads."""

    name: str

    def owning(
        self, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        """The right to look after a key; what it yields raises once the right is lost."""
        ...

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> W | None:
        """Work of a dead orchestrator at this key, taken over.

        Raises:
            ComputedElsewhereError: Another run's work was waited for and has ended well.
        """
        ...

    def submit(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> W:
        """Starts the stage, or puts it into the place's queue."""
        ...

    def follow(
        self,
        work: W,
        request: Request,
        logs: Sequence[AttemptLog],
        on_event: OnEvent,
        stopping: threading.Event,
        check_owner: Callable[[], None],
    ) -> Sequence[Ending]:
        """Passes on what the nodes print and returns how each ended, the first node first.

        Raises:
            PlaceAwayError: The place has not answered for long.
        """
        ...

    def end(self, works: Sequence[W]) -> None:
        """Ends work, from any thread; stages get their grace period."""
        ...

    def close(self, work: W) -> None:
        """Removes what is left of work."""
        ...

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        ...


class PlaceRunner(Generic[W]):
    """Runs stages at a place: owns the key, finds or submits, follows, tells the end.

    Args:
        place: The place.
    """

    def __init__(self, place: Place[W]) -> None:
        self.name = place.name
        self._place = place
        self._live: list[W] = []
        self._changed = threading.Condition()
        self._stopping = threading.Event()

    def run(self, request: Request, on_event: OnEvent) -> None:
        """See :class:`flows.runners.base.Runner`."""
        place, stopping = self._place, self._stopping
        with place.owning(request, on_event, stopping) as check_owner:
            try:
                work = place.find(request, on_event, stopping)
            except ComputedElsewhereError:
                return
            if work is None:
                work = place.submit(request, on_event, stopping)
            else:
                on_event(Log(message=f"taking over {work.title}, which computes this already"))
            self._follow(work, request, on_event, check_owner)

    def stop_all(self) -> None:
        """See :class:`flows.runners.base.Runner`."""
        with self._changed:
            self._stopping.set()
            live = list(self._live)
        self._place.end(live)
        with self._changed:
            self._changed.wait_for(lambda: not self._live, _STOP_SECONDS)

    def has_running(self, request: Request) -> bool:
        """See :class:`flows.runners.base.Runner`."""
        return self._place.has_running(request)

    def _follow(
        self, work: W, request: Request, on_event: OnEvent, check_owner: Callable[[], None]
    ) -> None:
        paths = _log_paths(new_log(request), work.num_nodes)
        tails = [FailureTail() for _ in paths]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._live_work(work))
            logs = [
                AttemptLog(stack.enter_context(path.open("w", encoding="utf-8")), tail)
                for path, tail in zip(paths, tails, strict=True)
            ]
            endings = self._place.follow(work, request, logs, on_event, self._stopping, check_owner)
            logs[0].warn_if_incomplete(paths[0], on_event)
        remove_empty_work(request)
        raise_for(endings, tails, request, stopped=self._stopping.is_set(), logs=paths)

    @contextlib.contextmanager
    def _live_work(self, work: W) -> Iterator[None]:
        """Counts work among what is ended with the run; it is over and removed afterwards."""
        with self._changed:
            self._live.append(work)
        try:
            if self._stopping.is_set():
                self._place.end([work])
            yield
        except (LeaseLostError, PlaceAwayError):
            # The work is another orchestrator's by now, or will be the next attempt's.
            raise
        except BaseException:
            # Its events cannot be listened to any more, or it would never start.
            self._place.end([work])
            self._place.close(work)
            raise
        else:
            self._place.close(work)
        finally:
            with self._changed:
                self._live.remove(work)
                self._changed.notify_all()


def _log_paths(log: Path, nodes: int) -> list[Path]:
    return [log, *(log.with_suffix(f".node{node}.log") for node in range(1, nodes))]
