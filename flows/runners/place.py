"""Protocol of a place that starts stages, and what several places have in common.

A :class:`Place` says how a stage is found, submitted, followed and ended there; the
:class:`~flows.runners.runner.Runner` does the rest, which is the same everywhere.
"""

import contextlib
import math
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from flows.pipeline.placement import Execution
from flows.runners.attempt_log import AttemptLog, write_request
from flows.runners.base import Ending, OnEvent, program_of, supervised
from stages.contract.errors import StageFailedError
from stages.contract.request import Request
from stages.harness.from_bucket import SYNC_SECONDS_VARIABLE
from stages.store.base import Store
from stages.store.locks import EXPIRY_SECONDS, FileLease
from stages.store.opening import CACHE_VARIABLE, open_store


class PlaceAwayError(StageFailedError):
    """The place does not answer; the next attempt takes over what still runs there."""


class Work(Protocol):
    """A stage at work at a place: its container, its job, its pods."""

    @property
    def title(self) -> str:
        """What it is and how it is called there, for people."""

    @property
    def num_nodes(self) -> int:
        """Number of its nodes, each of which has a log."""


W = TypeVar("W", bound=Work)
T = TypeVar("T")

KEY_CHARACTERS = 12
"""Characters of its key in the name of work."""
ORCHESTRATOR_SECONDS = EXPIRY_SECONDS
"""Time without a sign of its orchestrator after which work that is not to be kept ends."""


class Place(Protocol[W]):
    """Somewhere that starts stages. Safe to use from several threads."""

    name: str

    def find(self, request: Request, on_event: OnEvent, stopping: threading.Event) -> W | None:
        """Work of a dead orchestrator at this key, taken over; what cannot be is removed."""

    def submit(
        self, request: Request, log: Path, on_event: OnEvent, stopping: threading.Event
    ) -> W:
        """Starts the stage, or puts it into the place's queue; ``log`` is its attempt's."""

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

    def end(self, works: Sequence[W]) -> None:
        """Ends work, from any thread; stages get their grace period."""

    def close(self, work: W) -> None:
        """Removes what is left of work."""


def work_name(request: Request) -> str:
    """Name of new work for a request, for people and for who looks for it by its key."""
    place = re.sub(r"[^a-zA-Z0-9.-]+", "-", request.place)
    key = request.key[:KEY_CHARACTERS]
    # It is the name of a file, too: at most 255 bytes.
    what = f"geb-{request.run}-{place}"[:200]
    return f"{what}-{key}-{uuid.uuid4().hex[:6]}"


def sign_of(store: str, stage: str, key: str) -> Path:
    """File that the orchestrator of a key renews while it lives."""
    return Path(store) / "orchestrators" / stage / key


def orchestrator_lease(store: str, stage: str, key: str) -> FileLease:
    """The right to look after the work at a key."""
    return FileLease(sign_of(store, stage, key))


def orphan_seconds(death: str) -> float:
    """Time without a sign of its orchestrator after which work ends; 0 if it goes on."""
    return ORCHESTRATOR_SECONDS if death == "stop" else 0


def request_address(request: Request, execution: Execution) -> str:
    """Writes a request; returns its file, or its place in a bucket for stages that fetch it."""
    path = write_request(request)
    url = Store.open(request.store).mirror_of
    if url is None or not execution.stages_fetch(url):
        return path
    return open_store(url).share(Path(path))


def node_commands(
    python: str, request: Request, execution: Execution, address: str, cache: str = ""
) -> list[list[str]]:
    """Commands of a stage's nodes, each under its supervisor, the first node's first.

    A stage whose request has its address in a bucket works in the node's folder ``cache``.
    """
    options: list[str] = []
    if seconds := orphan_seconds(execution.on_orchestrator_death):
        sign = sign_of(cache if "://" in address else request.store, request.stage, request.key)
        options = ["--sign", str(sign), "--sign-seconds", str(seconds)]
    work = str(Path(request.store) / "work" / request.stage / request.key)
    programs = [program_of(request, address)]
    programs += [["stages.training.node", work]] * (request.resources.nodes - 1)
    return [supervised(python, execution.grace_seconds, *options, program=p) for p in programs]


def fetching_variables(execution: Execution, cache: str) -> dict[str, str]:
    """Environment variables of a stage that fetches and sends, in its node's folder ``cache``."""
    return {CACHE_VARIABLE: cache, SYNC_SECONDS_VARIABLE: str(execution.sync_seconds)}


class Poller(Generic[T]):
    """Asks a place for all that is at work there, once in a while for all that wait for some of it.

    ``seconds`` is the shortest time between two questions; ``away`` are errors of a place that does
    not answer.
    """

    def __init__(
        self, ask: Callable[[], Mapping[str, T]], seconds: float, away: tuple[type[Exception], ...]
    ) -> None:
        self._ask = ask
        self._seconds = seconds
        self._away = away
        self._asking = threading.Lock()
        self._tried_at = -math.inf
        self._seen: tuple[float, Mapping[str, T]] = (-math.inf, {})

    def look(self) -> tuple[float, Mapping[str, T]]:
        """The last view of all work, and the time (of `time.monotonic`) at which it was asked for.

        A caller that finds it old asks anew, unless another one is just asking.
        """
        is_old = time.monotonic() - self._tried_at > self._seconds
        if is_old and self._asking.acquire(blocking=False):
            try:
                with contextlib.suppress(*self._away):
                    self._renew()
            finally:
                self._asking.release()
        return self._seen

    def hurry(self) -> None:
        """Makes the next look ask anew."""
        self._tried_at = -math.inf

    def _renew(self) -> None:
        began = self._tried_at = time.monotonic()
        self._seen = began, self._ask()


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
    for folder in writable_folders(request):
        folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0 or uid == 0:
        return
    for path in _to_give(request):
        os.chown(path, uid, gid, follow_symlinks=False)


def _to_give(request: Request) -> Iterator[Path]:
    store = Store.open(request.store)
    yield from writable_folders(request)
    if request.writes_registry:
        yield from (store.root / "models").rglob("*")
    # Files of earlier attempts, perhaps by another runner.
    yield from store.work_path(request.stage, request.key).rglob("*")
    yield from (store.root / "leases" / request.stage).glob(f"{request.key}*")
    for scratch in (store.root / "artifacts" / request.stage).glob(f".scratch-{request.key}-*"):
        yield scratch
        yield from scratch.rglob("*")
