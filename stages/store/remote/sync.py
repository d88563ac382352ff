"""One computation of a key of a store in a bucket: inputs come down before it, results go up.

Runners of a host that holds the store's local folder do this around a stage. A stage in a pod that
shares no folder with its orchestrator does it by itself, see `stages/harness/from_bucket.py`; two
more folders of the bucket serve it::

    inputs/<digest>/<name>          files from outside the store, by their content
    orchestrators/<stage>/<key>     changes as long as the orchestrator lives
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.contract.digests import files_of
from stages.contract.errors import ConflictError, DamagedArtifactError, StoppedError, StoreError
from stages.contract.events import Event, Log
from stages.contract.request import ArtifactInput, FileInput, Input, Request
from stages.store.base import Artifact
from stages.store.remote.store import RemoteStore
from stages.store.remote.transfer import download_folder, repeated, upload_files

OnEvent = Callable[[Event], None]

SIGN_SECONDS = 20.0
"""Time between two signs of an orchestrator, and between two looks for one."""
_INPUTS = "inputs"


@dataclass(frozen=True)
class Sync:
    """Transfers of one attempt at a request, whose key the caller holds on this host.

    ``on_event`` gets messages; ``stopping`` ends waits, and keeps transfers from beginning.
    """

    store: RemoteStore
    request: Request
    on_event: OnEvent
    stopping: threading.Event

    def compute(self, run: Callable[[Request], object], sync_seconds: float) -> None:
        """Makes the artifact in this host's local folder, and uploads it.

        ``run`` runs the stage on a request whose store is that folder. Its state (checkpoints,
        chunks) goes to the bucket every ``sync_seconds``.
        """
        store = self.store
        request = self.request
        if request.writes_registry:
            # Nobody knows whether the registry records of an unpushed artifact were pushed.
            store.drop_local(request.stage, request.key)
        artifact = store.unpushed(request.stage, request.key) or self._made(run, sync_seconds)
        # Without one, the executor reports that the stage left none.
        if artifact is not None:
            store.push(artifact)
            store.work(request.stage, request.key).drop()

    def _made(self, run: Callable[[Request], object], sync_seconds: float) -> Artifact | None:
        """The artifact as the stage left it in the local folder."""
        store = self.store
        request = self.request
        local = with_inputs(request, self._fetched)
        local = local.model_copy(update={"store": str(store.local.root)})
        work = store.work(request.stage, request.key)
        try:
            if work.pull():
                self._say("goes on from where an attempt on another host ended")
        except DamagedArtifactError as error:
            self._warn(f"{error}; this attempt begins from the start")
        while True:
            registry = (
                store.exclusive("models") if request.writes_registry else contextlib.nullcontext()
            )
            try:
                # The artifact may do without a snapshot that fails.
                with registry, repeated(sync_seconds, work.push):
                    run(local)
                break
            except ConflictError:
                # It was decided on records that another host has changed since.
                store.drop_local(request.stage, request.key)
                self._say("another host changed the model registry; decides again")
        return store.local.load(request.stage, request.key)

    def _fetched(self, source: Input) -> Input:
        """An input, on this host; DamagedArtifactError if the bucket has not what is asked."""
        store = self.store
        if self.stopping.is_set():
            raise StoppedError("stopped before the inputs were here")
        if isinstance(source, FileInput) and "://" in source.location:
            place = store.root / source.location.removeprefix(f"{store.location}/")
            folder = place.parent.relative_to(store.root).as_posix()
            download_folder(store.bucket, folder, place.parent)
            return source.model_copy(update={"location": str(place)})
        if not isinstance(source, ArtifactInput):
            return source
        artifact = store.find(source.stage, source.key, warn=self._warn)
        if artifact is None or artifact.manifest.digest(source.path) != source.digest:
            raise DamagedArtifactError(
                f"{store.location} has no artifact {source.stage}/{source.key[:12]} with digest "
                f"{source.digest[:12]} any more; run again to make it anew"
            )
        artifact.file(source.path)
        return source

    def _say(self, message: str) -> None:
        self.on_event(Log(message=message))

    def _warn(self, message: str) -> None:
        self.on_event(Log(level="warning", message=message))


def with_inputs(request: Request, change: Callable[[Input], Input]) -> Request:
    """A request each of whose inputs is what ``change`` makes of it."""
    inputs = {name: tuple(change(each) for each in group) for name, group in request.inputs.items()}
    return request.model_copy(update={"inputs": inputs})


def sent_input(store: RemoteStore, source: FileInput) -> FileInput:
    """A file or folder from outside the store, uploaded unless the bucket has it."""
    place = Path(source.location)
    folder = f"{_INPUTS}/{source.digest}"
    there = store.bucket.list(folder)
    files = [place] if place.is_file() else files_of(place)
    names = {each.relative_to(place.parent).as_posix(): each for each in files}
    missing = [
        (path, f"{folder}/{name}")
        for name, path in names.items()
        if name not in there or there[name].size != path.stat().st_size
    ]
    upload_files(store.bucket, missing)
    # A state that no file has: whoever brings it down hashes it, however large it is.
    location = f"{store.location}/{folder}/{place.name}"
    return source.model_copy(update={"location": location, "state": "sent"})


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
def signs_passed_on(store: RemoteStore, request: Request, home: Path) -> Iterator[None]:
    """Within the block a file below ``home`` changes as long as the orchestrator lives.

    A bucket that does not answer says nothing about the orchestrator, which counts as alive.
    """
    seen = ""
    sign = home / _sign_name(request)
    sign.parent.mkdir(parents=True, exist_ok=True)

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
