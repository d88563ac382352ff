"""Protocol of a place that starts stages, and what several places have in common.

A :class:`Place` says how a stage is found and started there, and its :class:`Work` how the stage is
followed and removed; the :class:`~flows.runners.runner.Runner` does the rest, which is the same
everywhere.
"""

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog
from flows.runners.command_lines import stage_command, supervised
from flows.runners.ending import Ending
from stages.contract.errors import GebError, PreemptedError
from stages.contract.events import Log, OnEvent
from stages.contract.request import Request
from stages.store.base import Store
from stages.store.locks import EXPIRY_SECONDS

KEY_CHARACTERS = 12
"""Characters of its key in the name of work."""
# Between two looks at the wish to stop.
_LOOK_SECONDS = 0.2


class PlaceAwayError(PreemptedError):
    """The place does not answer; the next attempt takes over what still runs there."""


class NoRoomError(GebError):
    """The place has no room for the stage now, and is asked again."""


class PlaceNotice(Log):
    """A line on a stage's place; `geb status` shows the last one while the stage is at work."""

    waits: bool = False
    """True if the stage waits for its place."""


@dataclass(frozen=True)
class StageJob:
    """One attempt at a request, as a place starts and follows it.

    Attributes:
        store: The request's store, in a folder of this host.
        request_path: Path of the request's file.
        log: The attempt's log, for all that the stage prints.
        on_event: Hears the stage's events, in the thread that starts and follows it.
        stopping: Set when the run stops: the stage then gets its grace period and ends.
        check_owner: Raises if another orchestrator has taken the stage over.
    """

    request: Request
    store: Store
    request_path: str
    log: AttemptLog
    on_event: OnEvent
    stopping: threading.Event
    check_owner: Callable[[], None] = lambda: None
    _noticed: set[str] = field(default_factory=set)

    def notice(self, message: str, *, waits: bool = False) -> None:
        """Shows a line on the stage's place, or on what it waits for, once."""
        if message not in self._noticed:
            self._noticed.add(message)
            self.on_event(PlaceNotice(message=message, waits=waits))

    def handle_line(self, line: str) -> None:
        """Handles a line of the stage's output, an event or a line for the log."""
        self.log.handle_line(line, self.on_event)


class Work(Protocol):
    """A stage at work at a place: its process, its container, its job, its pods."""

    @property
    def title(self) -> str:
        """Kind and name of the work, for people: `job 12`."""

    def follow(self) -> Ending:
        """Passes on what the stage prints and returns how it ended.

        Once ``job.stopping`` is set, the stage is asked to end and gets its grace period. Where it
        outlives its orchestrator, ``job.check_owner`` is called every few seconds.

        Raises:
            PlaceAwayError: The place has not answered for long. The stage may go on; after every
                other error the runner removes it.
        """

    def remove(self) -> None:
        """Ends the stage if it is still at work, and removes what is left of it."""


class Place(Protocol):
    """Somewhere that starts stages. Safe to use from several threads."""

    def find(self, job: StageJob) -> Work | None:
        """Finds what a dead orchestrator left at this key, and removes what cannot be followed.

        None if there is none, as at places where no stage outlives its orchestrator.
        """

    def start(self, job: StageJob) -> Work:
        """Starts the stage, or puts it into the place's queue; an error leaves nothing there.

        Raises:
            NoRoomError: The place takes no stage now; the runner asks again.
            UserError: It would refuse the stage at every try.
        """


@contextlib.contextmanager
def ends_when(stopping: threading.Event, end: Callable[[], None]) -> Iterator[None]:
    """Calls ``end`` in a thread once ``stopping`` is set, unless the block has ended."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            if stopping.is_set():
                end()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def work_name(request: Request) -> str:
    """Name of new work for a request, for people and for who looks for it by its key.

    A number after it leaves it a DNS label, as pods need it.
    """
    title = re.sub("[^a-z0-9]+", "-", f"{request.run}-{request.title}".lower())
    # The end tells more.
    title = title[-35:].strip("-")
    return f"geb-{title}-{request.key[:KEY_CHARACTERS]}-{uuid.uuid4().hex[:6]}"


def node_commands(
    python: str, request: Request, execution: Execution, address: str, cache: str = ""
) -> list[list[str]]:
    """Commands of a stage's nodes, each under its supervisor, the first node's first.

    A stage whose request has its address in a bucket works in the node's folder ``cache``.
    """
    options: list[str] = []
    if execution.on_orchestrator_death == "stop":
        store = Store(Path(cache if "://" in address else request.store))
        sign = store.orchestrator_path(request.stage, request.key)
        options = ["--sign", str(sign), "--sign-seconds", str(EXPIRY_SECONDS)]
    work = str(Store(Path(request.store)).work_path(request.stage, request.key))
    grace_seconds = execution.grace_seconds
    first = stage_command(request, address, python, grace_seconds, *options)
    # The others end with the first one.
    other = supervised(python, grace_seconds, *options, program=["stages.training.node", work])
    return [first, *[other] * (request.resources.nodes - 1)]


def writable_folders(request: Request) -> list[Path]:
    """Folders of the store that a stage writes to; it sees the rest read-only."""
    # Not opened: of a store that is not there yet, too, the folders are known.
    store = Store(Path(request.store))
    folders = [
        store.root / "artifacts" / request.stage,
        store.root / "leases" / request.stage,
        store.work_path(request.stage, request.key),
        store.log_path(request.stage, request.key),
    ]
    if request.writes_registry:
        folders.append(store.root / "models")
    return folders


def chown_outputs(request: Request, uid: int, gid: int) -> None:
    """Makes the folders that a stage writes to, and gives them to its user.

    Only root can give something away, and only root has to: any other orchestrator's stages run
    as itself.
    """
    folders = writable_folders(request)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or uid == 0:
        return
    artifacts, leases, *rest = folders
    # Also the files of earlier attempts, perhaps by another runner. Finished artifacts and the
    # leases of other keys stay as they are.
    paths = [*folders, *leases.glob(f"{request.key}*")]
    for folder in (*rest, *artifacts.glob(f".scratch-{request.key}-*")):
        for place, _, files in os.walk(folder):
            paths += [Path(place) / name for name in (".", *files)]
    for path in paths:
        # Other stages end meanwhile, and rename or remove theirs.
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, uid, gid, follow_symlinks=False)
