"""Exhaustive interleavings of a few actors: real code, stopped at each lock that it takes or frees.

Actors are threads of which one runs at a time. Locks of `fcntl.flock` belong to open files, so that
actors exclude each other as processes do. Every order of their steps with at most so many switches
away from an actor that could go on is tried, each from the beginning.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Actor = Callable[[], None]
_flock = fcntl.flock


class DeadlockError(AssertionError):
    """No actor can go on."""


class _Thread(threading.Thread):
    def __init__(self, body: Actor, scheduler: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.body = body
        self.scheduler = scheduler
        self.turn = threading.Semaphore(0)
        self.waits_for: int | None = None
        self.error: BaseException | None = None
        self.ended = False

    def run(self) -> None:
        self.turn.acquire()
        try:
            self.body()
        except BaseException as error:
            self.error = error
        self.ended = True
        self.scheduler.release()

    def pause(self) -> None:
        self.scheduler.release()
        self.turn.acquire()

    def step(self) -> None:
        self.turn.release()
        self.scheduler.acquire()

    @property
    def can_go_on(self) -> bool:
        if self.ended or self.waits_for is None:
            return not self.ended
        try:
            _flock(self.waits_for, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        _flock(self.waits_for, fcntl.LOCK_UN)
        return True


def pause() -> None:
    """A place where another actor may go on; nothing for threads that are none."""
    thread = threading.current_thread()
    if isinstance(thread, _Thread):
        thread.pause()


def flock(file: object, operation: int) -> None:
    """`fcntl.flock` with a pause before and after; a wait lets the others go on."""
    thread = threading.current_thread()
    descriptor = file if isinstance(file, int) else file.fileno()  # type: ignore[attr-defined]
    pause()
    if isinstance(thread, _Thread) and operation == fcntl.LOCK_EX:
        thread.waits_for = descriptor
        while True:
            try:
                _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                thread.pause()
        thread.waits_for = None
    else:
        _flock(descriptor, operation)
    pause()


@contextmanager
def _patched() -> Iterator[None]:
    fcntl.flock = flock
    try:
        yield
    finally:
        fcntl.flock = _flock


def explore(make_actors: Callable[[], Sequence[Actor]], *, most_switches: int) -> int:
    """Runs the actors in every order; raises what the first of them raises.

    Args:
        make_actors: Prepares the world anew and gives the actors.
        most_switches: Switches away from an actor that could go on.

    Returns:
        How many orders there were.
    """
    pending: list[list[int]] = [[]]
    count = 0
    with _patched():
        while pending:
            prefix = pending.pop()
            count += 1
            choices, options = _run(make_actors(), prefix, most_switches)
            for place in range(len(prefix), len(choices)):
                others = [each for each in options[place] if each != choices[place]]
                pending += [[*choices[:place], each] for each in others]
    return count


def _run(
    actors: Sequence[Actor], prefix: list[int], most_switches: int
) -> tuple[list[int], list[list[int]]]:
    """One order: as ``prefix`` says, then without a switch. Returns choices, and all that were."""
    scheduler = threading.Semaphore(0)
    threads = [_Thread(actor, scheduler) for actor in actors]
    for thread in threads:
        thread.start()
    choices: list[int] = []
    options: list[list[int]] = []
    switches = 0
    while not all(thread.ended for thread in threads):
        able = [place for place, thread in enumerate(threads) if thread.can_go_on]
        if not able:
            raise DeadlockError(f"after the steps of {choices}")
        last = choices[-1] if choices else None
        if last in able and switches >= most_switches:
            able = [last]
        stay = last if last in able else able[0]
        chosen = prefix[len(choices)] if len(choices) < len(prefix) else stay
        switches += last in able and chosen != last
        choices.append(chosen)
        options.append(able)
        threads[chosen].step()
        if (error := threads[chosen].error) is not None:
            raise error
    for thread in threads:
        thread.join()
    return choices, options
