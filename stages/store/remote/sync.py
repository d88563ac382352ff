"""One computation of a key of a store in a bucket: inputs come down before it, results go up.

Runners of a host that holds the store's local folder do this around a stage. A stage in a pod that
shares no folder with its orchestrator does it by itself, see `stages/harness/from_bucket.py`; two
more folders of the bucket serve it::

    inputs/<digest>/<name>          files from outside the store, by their content
    orchestrators/<stage>/<key>     changes as long as the orchestrator lives
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from stages.contract.digests import files_of
from stages.contract.errors import ConflictError, DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Event, Log, Progress
from stages.contract.request import ArtifactInput, FileInput, Input, Request
from stages.store.base import Artifact, OnBytes
from stages.store.remote.store import RemoteStore
from stages.store.remote.transfer import download_folder, repeated, upload_files

OnEvent = Callable[[Event], None]

SIGN_SECONDS = 20.0
"""Time between two signs of an orchestrator, and between two looks for one."""
_MIB = 1 << 20
# Hosts that register at the same time take turns; each of them comes in here once a turn.
_REGISTRY_ATTEMPTS = 20
_INPUTS = "inputs"


@contextlib.contextmanager
def key_held(
    store: RemoteStore, request: Request, on_event: OnEvent, stopping: threading.Event
) -> Iterator[bool]:
    """Holds a key among the runs of this host; yields whether its artifact has to be computed."""
    lease = store.lease(request.stage, request.key)
    lease.acquire(
        waiting=lambda holder: on_event(
            Log(message=f"computed by pid {holder['pid']} on {holder['host']}; waiting for it")
        ),
        stopping=stopping,
    )
    with lease:
        found = store.find(request.stage, request.key, warn=_warner(on_event))
        if found is not None:
            on_event(Log(message="the store has it by now"))
        yield found is None


def compute(
    store: RemoteStore,
    request: Request,
    run: Callable[[Request], object],
    *,
    sync_seconds: float,
    on_event: OnEvent,
    stopping: threading.Event,
) -> None:
    """Makes the artifact of a request in this host's local folder, and uploads it.

    Args:
        store: The store.
        request: What to compute.
        run: Runs the stage on a request whose store is the local folder.
        sync_seconds: How often the state of a running stage (checkpoints, chunks) goes to the
            bucket.
        on_event: Gets messages and the progress of transfers.
        stopping: Ends waits and transfers.
    """
    with key_held(store, request, on_event, stopping) as is_wanted:
        if not is_wanted:
            return
        attempt = _Attempt(store, request, on_event, stopping)
        if request.writes_registry:
            # Nobody knows whether the registry records of an unpushed artifact were pushed.
            store.drop_local(request.stage, request.key)
        artifact = store.unpushed(request.stage, request.key)
        if artifact is None:
            artifact = attempt.made(run, sync_seconds)
        store.push(artifact, attempt.shown("MiB uploaded"))
        store.work(request.stage, request.key).drop()


class _Attempt:
    """One attempt at a request that the bucket does not have; arguments as of :func:`compute`."""

    def __init__(
        self, store: RemoteStore, request: Request, on_event: OnEvent, stopping: threading.Event
    ) -> None:
        self._store = store
        self._request = request
        self._on_event = on_event
        self._stopping = stopping

    def made(self, run: Callable[[Request], object], sync_seconds: float) -> Artifact:
        """The artifact as the stage left it in the local folder."""
        store, request = self._store, self._request
        local = with_inputs(request, self._fetched)
        local = local.model_copy(update={"store": str(store.local.root)})
        work = store.work(request.stage, request.key)
        try:
            if work.pull(self.shown("MiB of the last attempt")):
                self._on_event(Log(message="goes on from where an attempt on another host ended"))
        except DamagedArtifactError as error:
            _warner(self._on_event)(f"{error}; this attempt begins from the start")
        for attempt in range(1, _REGISTRY_ATTEMPTS + 1):
            registry = (
                store.exclusive("models") if request.writes_registry else contextlib.nullcontext()
            )
            try:
                with registry, work.pushed_every(sync_seconds):
                    run(local)
                break
            except ConflictError:
                # It was decided on records that another host has changed since.
                store.drop_local(request.stage, request.key)
                if attempt == _REGISTRY_ATTEMPTS:
                    raise
                message = "another host changed the model registry; decides again"
                self._on_event(Log(message=message))
        artifact = store.local.load(request.stage, request.key)
        if artifact is None:
            raise DamagedArtifactError(
                f"{request.place} ended well, but left no artifact "
                f"{request.stage}/{request.key[:12]} in {store.local.root}"
            )
        return artifact

    def _fetched(self, source: Input) -> Input:
        """An input that is on this host.

        Raises:
            DamagedArtifactError: The bucket does not have it as the request names it.
        """
        store = self._store
        if isinstance(source, FileInput) and "://" in source.location:
            place = store.root / source.location.removeprefix(f"{store.location}/")
            folder = place.parent.relative_to(store.root).as_posix()
            download_folder(store.bucket, folder, place.parent, self.shown("MiB of inputs"))
            return source.model_copy(update={"location": str(place)})
        if not isinstance(source, ArtifactInput):
            return source
        artifact = store.find(source.stage, source.key, warn=_warner(self._on_event))
        if artifact is None or artifact.manifest.digest(source.path) != source.digest:
            raise DamagedArtifactError(
                f"{store.location} has no artifact {source.stage}/{source.key[:12]} with digest "
                f"{source.digest[:12]} any more; run again to make it anew"
            )
        artifact.file(source.path, on_bytes=self.shown("MiB of inputs"))
        return source

    def shown(self, unit: str) -> OnBytes:
        """Shows the progress of a transfer, and ends it with the run."""

        def show(done: int, total: int) -> None:
            if self._stopping.is_set():
                raise StoppedError(f"stopped at {done} of {total} bytes")
            if total >= _MIB:
                self._on_event(Progress(done=done // _MIB, total=total // _MIB, unit=unit))

        return show


def with_inputs(request: Request, change: Callable[[Input], Input]) -> Request:
    """A request each of whose inputs is what ``change`` makes of it."""
    inputs = {name: tuple(change(each) for each in group) for name, group in request.inputs.items()}
    return request.model_copy(update={"inputs": inputs})


def sent_input(store: RemoteStore, source: FileInput) -> FileInput:
    """A file or folder from outside the store, uploaded unless the bucket has it."""
    place, folder = Path(source.location), f"{_INPUTS}/{source.digest}"
    there = store.bucket.list(folder)
    names = {each.relative_to(place.parent).as_posix(): each for each in _files_at(place)}
    missing = [
        (path, f"{folder}/{name}")
        for name, path in names.items()
        if name not in there or there[name].size != path.stat().st_size
    ]
    upload_files(store.bucket, missing)
    # A state that no file has: whoever brings it down hashes it, however large it is.
    location = f"{store.location}/{folder}/{place.name}"
    return source.model_copy(update={"location": location, "state": "sent"})


def _files_at(place: Path) -> Iterator[Path]:
    return iter([place]) if place.is_file() else iter(files_of(place))


@contextlib.contextmanager
def signs_of_life(store: RemoteStore, request: Request) -> Iterator[None]:
    """Within the block the bucket shows that this orchestrator lives."""
    name = _sign_name(request)

    def show() -> None:
        store.bucket.put(name, uuid.uuid4().hex.encode())

    show()
    try:
        with repeated(SIGN_SECONDS, show):
            yield
    finally:
        with contextlib.suppress(StoreError):
            store.bucket.delete([name])


@contextlib.contextmanager
def signs_passed_on(store: RemoteStore, request: Request, sign: Path) -> Iterator[None]:
    """Within the block a file of this host changes as long as the orchestrator lives.

    A bucket that does not answer says nothing about the orchestrator, which counts as alive.
    """
    seen = ""

    def look() -> None:
        nonlocal seen
        try:
            found = store.bucket.get(_sign_name(request))
            etag = found.etag if found else seen
        except StoreError:
            etag = uuid.uuid4().hex
        if etag != seen:
            seen = etag
            sign.touch()

    with repeated(SIGN_SECONDS, look):
        yield


def _sign_name(request: Request) -> str:
    return f"orchestrators/{request.stage}/{request.key}"


def _warner(on_event: OnEvent) -> Callable[[str], None]:
    return lambda message: on_event(Log(level="warning", message=message))
